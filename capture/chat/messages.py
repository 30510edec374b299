"""One rule for "the same chat message", whoever wrote it down again.

An agent sends back what it got, written by other code: parts in place of a string, arguments in another form of JSON,
null in place of "". `canonical_hash` is equal for messages that say the same to a model. These never count:

- the role's spelling: `developer` is `system`, `function` is `tool`, `model` is `assistant`;
- parts or a string: text parts are joined by a line end (as vLLM does), parts of another kind count as their JSON;
- null, "" and a missing field; white space at the ends of a text and of its lines;
- reasoning: its own fields and parts, and closed blocks (`<think>…</think>`) of an assistant's text. A block that is
  never closed is text;
- how arguments are written: order of keys, spaces, escapes, 1.0 for 1, "" for {}.

A caller may relax more. Token-in, which sends the old ids in place of the message, relaxes nothing; coverage and
converted rows, which ask what a message was meant to be, use `MEANING`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import orjson

from capture import json
from capture.errors import JsonError

Message = Mapping[str, Any]


class Relax(enum.Flag):
    """What may differ besides."""

    NOTHING = 0
    #: Any white space is one space.
    SPACES = enum.auto()
    #: The ids that tie a tool's result to its call.
    CALL_IDS = enum.auto()


MEANING: Final = Relax.SPACES | Relax.CALL_IDS

_ROLES: Final[dict[str, str]] = {"developer": "system", "function": "tool", "model": "assistant"}
_TEXT_PARTS: Final = frozenset({"", "text", "input_text", "output_text"})
_REASONING_PARTS: Final = frozenset({"thinking", "redacted_thinking", "reasoning"})
_IMAGE_PARTS: Final = frozenset({"image", "image_url", "input_image", "video", "video_url", "input_audio"})
_REASONING_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")


def canonical_hash(message: Message, relax: Relax = Relax.NOTHING) -> int:
    """Equal for messages that say the same, see above; good within this process. Never raises."""
    role = role_of(message)
    text = _whole_text(message.get("content"))
    ids = Relax.CALL_IDS not in relax
    if role == "assistant":
        text = without_reasoning(text)
        calls: tuple[Any, ...] = tuple(call if ids else call[1:] for call in tool_calls(message))
    else:
        calls = (str(message.get("tool_call_id") or ""),) if ids else ()
    words = " ".join(text.split()) if Relax.SPACES in relax else _lines(text)
    return hash((role, words, calls, str(message.get("name") or "")))


def role_of(message: Message) -> str:
    """The message's role, under one spelling."""
    role = str(message.get("role"))
    return _ROLES.get(role, role)


def is_system(message: Message) -> bool:
    return role_of(message) == "system"


def split_system(messages: Sequence[Message]) -> tuple[list[str], list[Message]]:
    """The texts of the system messages at the beginning, and the messages after them."""
    at = 0
    while at < len(messages) and is_system(messages[at]):
        at += 1
    return [text_of(message) for message in messages[:at]], list(messages[at:])


def text_of(message: Message) -> str:
    """The message's text as it stands: text parts joined by a line end, other parts left out, null is ""."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    return "\n".join(text for part in parts if (text := _part_text(part)) is not None)


def reasoning_of(message: Message) -> str:
    """The message's reasoning, under any of its names; "" where there is none."""
    for name in _REASONING_FIELDS:
        value = message.get(name)
        if isinstance(value, str) and value.strip():
            return value
    return ""


def has_image(messages: Sequence[Message] | None) -> bool:
    """Whether any message has a part that is an image, a video or a sound."""
    for message in messages or ():
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and str(part.get("type")) in _IMAGE_PARTS:
                return True
    return False


