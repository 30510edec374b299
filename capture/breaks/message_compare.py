"""What messages and texts tell about a break: what changed between what an agent got and what it sent back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

Message = Mapping[str, Any]

_THINK: Final = re.compile(r"<(think|thinking|reasoning|\|channel\|>analysis)\b", re.I)
_THOUGHT: Final = re.compile(r"\s*<(think|thinking|reasoning)>.*?(?:</\1>|\Z)\s*", re.I | re.S)
_IMAGE_PARTS: Final = frozenset({"image", "image_url", "input_image", "video", "video_url", "input_audio"})
_SYSTEM: Final = frozenset({"system", "developer"})


def text_of(message: Message) -> str:
    """A message's text; parts are joined, null is empty."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict) and "text" in part)
    return ""


def reasoning_of(message: Message) -> str:
    """A message's reasoning, under any of its names."""
    for name in ("reasoning_content", "reasoning", "thinking"):
        value = message.get(name)
        if isinstance(value, str) and value.strip():
            return value
    return ""


def thinks(text: str) -> bool:
    """Whether the text opens a block of reasoning."""
    return _THINK.search(text) is not None


def strip_reasoning(text: str) -> str:
    """The text without its blocks of reasoning, a space for each; white space is to be ignored in comparisons.

    Where a template opens the block in the prompt, the text holds only its end.
    """
    if "</think>" in text and not thinks(text[: text.index("</think>")]):
        text = text.split("</think>", 1)[1]
    return _THOUGHT.sub(" ", text)


def calls_of(message: Message) -> list[tuple[str, str]]:
    """Name and arguments (as a string) of each tool call."""
    found = []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call) if isinstance(call, dict) else {}
        arguments = function.get("arguments", "")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        found.append((str(function.get("name", "")), arguments))
    return found


def same_arguments(was: Message, now: Message) -> bool:
    """The same tool calls by meaning, in other words: strings differ, names and parsed arguments do not."""
    ours, theirs = calls_of(was), calls_of(now)
    if not ours or len(ours) != len(theirs) or ours == theirs:
        return False
    return all(a[0] == b[0] and json_equal(a[1], b[1]) for a, b in zip(ours, theirs, strict=True))


def json_equal(one: str, other: str) -> bool:
    """Two texts that are JSON of the same value. False and True as Python writes them count as JSON's."""
    values = [_value(one), _value(other)]
    return _NOTHING not in values and values[0] == values[1] and _types(values[0]) == _types(values[1])


_NOTHING: Final = object()
_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}


def _value(text: str) -> Any:
    with suppress(ValueError):
        return json.loads(text)
    with suppress(ValueError):
        return json.loads(re.sub(r"(?<=[:,\[\s])(True|False|None)(?=[,\]}\s])", lambda found: _PYTHON[found[1]], text))
    return _NOTHING


def _types(value: Any) -> Any:
    """1 and true are equal to Python; here they are not."""
    if isinstance(value, dict):
        return {key: _types(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_types(item) for item in value]
    return type(value) is bool


def json_equal_texts(one: str, other: str) -> bool:
    """Two texts that are the same but for how the JSON objects in them are written."""
    ours, theirs = _pieces(one), _pieces(other)
    if len(ours) != len(theirs) or len(ours) < 2:
        return False
    return all(
        json_equal(a, b) if is_json else a.split() == b.split()
        for (is_json, a), (also, b) in zip(ours, theirs, strict=True)
        if is_json == also
    ) and [kind for kind, _ in ours] == [kind for kind, _ in theirs]


def _pieces(text: str) -> list[tuple[bool, str]]:
    """The text in pieces: (False, words), (True, a JSON object)."""
    pieces: list[tuple[bool, str]] = []
    start = at = 0
    while (at := text.find("{", at)) >= 0:
        end = _object_end(text, at)
        if end < 0 or _value(text[at:end]) is _NOTHING:
            at += 1
            continue
        pieces += [(False, text[start:at]), (True, text[at:end])]
        start = at = end
    pieces.append((False, text[start:]))
    return pieces


def _object_end(text: str, start: int) -> int:
    """Where the object that opens at `start` closes; -1 when it does not."""
    depth = 0
    quoted = escaped = False
    for at in range(start, len(text)):
        letter = text[at]
        if escaped:
            escaped = False
        elif quoted:
            escaped = letter == "\\"
            quoted = letter != '"'
        elif letter == '"':
            quoted = True
        elif letter == "{":
            depth += 1
        elif letter == "}":
            depth -= 1
            if not depth:
                return at + 1
    return -1


def one_gap(shorter: str, longer: str) -> bool:
    """Whether `shorter` is `longer` with one piece taken out of its inside."""
    if len(shorter) >= len(longer):
        return False
    head = 0
    while head < len(shorter) and shorter[head] == longer[head]:
        head += 1
    return longer.endswith(shorter[head:]) and head > 0


def has_image(messages: Sequence[Message] | None) -> bool:
    for message in messages or ():
        content = message.get("content")
        if isinstance(content, list) and any(
            isinstance(p, dict) and str(p.get("type")) in _IMAGE_PARTS for p in content
        ):
            return True
    return False


def head(messages: Sequence[Message]) -> tuple[list[str], list[Message]]:
    """The system messages at the beginning, as texts, and the messages after them."""
    at = 0
    while at < len(messages) and str(messages[at].get("role")) in _SYSTEM:
        at += 1
    return [text_of(message) for message in messages[:at]], list(messages[at:])


def same_message(was: Message, now: Message) -> bool:
    """Word for word: role, text, reasoning, tool calls as strings."""
    return (
        was.get("role") == now.get("role")
        and text_of(was) == text_of(now)
        and reasoning_of(was) == reasoning_of(now)
        and calls_of(was) == calls_of(now)
    )


def mark(message: Message) -> int:
    """Equal for messages of the same meaning: role, words and tool calls; not white space, reasoning or JSON's form."""
    calls = tuple((name, json.dumps(value, sort_keys=True) if (value := _value(text)) is not _NOTHING else text)
                  for name, text in calls_of(message))  # fmt: skip
    return hash((str(message.get("role")), tuple(strip_reasoning(text_of(message)).split()), calls))


def says(message: Message) -> bool:
    """Whether a message holds anything by which it can be known again."""
    return bool(text_of(message).strip() or message.get("tool_calls"))


def first_change(earlier: Sequence[Message], later: Sequence[Message]) -> int | None:
    """The index of the first message of `earlier` that `later` does not hold word for word, None when it holds all."""
    for index, was in enumerate(earlier):
        if index >= len(later) or not same_message(was, later[index]):
            return index
    return None
