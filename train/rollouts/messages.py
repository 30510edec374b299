"""Chat messages in plain form, as trainers' templates take them: roles, text and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

import orjson

from capture.json import objects

Message = dict[str, Any]

_ROLES: Final = {"developer": "system", "model": "assistant", "function": "tool"}
_REASONING: Final = frozenset({"reasoning", "reasoning_content", "thinking_blocks", "thinking"})
_LONG_NUMBER: Final = re.compile(r"\d{19}")
#: Levels of nesting that a row's arguments have: Arrow's schemas have 64, of which the messages take some.
MAX_DEPTH: Final = 48


class NotChat(Exception):
    """A call, or a message of it, has no form as plain chat; `reason` is its name in `train.rows.skip_reasons`."""

    def __init__(self, reason: Literal["no_messages", "not_text", "no_assistant"]) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class PlainMessages:
    """Messages as a chat template takes them. `reasoning`: some was left out, since rows have none."""

    messages: list[Message]
    reasoning: bool


class PlainHistory:
    """`plain` for the calls of one rollout: of a conversation that grows, only the new messages are converted."""

    def __init__(self) -> None:
        self._given: list[Message] = []
        self._made: list[Message] = []

    def plain(self, messages: list[Message]) -> list[Message]:
        """The messages of `plain`. They are shared with earlier calls, so callers must not change them."""
        known = len(self._given)
        before = self._made if known and messages[:known] == self._given else []
        self._made = before + plain(messages[len(before) :], first=not before).messages
        self._given = messages
        return self._made


def plain(messages: Iterable[Message], *, first: bool = True) -> PlainMessages:
    """Roles, text and tool calls only; `content` is always a string, nulls and the engine's own fields are removed.

    BenchFlow's rules: `developer` is `system`, a `system` message after the first place is a `user` message (templates
    refuse it there), parts are joined by a newline. Tool calls keep their arguments as the string they came in.
    `first`: no messages came before these. Raises `NotChat` (`not_text`) where a message has an image or audio.
    """
    made: list[Message] = []
    reasoning = False
    for message in messages:
        role = str(message.get("role"))
        role = _ROLES.get(role, role)
        if role == "system" and (made or not first):
            role = "user"
        new: Message = {"role": role, "content": text_of(message.get("content"))}
        if role == "assistant":
            reasoning = reasoning or any(message[name] for name in _REASONING & message.keys())
            calls = [_tool_call(at, call) for at, call in enumerate(objects(message.get("tool_calls")))]
            if calls:
                new["tool_calls"] = calls
        elif role == "tool":
            new["tool_call_id"] = str(message.get("tool_call_id") or message.get("name") or "")
        made.append(new)
    return PlainMessages(made, reasoning)


def text_of(content: object) -> str:
    """A message's text; null is "". Raises `NotChat` (`not_text`) for parts that are not text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise NotChat("not_text")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, dict) and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
        elif isinstance(part, dict) and part.get("type") in ("thinking", "redacted_thinking", "reasoning"):
            continue
        else:
            raise NotChat("not_text")
    return "\n".join(texts)


def arguments_of(call: Message) -> dict[str, Any] | None:
    """A tool call's arguments as an object; None where they are not a JSON object that a row can hold.

    That is so for arguments that are cut off or malformed, and for NaN, half of a surrogate pair, or an integer beyond
    64 bits, sign included: the row, or what `load_dataset` makes of it, would have another value. It is also so for
    arguments nested deeper than `MAX_DEPTH`, with which the whole file would not load.
    """
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = orjson.loads(arguments) if arguments.strip() else {}
        except orjson.JSONDecodeError:
            return None
        if _LONG_NUMBER.search(arguments) and _has_long_integer(arguments):
            return None
        return parsed if isinstance(parsed, dict) and not _deeper(parsed, MAX_DEPTH) else None
    return arguments if isinstance(arguments, dict) else None


def _has_long_integer(text: str) -> bool:
    """Whether the JSON `text` has an integer that 64 bits do not hold; orjson reads some of them as floats."""
    beyond: list[int] = []
    json.loads(text, parse_int=lambda digits: None if -(2**63) <= int(digits) < 2**63 else beyond.append(1))
    return bool(beyond)


def _deeper(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(levels == 0 or _deeper(item, levels - 1) for item in inner)


def _tool_call(position: int, call: dict[str, Any]) -> Message:
    inner = call.get("function")
    function: dict[str, Any] = inner if isinstance(inner, dict) else call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": str(call.get("id") or f"call_{position}"),
        "type": "function",
        "function": {"name": str(function.get("name") or ""), "arguments": arguments},
    }
