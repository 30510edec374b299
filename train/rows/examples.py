"""Which calls of a rollout become rows: every exchange, one a rollout or branch, or one an exact segment of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from capture.journal.journal import Call
from capture.journal.redact import redact_text, secrets_seen
from capture.sequences.sequences import TRAINABLE_KINDS, Span, TokenSequence
from train.rollouts.messages import Growing, NotChat, answer_of, chat_of, plain
from train.rollouts.rollouts import Rollout
from train.rows.branches import Followed, branch_lines, last_line, usable
from train.rows.formats import Exchange, Format, Origin, Tokens
from train.rows.skip_reasons import Tally
from train.tokens.call_summary import CallSummary
from train.tokens.rollout_tokens import RolloutTokens, read_tokens
from train.tokens.sampling import not_plain, sentence

#: Why a reply ended where the limit on its length ended it: chat, Anthropic messages, OpenAI responses.
CUT = frozenset({"length", "max_tokens", "incomplete"})
ROW_MODES = ("rollout", "exchange", "segment")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which examples are wanted, and in what state."""

    form: Format
    row_mode: str = "rollout"
    redact: bool = False
    plain_sampling: bool = False


def exchanges(rollout: Rollout, origin: Origin, wanted: Wanted, tally: Tally) -> Iterator[Exchange]:
    """The conversations of a rollout that become rows, in the order their calls began within the file."""
    if wanted.row_mode == "exchange":
        lines: set[int] | None = None
    elif wanted.row_mode == "segment":
        tokens = read_tokens(rollout)
        lines = {segment.lines[-1] for segment in tokens.segments if segment.kind in TRAINABLE_KINDS}
        if not lines:
            tally.leave_out("no_capture" if tokens.status != "captured" else "no_exact_part")
            return
    elif wanted.form.trains == "all":
        lines = branch_lines(rollout, tally)
    else:
        last = last_line(rollout)
        lines = set() if last is None else {last}
    followed: Callable[[Call], int] = Followed(rollout)
    growing = Growing()
    for call in usable(rollout, tally):
        if lines is not None and call.line not in lines:
            continue
        if wanted.plain_sampling and not_plain(call):
            tally.leave_out("not_plain_sampling")
            continue
        try:
            example = exchange_of(call, origin, followed(call), tally, growing)
        except NotChat as error:
            tally.leave_out(str(error))
            continue
        yield redacted(example) if wanted.redact else example


def exchange_of(call: Call, origin: Origin, choice: int, tally: Tally, growing: Growing) -> Exchange:
    """One call as plain chat, with the reply that is its choice number `choice`. Raises `NotChat`."""
    chat = chat_of(call)
    if choice >= len(chat.replies):
        raise NotChat("no_assistant")
    prompt, answer = growing.plain(chat.messages), plain([chat.replies[choice].message])
    reply = answer.messages[0] | {"role": "assistant"}
    if not reply["content"].strip() and not reply.get("tool_calls"):
        raise NotChat("no_assistant")
    if answer.reasoning:
        tally.note(
            "{n} row(s) end in a reply whose reasoning is left out: message rows hold none; trl-sft-ids trains "
            "what was sampled"
        )
    if chat.replies[choice].finish_reason in CUT:
        tally.note(
            "{n} row(s) end in a reply that was cut for its length: the template closes it with a stop token that was "
            "never sampled, and the trainer learns it; trl-sft-ids has no such token"
        )
    usage = answer_of(call).get("usage")
    return Exchange(
        origin=origin,
        line=call.line,
        purpose=call.purpose,
        messages=prompt,
        reply=reply,
        tools=chat.tools,
        usage=usage if isinstance(usage, dict) else None,
        sampling=call.metadata.get("sampling"),
        finish_reason=chat.replies[choice].finish_reason,
        template_kwargs=chat.template_kwargs,
    )


def redacted(example: Exchange) -> Exchange:
    """The example with whatever looks like a secret replaced in its texts, its tools and its tool calls."""
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


def token_examples(rollout: Rollout, origin: Origin, wanted: Wanted, tally: Tally) -> Iterator[Tokens]:
    """The exact token sequences of a rollout that become rows."""
    secret: set[int] = set()

    def look(call: Call) -> None:
        texts = call.metadata.get("secrets_seen") or secrets_seen([call.request_body, call.response_body])
        if texts:
            secret.add(call.line)

    tokens = read_tokens(rollout, on_call=look if wanted.redact else None)
    heard = {call.line: call for call in tokens.calls}
    tally.exchanges_seen += len(heard)
    sampled: list[str] = []
    for segment, sequence in enumerate(_sequences(tokens, wanted, tally)):
        told = [heard[line] for line in sequence.lines]
        odd = next((call.not_plain for call in told if call.not_plain), None)
        if not sequence.sampled:
            tally.leave_out("nothing_sampled")
        elif odd and wanted.plain_sampling:
            tally.leave_out("not_plain_sampling")
        elif secret.intersection(sequence.lines):
            tally.leave_out("secret_in_ids")
        else:
            sampled = sampled or odd or []
            yield Tokens(origin, sequence, segment, [call.sampling for call in told])
    if sampled and wanted.form.tells_sampling:
        tally.note(f"{origin.rollout_dir}: {sentence(sampled)}")


def _sequences(tokens: RolloutTokens, wanted: Wanted, tally: Tally) -> list[TokenSequence]:
    if tokens.status != "captured":
        tally.leave_out("no_capture")
        return []
    if wanted.row_mode == "exchange":
        return [one for call in tokens.calls if (one := _one_call(call, tokens, tally)) is not None]
    if wanted.row_mode == "rollout" and not tokens.training_grade:
        tally.leave_out("not_training_grade")
        return []
    if not tokens.segments:
        tally.leave_out("no_exact_part")
    kept = [one for one in tokens.segments if one.kind in TRAINABLE_KINDS]
    tally.leave_out("side_sequence", len(tokens.segments) - len(kept))
    if wanted.row_mode == "rollout" and wanted.form.one_row_a_rollout and len(kept) > 1:
        tally.leave_out("branched")
        return []
    return kept


def _one_call(call: CallSummary, tokens: RolloutTokens, tally: Tally) -> TokenSequence | None:
    """A call as a sequence of its own: its prompt, and the choice that the agent went on with."""
    if not call.answered:
        tally.leave_out("provider_error" if call.outcome == "error" else "interrupted")
        return None
    if call.kind not in TRAINABLE_KINDS:
        tally.leave_out("helper_call")
        return None
    capture = call.capture
    if capture is None or not capture.complete or capture.prompt_token_ids is None:
        tally.leave_out("not_captured")
        return None
    followed = (one.choice for one in tokens.placements.values() if one.parent == call.number and one.choice)
    choice = capture.completions[next(followed, 0)]
    assert choice.token_ids is not None and choice.logprobs is not None
    return TokenSequence(
        thread=0,
        kind=call.kind,
        calls=(call.number,),
        lines=(call.line,),
        prompt_ids=capture.prompt_token_ids,
        completion_ids=choice.token_ids,
        spans=(Span(call.number, call.line, 0, len(choice.token_ids)),),
        logprobs=tuple(float(value) for value in choice.logprobs),
        policy_versions=() if call.policy_version is None else (call.policy_version,),
    )
