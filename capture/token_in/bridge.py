"""Token-in: the prompt that continues a call exactly, made of ids that are held and ids that a template wrote.

What goes in are two renderings by the engine's own template: R, the whole request, and A, its messages up to and with
the last reply. Where A is a beginning of R, the tail of R is what comes after the reply, and can be set behind the ids
that were sampled. Nothing is tokenized here, and nothing is guessed: where a rule does not hold, a code says which.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from capture.messages import plain_numbers, without_reasoning
from capture.record import Ids
from capture.token_in.parent import Parent

MODES: Final = ("off", "auto", "require")
#: What `--token-in` says of itself, wherever it is an option.
MODES_HELP: Final = "off, auto or require: send prompts as the ids of the call before and what is new (vLLM, SGLang)."

#: code -> why a call's prompt was not bridged
REASONS: Final[dict[str, str]] = {
    "begins": "its messages hold no reply that this session gave: a new conversation, or a compacted one",
    "opened_again": "the session was opened again on a journal that has calls, none of which it holds in memory: "
    "whether this goes on from one of them is not known; a new journal begins without them",
    "history_edited": "the agent changed what was said before; its compaction or its edits begin a new sequence",
    "system_changed": "the system prompt is another than in the call it goes on from",
    "tools_changed": "the tools are others than in the call it goes on from",
    "options_changed": "the model, the template's options or the choice of tools are others than in the call before",
    "ambiguous_parent": "two earlier calls gave this reply to these messages; which one it goes on from is not guessed",
    "ends_with_reply": "the conversation ends with a reply, which the engine is asked to go on writing",
    "parent_incomplete": "the ids of the call it goes on from are not all here; see that call's token_capture",
    "parent_forgotten": "the call it goes on from was too long ago to be kept in memory",
    "stop_string": "the reply was ended by a stop string, whose tokens the agent never got",
    "cut_tool_call": "the reply was cut while it called a tool, and the agent got another call than was sampled",
    "cut_in_reasoning": "the reply was cut before it said anything but reasoning",
    "template_rewrites_history": "the chat template renders the last reply otherwise once something follows it",
    "template_ends_turn_otherwise": "the chat template does not write the stop token that was sampled",
    "template_closes_otherwise": "the chat template does not close this reply as it closes others",
    "reads_otherwise": "the ids that were sampled do not read like the message that the agent sent back",
    "prompt_reads_otherwise": "the whole prompt would not read like the conversation that the agent sees",
    "rendering_differs": "the engine's /tokenize does not render as its chat route does",
    "prompt_not_told": "the engine did not say which prompt ids it answered to, so nobody knows whether it took them",
    "unproved": "the agent wrote older messages anew before the engine's rendering could be checked against its ids",
    "unreadable": "its messages are not what a chat's messages are",
    "prompt_not_used": "the engine answered to other prompt ids than it was sent",
    "engine_cannot": "this engine takes no prompt ids on its chat route; vLLM and SGLang do",
    "engine_refused": "the engine refused the prompt ids",
    "no_rendering": "the engine's /tokenize did not answer",
    "media": "the messages hold images or audio, whose ids cannot be sent",
    "own_prompt_ids": "the agent sends prompt ids of its own",
    "not_chat": "not a chat request",
    "turned_off": "token-in was turned off for this session",
    "not_sent": "the call did not reach an engine",
    "failed": "token-in failed by a fault of the proxy's own; its log says how",
}

#: Reasons that are no failure to bridge: there was nothing to go on from.
NOTHING_TO_BRIDGE: Final = frozenset({"begins", "not_chat"})


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """How a template was seen to end a reply: `after` are the ids that it writes behind the stop token, `lead` how many
    ids at the end of the prompt before it writes otherwise once the reply stands there.
    """

    after: Ids
    lead: int


@dataclass(frozen=True, slots=True)
class Bridge:
    """`prompt` is what to send. `closing` ids of it close a reply that was cut: the template's, not sampled.

    `ours` and `theirs` are the stretch in which the prompt and the rendering may have other ids: both must read alike.
    `whole` says that this stretch reaches back to the first id. `end` is there where the stop token stands in A.
    """

    prompt: Ids
    closing: int
    ours: Ids
    theirs: Ids
    whole: bool = False
    end: TurnEnd | None = None


def bridge(rendered: Ids, answered: Ids, found: Parent, closing: Ids | None = None) -> Bridge | str:
    """The prompt that extends `found`, or the code of a reason. `rendered` is R, `answered` is A (see above).

    `closing` is what the template writes after any reply: needed for one that was cut (see `closing_of`).
    """
    held, sampled, stop = found.past.prompt, found.reply.sampled, found.reply.stop
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
        prompt=held + sampled + after + beyond,
        closing=len(after) if stop is None else 0,
        ours=(held if whole else Ids.of(numbers(found.past.rendered)[start:])) + sampled + after,
        theirs=Ids.of(shown),
        whole=whole,
        end=end,
    )


def answered_as_before(rendered: Ids, found: Parent, end: TurnEnd) -> Ids | None:
    """A without asking for it: R up to the first stop token of the reply and what was seen to stand behind it.

    None where R does not look like that. A reply whose text holds a stop token's is cut short: then it reads otherwise.
    """
    start = found.past.rendered.common(rendered)
    ids, after = numbers(rendered), end.after.tolist()
    if found.reply.stop is None or len(found.past.rendered) - start > end.lead or found.reply.stop not in ids[start:]:
        return None
    at = ids.index(found.reply.stop, start) + 1
    return Ids.of(ids[: at + len(after)]) if ids[at : at + len(after)] == after else None


def beginning(rendered: Ids, other: Ids) -> Ids:
    """What two renderings have in common from the first id on: the stand-in for A where a template writes the last
    reply otherwise as long as nothing follows it. `other` is R with another text in the first message after the reply.
    """
    return Ids.of(numbers(rendered)[: rendered.common(other)])


def with_other_text(messages: Sequence[Any], count: int) -> list[Any] | None:
    """`messages` with another text in the one at index `count`, for `beginning`; None where that is no tool's result.

    Only there: at a new question many templates leave out earlier reasoning, and what they mean by it is to be kept.
    """
    message = messages[count]
    if message.get("role") != "tool":
        return None
    content = message.get("content")
    other = "1" if isinstance(content, str) and content.lstrip()[:1] == "0" else "0"
    return [*messages[:count], {**message, "content": other}, *messages[count + 1 :]]


def _parting(found: Parent, answered: Ids) -> tuple[int, bool]:
    """From which id of A on the reply may stand: where A leaves the prompt that was rendered for it.

    Where that prompt's end is not the end of what is held (a template, or the agent, wrote an older turn anew), all of
    both has to be compared: 0, True.
    """
    held, before = found.past.prompt, found.past.rendered
    start = before.common(answered)
    end = Ids.of(numbers(before)[start:]).text
    same = not end or held.text.endswith(b"," + end) or held.text == end
    return (start, False) if same else (0, True)


def numbers(ids: Ids) -> list[int]:
    """The ids as ints, without keeping the list beside the text: held prompts stay small."""
    made: list[int] = orjson.loads(b"[" + ids.text + b"]")
    return made


def _ends_with(ids: list[int], end: list[int]) -> bool:
    return not end or ids[-len(end) :] == end


def closing_of(ids: Ids, other: Ids) -> Ids:
    """What a template writes after a reply: the end that renderings of two different replies have in common."""
    a, b = ids.tolist(), other.tolist()
    size = next((n for n in range(min(len(a), len(b))) if a[-1 - n] != b[-1 - n]), 0)
    return Ids.of(a[len(a) - size :])


#: Two conversations that differ in nothing but the reply, for `closing_of`.
PROBES: Final = tuple(
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": reply}] for reply in ("b", "c")
)


def reads_alike(ours: str, theirs: str, *, begun: bool = True) -> bool:
    """Whether two texts of a conversation differ in nothing but what is allowed: white space, reasoning, how JSON is
    written. `begun`: they are a reply, and may begin inside of reasoning.
    """
    return ours == theirs or _normal(ours, begun) == _normal(theirs, begun)


_OBJECT: Final = re.compile(r'\{(?=\s*["}])')
#: How often what looks like JSON and is none is read in vain, and how many letters of it; what stands behind that is
#: compared as it is written.
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
            parts.append(json.dumps(plain_numbers(value, _said), sort_keys=True))
        except (ValueError, RecursionError) as error:
            tries += 1
            letters += error.pos - brace if isinstance(error, json.JSONDecodeError) else len(text) - brace
            parts.append("{")
            at = brace + 1
    parts.append("".join(text[at:].split()))
    return "".join(parts)


_ANALYSIS: Final = ("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant")


def _without_analysis(text: str) -> str:
    """Without the reasoning of gpt-oss, which is a message of its own."""
    opening, closing, following = _ANALYSIS
    parts: list[str] = []
    at = 0
    while (start := text.find(opening, at)) >= 0 and (end := text.find(closing, start)) >= 0:
        parts.append(text[at:start])
        at = end + len(closing)
        if text.startswith(following, at):
            at += len(following)
    return "".join([*parts, text[at:]])


def _said(text: str) -> Any:
    """What a text says where it is JSON itself; else the text without the space around it."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            return plain_numbers(json.loads(text), _said)
        except (ValueError, RecursionError):
            pass
    return text.strip()
