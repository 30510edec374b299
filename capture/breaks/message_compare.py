"""How messages and texts differ between what an agent got and what it sent back."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from capture.chat.messages import Message, reasoning_of, text_of


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
    """Whether the tool calls are the same in another form: the strings differ, names and parsed arguments do not."""
    ours, theirs = calls_of(was), calls_of(now)
    if not ours or len(ours) != len(theirs) or ours == theirs:
        return False
    return all(a[0] == b[0] and json_equal(a[1], b[1]) for a, b in zip(ours, theirs, strict=True))


def json_equal(text: str, other: str) -> bool:
    """Whether two texts are JSON of the same value. False and True as Python writes them count as JSON's."""
    values = [_value(text), _value(other)]
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


def json_equal_texts(text: str, other: str) -> bool:
    """Whether two texts differ only in how the JSON objects in them are written."""
    ours, theirs = _pieces(text), _pieces(other)
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


def same_message(was: Message, now: Message) -> bool:
    """Word for word: role, text, reasoning, tool calls as strings."""
    return (
        was.get("role") == now.get("role")
        and text_of(was) == text_of(now)
        and reasoning_of(was) == reasoning_of(now)
        and calls_of(was) == calls_of(now)
    )


def says(message: Message) -> bool:
    """Whether a message has anything by which it can be recognized."""
    return bool(text_of(message).strip() or message.get("tool_calls"))


def first_change(earlier: Sequence[Message], later: Sequence[Message]) -> int | None:
    """The index of the first message of `earlier` that `later` does not hold word for word, None when it holds all."""
    for index, was in enumerate(earlier):
        if index >= len(later) or not same_message(was, later[index]):
            return index
    return None
