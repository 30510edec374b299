"""Token-in: a prompt that continues a call exactly, made of the ids of that call and new ids from the template.

The input is two renderings by the engine's own template: R, the whole request, and A, its messages up to and including
the last reply. Where A is a prefix of R, the rest of R is what follows the reply, and is appended to the ids that were
sampled. Nothing is tokenized here, and nothing is guessed: where a rule does not hold, a code says which.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from capture.chat.messages import plain_numbers, without_reasoning
from capture.record import Ids
from capture.token_in.parent import Parent

MODES: Final = ("off", "auto", "require")
#: The help text of `--token-in`, wherever it is an option.
MODES_HELP: Final = "off, auto or require: send prompts as the ids of the call before and what is new (vLLM, SGLang)."

#: code -> why the prompt of a call was not bridged
REASONS: Final[dict[str, str]] = {
    "begins": "its messages contain no reply of this session: a new conversation, or a compacted one",
    "opened_again": "the session was reopened on a journal with earlier calls, which are no longer in memory: "
    "whether this call continues one of them is unknown; use a new journal to start without them",
    "history_edited": "the agent changed earlier messages; its compaction or edits start a new sequence",
    "system_changed": "the system prompt differs from that of the call it continues",
    "tools_changed": "the tools differ from those of the call it continues",
    "options_changed": "the model, the template's options or the tool choice differ from those of the call before",
    "ambiguous_parent": "two earlier calls gave this reply to these messages; which one it continues is not guessed",
    "ends_with_reply": "the conversation ends with a reply that the engine is asked to continue",
    "parent_incomplete": "the ids of the call it continues are incomplete; see that call's token_capture",
    "parent_forgotten": "the call it continues is no longer in memory",
    "stop_string": "a stop string ended the reply, and the agent never got its tokens",
    "cut_tool_call": "the reply was cut inside a tool call, and the agent got a different call than was sampled",
    "cut_in_reasoning": "the reply was cut while it was still reasoning",
    "template_rewrites_history": "the chat template renders the last reply differently once something follows it",
    "template_ends_turn_otherwise": "the chat template does not write the stop token that was sampled",
    "template_closes_otherwise": "the chat template does not close this reply as it closes others",
    "reads_otherwise": "the sampled ids do not read like the message that the agent sent back",
    "prompt_reads_otherwise": "the whole prompt would not read like the conversation that the agent sees",
    "rendering_differs": "the engine's /tokenize does not render as its chat route does",
    "prompt_not_told": "the engine did not report the prompt ids it used, so it is unknown whether it used the ids "
    "that were sent",
    "unproved": "the agent rewrote older messages before the engine's rendering could be checked against its ids",
    "unreadable": "its messages are not valid chat messages",
    "prompt_not_used": "the engine used other prompt ids than it was sent",
    "engine_cannot": "this engine takes no prompt ids on its chat route; vLLM and SGLang do",
    "engine_refused": "the engine refused the prompt ids",
    "no_rendering": "the engine's /tokenize did not answer",
    "media": "the messages contain images or audio, whose ids cannot be sent",
    "own_prompt_ids": "the agent sends its own prompt ids",
    "not_chat": "not a chat request",
    "turned_off": "token-in was turned off for this session",
    "not_sent": "the call did not reach an engine",
    "failed": "token-in failed because of a bug in the proxy; its log says how",
}

#: Reasons that are not a failure to bridge: there was nothing to continue.
NOTHING_TO_BRIDGE: Final = frozenset({"begins", "not_chat"})


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """How a template ends a reply: `after` are the ids from the stop token on, `lead` is how many ids at the end of the
    prompt it writes differently once the reply is there.
    """

    after: Ids
    lead: int


@dataclass(frozen=True, slots=True)
class Bridge:
    """`prompt` is what to send. `closing` of its ids close a reply that was cut: the template's, not sampled.

    `ours` and `theirs` are the ranges in which the ids of the prompt and of the rendering may differ: their texts must
    read alike. `whole`: the ranges start at the first id. `end` is set if A contains the stop token.
    """

    prompt: Ids
    closing: int
    ours: Ids
    theirs: Ids
    whole: bool = False
    end: TurnEnd | None = None


def bridge(rendered: Ids, answered: Ids, found: Parent, closing: Ids | None = None) -> Bridge | str:
    """The prompt that extends `found`, or the code of a reason. `rendered` is R, `answered` is A (see above).

    `closing` is what the template writes after any reply; needed where the reply was cut (see `closing_of`).
    """
    past_ids, sampled, stop = found.past.prompt, found.reply.sampled, found.reply.stop
    if not rendered.startswith(answered) or len(rendered) == len(answered):
        return "template_rewrites_history"
    beyond = rendered.after(answered)
    start, whole = _parting(found, answered)
    turn = numbers(answered)[start:]
    shown, end = turn, None
    if stop is None:
        if closing is None or not _ends_with(turn, closing.tolist()):
            return "template_closes_otherwise"
        after = closing
    elif stop in turn:
        after = Ids.of(turn[len(turn) - turn[::-1].index(stop) :])
        end = None if whole else TurnEnd(after, len(found.past.rendered) - start)
    elif beyond.startswith(Ids.of([stop])):  # the next turn's first token is the stop token (GLM)
        after, beyond, shown = Ids(b""), beyond.after(Ids.of([stop])), [*turn, stop]
    else:
        return "template_ends_turn_otherwise"
    return Bridge(
        prompt=past_ids + sampled + after + beyond,
        closing=len(after) if stop is None else 0,
        ours=(past_ids if whole else Ids.of(numbers(found.past.rendered)[start:])) + sampled + after,
        theirs=Ids.of(shown),
        whole=whole,
        end=end,
    )


def answered_as_before(rendered: Ids, found: Parent, end: TurnEnd) -> Ids | None:
    """A, derived from R instead of requested: R up to the reply's first stop token and what followed it before.

    None if R does not match that. If the reply's text spells out a stop token, this ends too early, and the texts do
    not read alike.
    """
    start = found.past.rendered.common(rendered)
    ids, after = numbers(rendered), end.after.tolist()
    if found.reply.stop is None or len(found.past.rendered) - start > end.lead or found.reply.stop not in ids[start:]:
        return None
    at = ids.index(found.reply.stop, start) + 1
    return Ids.of(ids[: at + len(after)]) if ids[at : at + len(after)] == after else None


def beginning(rendered: Ids, other: Ids) -> Ids:
    """The common prefix of two renderings. It replaces A where a template writes the last reply differently while
    nothing follows it. `other` is R with different text in the first message after the reply.
    """
    return Ids.of(numbers(rendered)[: rendered.common(other)])


def with_other_text(messages: Sequence[Any], count: int) -> list[Any] | None:
    """`messages` with different text in the one at index `count`, for `beginning`; None unless that is a tool result.

    Not for a new question: there many templates drop earlier reasoning on purpose, which is respected.
    """
    message = messages[count]
    if message.get("role") != "tool":
        return None
    content = message.get("content")
    other = "1" if isinstance(content, str) and content.lstrip()[:1] == "0" else "0"
    return [*messages[:count], {**message, "content": other}, *messages[count + 1 :]]


def _parting(found: Parent, answered: Ids) -> tuple[int, bool]:
    """The first id of A that may belong to the reply: where A departs from the prompt that was rendered for it.

    If that prompt does not end as the ids of the call do (a template, or the agent, rewrote an older turn), everything
    has to be compared: 0, True.
    """
    past_ids, before = found.past.prompt, found.past.rendered
    start = before.common(answered)
    end = Ids.of(numbers(before)[start:]).text
    same = not end or past_ids.text.endswith(b"," + end) or past_ids.text == end
    return (start, False) if same else (0, True)


def numbers(ids: Ids) -> list[int]:
    """The ids as ints. The list is not stored beside the text, so that stored prompts stay small."""
    made: list[int] = orjson.loads(b"[" + ids.text + b"]")
    return made


def _ends_with(ids: list[int], end: list[int]) -> bool:
    return not end or ids[-len(end) :] == end


def closing_of(ids: Ids, other: Ids) -> Ids:
    """What a template writes after a reply: the common suffix of the renderings of two different replies."""
    a, b = ids.tolist(), other.tolist()
    size = next((n for n in range(min(len(a), len(b))) if a[-1 - n] != b[-1 - n]), 0)
    return Ids.of(a[len(a) - size :])


#: Two conversations that differ only in the reply, for `closing_of`.
PROBES: Final = tuple(
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": reply}] for reply in ("b", "c")
)


def reads_alike(ours: str, theirs: str, *, begun: bool = True) -> bool:
    """Whether two texts of a conversation differ only in white space, reasoning, and how JSON is written.

    `begun`: they are a reply, and may begin inside reasoning.
    """
    return ours == theirs or _normal(ours, begun) == _normal(theirs, begun)


_OBJECT: Final = re.compile(r'\{(?=\s*["}])')
#: How often text that looks like JSON but is not is parsed in vain, and how many characters of it; what follows is
#: compared as written.
_TRIES, _LETTERS = 1_000, 2_000_000
_decoder: Final = json.JSONDecoder()


def _normal(text: str, begun: bool) -> str:
    text = without_reasoning(_without_analysis(text), inside=begun)
    parts: list[str] = []
    at = tries = letters = 0
    while tries < _TRIES and letters < _LETTERS and (found := _OBJECT.search(text, at)) is not None:
        brace = found.start()
        parts.append("".join(text[at:brace].split()))
        try:
            value, at = _decoder.raw_decode(text, brace)
            parts.append(json.dumps(plain_numbers(value, _parsed), sort_keys=True))
        except (ValueError, RecursionError) as error:
            tries += 1
            letters += error.pos - brace if isinstance(error, json.JSONDecodeError) else len(text) - brace
            parts.append("{")
            at = brace + 1
    parts.append("".join(text[at:].split()))
    return "".join(parts)


_ANALYSIS: Final = ("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant")


def _without_analysis(text: str) -> str:
    """`text` without the reasoning of gpt-oss, which is a separate message."""
    opening, closing, following = _ANALYSIS
    parts: list[str] = []
    at = 0
    while (start := text.find(opening, at)) >= 0 and (end := text.find(closing, start)) >= 0:
        parts.append(text[at:start])
        at = end + len(closing)
        if text.startswith(following, at):
            at += len(following)
    return "".join([*parts, text[at:]])


def _parsed(text: str) -> Any:
    """The value of a text that is JSON itself; otherwise the text without the space around it."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            return plain_numbers(json.loads(text), _parsed)
        except (ValueError, RecursionError):
            pass
    return text.strip()