def tool_calls(message: Message) -> list[tuple[str | None, str, str]]:
    """`(id, name, arguments)` of each tool call, the arguments as `canonical_arguments` writes them."""
    found: list[tuple[str | None, str, str]] = []
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(call, dict) and isinstance(function, dict):
            call_id = call.get("id")
            found.append((
                str(call_id) if call_id else None,
                str(function.get("name") or ""),
                canonical_arguments(function.get("arguments")),
            ))  # fmt: skip
        else:
            found.append((None, "", canonical_json(call)))
    single = message.get("function_call")  # the form before tool calls
    if isinstance(single, dict):
        found.append((None, str(single.get("name") or ""), canonical_arguments(single.get("arguments"))))
    return found


def canonical_arguments(value: Any) -> str:
    """A call's arguments, a string of JSON or an object, in one form; text that is no JSON without the space around."""
    if not isinstance(value, str):
        return canonical_json({} if value is None else value)
    text = value.strip()
    try:
        return canonical_json(json.loads(text)) if text else "{}"
    except JsonError:
        return text


def canonical_json(value: Any) -> str:
    """JSON in one form: keys sorted, no spaces, numbers as JavaScript writes them."""
    with suppress(RecursionError):  # what is nested so deep is compared as it came
        value = plain_numbers(value)
    return json.dumps(value, orjson.OPT_SORT_KEYS).decode()


def plain_numbers(value: Any, of_text: Callable[[str], Any] = str) -> Any:
    """`value` with whole floats as ints (JavaScript's JSON has no 1.0), each text as `of_text` has it."""
    if isinstance(value, str):
        return of_text(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [plain_numbers(item, of_text) for item in value]
    if isinstance(value, dict):
        return {name: plain_numbers(item, of_text) for name, item in value.items()}
    return value


_OPENED: Final = re.compile(r"<(think|thinking|reasoning)>", re.IGNORECASE)
_CLOSED: Final = re.compile(r"</(think|thinking|reasoning)>", re.IGNORECASE)
_CLOSES: Final = {tag: re.compile(f"</{tag}>", re.IGNORECASE) for tag in ("think", "thinking", "reasoning")}
_OPENS_REASONING: Final = re.compile(r"<(think|thinking|reasoning|\|channel\|>analysis)\b", re.IGNORECASE)


def opens_reasoning(text: str) -> bool:
    """Whether a block of reasoning opens in the text, gpt-oss's form included."""
    return _OPENS_REASONING.search(text) is not None


def without_reasoning(text: str, *, inside: bool = True, unclosed: bool = False) -> str:
    """The text without its closed blocks of reasoning, a space for each. Linear in the text, whatever it holds.

    `inside`: the text may begin inside of a block, which the template opened in the prompt. `unclosed`: the text is a
    cut-out of a longer one, so a block without an end goes too.
    """
    if "<" not in text:
        return text
    end = _CLOSED.search(text) if inside else None
    at = end.end() if end is not None and not _OPENED.search(text, 0, end.start()) else 0
    parts: list[str] = []
    while (start := _OPENED.search(text, at)) is not None:
        close = _CLOSES[start[1].lower()].search(text, start.end())
        if close is None and not unclosed:
            break
        parts.append(text[at : start.start()].rstrip())
        at = len(text) if close is None else close.end()
    rest = text[at:]
    return " ".join([*parts, rest.lstrip()]) if at else rest


def _whole_text(content: Any) -> str:
    """A message's text with the parts of other kinds written as JSON; reasoning is left out."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return canonical_json(content)
    texts = []
    for part in content:
        text = _part_text(part)
        if text is not None:
            texts.append(text)
        elif not (isinstance(part, dict) and _kind(part) in _REASONING_PARTS):
            texts.append(canonical_json(part))
    return "\n".join(texts)


def _part_text(part: Any) -> str | None:
    """The text of a part; None for one of another kind."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return None
    text = part.get("text") if _kind(part) in _TEXT_PARTS else part.get("refusal")
    return text if isinstance(text, str) else None


def _kind(part: Mapping[str, Any]) -> str:
    return str(part.get("type") or "")


def _lines(text: str) -> str:
    """Without white space at its ends and at the ends of its lines."""
    return "\n".join(line.rstrip() for line in text.strip().splitlines())
