"""Which calls of a rollout become rows: one row per call, per rollout or branch, or per exact segment of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from capture.journal.call import Call
from capture.journal.redact import redact_text, secrets_seen
from capture.sequences.sequences import TRAINABLE_KINDS, TokenSequence
from train.rollouts.chat import answer_of, chat_of
from train.rollouts.messages import NotChat, PlainHistory, plain
from train.rollouts.rollouts import Rollout
from train.rows.branches import ContinuedChoice, branch_lines, last_line, usable_calls
from train.rows.formats.base import ConversationExample, Format, Origin, TokenExample
from train.rows.skip_reasons import LEFT_OUT_BY_OUTCOME, Tally
from train.tokens.call_summary import CallSummary
from train.tokens.rollout_tokens import RolloutTokens, one_call_sequence, read_tokens
from train.tokens.sampling import biasing, is_applied, not_plain, sentence, temperature_sentence

#: The finish reasons of a reply that reached its length limit: chat, Anthropic messages, OpenAI responses.
CUT: Final = frozenset({"length", "max_tokens", "incomplete"})
ROW_MODES: Final = ("rollout", "exchange", "segment")


@dataclass(frozen=True, slots=True)
class ExampleOptions:
    """Which examples are made of a rollout, and in what state."""

    form: Format
    row_mode: str = "rollout"
    redact: bool = False
    plain_sampling: bool = False


def conversation_examples(
    rollout: Rollout, origin: Origin, options: ExampleOptions, tally: Tally
) -> Iterator[ConversationExample]:
    """The conversations of a rollout that become rows, in file order."""
    lines = _lines(rollout, options, tally)
    continued: Callable[[Call], int] = ContinuedChoice(rollout)
    history = PlainHistory()
    for call in usable_calls(rollout, tally):
        if lines is not None and call.line not in lines:
            continue
        if options.plain_sampling and not_plain(call):
            tally.leave_out("not_plain_sampling")
            continue
        try:
            example = conversation_example(call, origin, continued(call), tally, history)
        except NotChat as error:
            tally.leave_out(error.reason)
            continue
        yield redacted(example) if options.redact else example


def _lines(rollout: Rollout, options: ExampleOptions, tally: Tally) -> set[int] | None:
    """The journal lines of the calls that become rows; None for all of them."""
    if options.row_mode == "exchange":
        return None
    if options.row_mode == "segment":
        tokens = read_tokens(rollout)
        lines = {segment.lines[-1] for segment in tokens.segments if segment.kind in TRAINABLE_KINDS}
        if not lines:
            tally.leave_out("no_capture" if tokens.status != "captured" else "no_exact_part")
        return lines
    if options.form.trains == "all":
        return branch_lines(rollout, tally)
    last = last_line(rollout)
    return set() if last is None else {last}


def conversation_example(
    call: Call, origin: Origin, choice: int, tally: Tally, history: PlainHistory
) -> ConversationExample:
    """One call as plain chat, with choice number `choice` as its reply. Raises `NotChat`."""
    chat = chat_of(call)
    if choice >= len(chat.choices):
        raise NotChat("no_assistant")
    prompt, answer = history.plain(chat.messages), plain([chat.choices[choice].message])
    reply = answer.messages[0] | {"role": "assistant"}
    if not reply["content"].strip() and not reply.get("tool_calls"):
        raise NotChat("no_assistant")
    if answer.reasoning:
        tally.note(
            "{n} row(s) end in a reply whose reasoning is left out: message rows have none; trl-sft-ids trains "
            "what was sampled"
        )
    if chat.choices[choice].finish_reason in CUT:
        tally.note(
            "{n} row(s) end in a reply that was cut at its length limit: the template closes it with a stop token that "
            "was never sampled, and the trainer learns it; trl-sft-ids has no such token"
        )
    usage = answer_of(call).get("usage")
    return ConversationExample(
        origin=origin,
        line=call.line,
        purpose=call.purpose,
        messages=prompt,
        reply=reply,
        tools=chat.tools,
        usage=usage if isinstance(usage, dict) else None,
        sampling=call.metadata.get("sampling"),
        finish_reason=chat.choices[choice].finish_reason,
        template_kwargs=chat.template_kwargs,
    )


def redacted(example: ConversationExample) -> ConversationExample:
    """The example with everything that looks like a secret replaced in its texts, tools and tool calls."""
    return replace(
        example,
        messages=_redact(example.messages),
        reply=_redact(example.reply),
        tools=_redact(example.tools),
    )


def _redact(value: Any) -> Any:
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, dict):
        return {name: _redact(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_redact(item) for item in value]
    return value


def token_examples(rollout: Rollout, origin: Origin, options: ExampleOptions, tally: Tally) -> Iterator[TokenExample]:
    """The exact token sequences of a rollout that become rows."""
    secret: set[int] = set()

    def find_secrets(call: Call) -> None:
        if call.metadata.get("secrets_seen") or secrets_seen([call.request_body, call.response_body]):
            secret.add(call.line)

    tokens = read_tokens(rollout, on_call=find_secrets if options.redact else None)
    by_line = {call.line: call for call in tokens.calls}
    tally.exchanges_seen += len(by_line)
    odd_calls: list[CallSummary] = []
    for segment, sequence in enumerate(_sequences(tokens, options, tally)):
        calls = [by_line[line] for line in sequence.lines]
        odd = [call for call in calls if call.not_plain]
        if not sequence.sampled:
            tally.leave_out("nothing_sampled")
        elif odd and options.plain_sampling:
            tally.leave_out("not_plain_sampling")
        elif secret.intersection(sequence.lines):
            tally.leave_out("secret_in_ids")
        else:
            odd_calls = odd_calls or odd
            yield TokenExample(
                origin, sequence, segment, [call.sampling | {"logprobs": call.logprobs.to_json()} for call in calls]
            )
    if odd_calls and options.form.notes_sampling:
        tally.note(f"{origin.rollout_dir}: {_sampling_note(odd_calls)}")


def _sampling_note(odd: Sequence[CallSummary]) -> str:
    """About the first call whose sampling biases ratios; else about the temperatures that the logprobs have applied."""
    for call in odd:
        if biases := biasing(call.not_plain, call.logprobs):
            return sentence(biases, call.logprobs)
    words = [word for call in odd for word in call.not_plain if is_applied(word, call.logprobs)]
    return temperature_sentence(list(dict.fromkeys(words)))


def _sequences(tokens: RolloutTokens, options: ExampleOptions, tally: Tally) -> list[TokenSequence]:
    if tokens.status != "captured":
        tally.leave_out("no_capture")
        return []
    if options.row_mode == "exchange":
        return [sequence for call in tokens.calls if (sequence := _single_call(call, tokens, tally)) is not None]
    if options.row_mode == "rollout" and not tokens.training_grade:
        tally.leave_out("not_training_grade")
        return []
    if not tokens.segments:
        tally.leave_out("no_exact_part")
    sequences = [segment for segment in tokens.segments if segment.kind in TRAINABLE_KINDS]
    tally.leave_out("side_sequence", len(tokens.segments) - len(sequences))
    if options.row_mode == "rollout" and options.form.one_row_a_rollout and len(sequences) > 1:
        tally.leave_out("branched")
        return []
    return sequences


def _single_call(call: CallSummary, tokens: RolloutTokens, tally: Tally) -> TokenSequence | None:
    """A call as a sequence of its own: its prompt, and the choice that the agent continued with."""
    if not call.answered:
        tally.leave_out(LEFT_OUT_BY_OUTCOME.get(call.outcome, "interrupted"))
        return None
    if call.kind not in TRAINABLE_KINDS:
        tally.leave_out("helper_call")
        return None
    capture = call.capture
    if capture is None or not capture.complete or capture.prompt_token_ids is None:
        tally.leave_out("not_captured")
        return None
    continued = (place.choice for place in tokens.placements.values() if place.parent == call.number and place.choice)
    return one_call_sequence(call, capture.prompt_token_ids, capture.completions[next(continued, 0)])
