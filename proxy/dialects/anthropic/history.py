"""The conversation of an Anthropic request as chat messages: system, turns, tool calls and their results.

Templates show text, so text blocks become one string. A user turn with tool results becomes one `tool` message per
result, and its other blocks a `user` message after them. As in Anthropic's API, consecutive turns of one role become
one.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

from proxy.dialects.base import EarlierAnswers
from proxy.dialects.chat import arguments_name
from proxy.errors import Refusal

Message = dict[str, Any]

#: Claude Code opens its system prompt with a line for billing that differs from call to call (2.1, also in vLLM 0.32).
BILLING: Final = "x-anthropic-billing-header"
#: The fields of a block that are read; others that are set are dropped and listed.
_READ: Final[dict[str, frozenset[str]]] = {
    "text": frozenset(("type", "text")),
    "image": frozenset(("type", "source")),
    "document": frozenset(("type", "source", "title", "context")),
    "search_result": frozenset(("type", "source", "title", "content")),
    "tool_reference": frozenset(("type", "tool_name")),
    "thinking": frozenset(("type", "thinking", "signature")),
    "redacted_thinking": frozenset(("type",)),
    "tool_use": frozenset(("type", "id", "name", "input")),
    "tool_result": frozenset(("type", "tool_use_id", "content", "is_error")),
}


class History:
    """`messages` is the conversation so far, `dropped` what of it could not be carried and changes nothing."""

    def __init__(self, earlier: EarlierAnswers) -> None:
        self.messages: list[Message] = []
        self.dropped: dict[str, None] = {}
        self._earlier = earlier
        self._calls: set[str] = set()

    def system(self, system: Any) -> None:
        """The `system` field: a string, or text blocks."""
        text = system if isinstance(system, str) else self._texts(system, "system")
        if text:
            self.messages.append({"role": "system", "content": text})

    def add(self, message: Any, where: str) -> None:
        """One message. Raises `Refusal` (400) that names what is wrong with it."""
        if not isinstance(message, dict):
            raise Refusal(400, f"{where}: Input should be an object with `role` and `content`")
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            self._assistant(content, where)
        elif role == "user":
            self._user(content, where)
        elif role == "system":
            self._system_turn(content, where)
        else:
            raise Refusal(400, f"{where}.role: Input should be 'user', 'assistant' or 'system'")

    # whose turn it is

    def _system_turn(self, content: Any, where: str) -> None:
        """A system message among the others. Most templates refuse one there: it becomes a user message."""
        text = content if isinstance(content, str) else self._texts(content, f"{where}.content")
        if not text:
            return
        if not self.messages:
            self.messages.append({"role": "system", "content": text})
            return
        self.dropped["messages[].role: system, sent as user"] = None
        self._say(text, [])

    def _user(self, content: Any, where: str) -> None:
        if isinstance(content, str):
            self._say(content, [])
            return
        parts: list[dict[str, Any]] = []
        pictures: list[dict[str, Any]] = []
        for block, kind, place in self._blocks(content, f"{where}.content"):
            if kind == "tool_result":
                pictures += self._result(block, place)
            else:
                parts.append(self._part(block, kind, place))
        parts = pictures + parts
        if parts or not self.messages or self.messages[-1]["role"] != "tool":
            self._say(*_joined(parts))

    def _say(self, text: str, parts: list[dict[str, Any]]) -> None:
        """Adds to the user message: one string while it is text alone."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "user":
            self.messages.append({"role": "user", "content": parts or text})
        elif parts or not isinstance(last["content"], str):
            last["content"] = _parts(last["content"]) + (parts or _parts(text))
        else:
            last["content"] = f"{last['content']}\n{text}" if text else last["content"]

    def _assistant(self, content: Any, where: str) -> None:
        if isinstance(content, str):
            made: Message = {"role": "assistant", "content": content}
        else:
            made = self._turn(content, where)
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant":
            self.messages.append(made)
            return
        last["content"] = (last["content"] or "") + (made["content"] or "") or None
        for name in ("reasoning_content", "tool_calls"):
            if name in made:
                last[name] = last[name] + made[name] if name in last else made[name]

    def _turn(self, content: Any, where: str) -> Message:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for block, kind, place in self._blocks(content, f"{where}.content"):
            if kind == "text":
                texts.append(_string(block, "text", place))
            elif kind == "thinking":
                thoughts.append(_string(block, "thinking", place))
            elif kind == "tool_use":
                calls.append(self._call(block, place))
            elif kind == "redacted_thinking":
                self.dropped["messages[].content[].redacted_thinking"] = None
            else:
                raise Refusal(400, f"{place}: a block of type '{kind}' is not allowed in an assistant turn")
        made: Message = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
        if thoughts:
            made["reasoning_content"] = "".join(thoughts)
        if calls:
            made["tool_calls"] = calls
        return made

    # tool calls

    def _call(self, block: dict[str, Any], place: str) -> dict[str, Any]:
        given = block.get("input")
        if not isinstance(given, dict):
            raise Refusal(400, f"{place}.input: Input should be an object")
        call = _string(block, "id", place)
        self._calls.add(call)
        function = {"name": _string(block, "name", place), "arguments": self._arguments(call, given)}
        return {"id": call, "type": "function", "function": function}

    def _arguments(self, call: str, given: dict[str, Any]) -> str:
        """The string that the model wrote, where the session has it and it says the same: some templates show it."""
        written = self._earlier.get(arguments_name(call))
        if isinstance(written, str) and _same(written, given):
            return written
        return json.dumps(given, ensure_ascii=False)

    def _result(self, block: dict[str, Any], place: str) -> list[dict[str, Any]]:
        """Adds a `tool` message; gives the images of the result, which such a message cannot hold."""
        call = _string(block, "tool_use_id", place)
        if call not in self._calls:
            raise Refusal(
                400,
                f"{place}: unexpected `tool_use_id` found in `tool_result` blocks: {call}. Each `tool_result` block "
                "must have a corresponding `tool_use` block in a message before it.",
            )
        content = block.get("content")
        pictures: list[dict[str, Any]] = []
        if content is None or isinstance(content, str):
            text = content or ""
        else:
            parts = [self._part(inner, kind, at) for inner, kind, at in self._blocks(content, f"{place}.content")]
            text = "\n".join(part["text"] for part in parts if part["type"] == "text")
            pictures = [part for part in parts if part["type"] != "text"]
        if block.get("is_error") and "error" not in text[:200].lower():
            text = f"Error: {text}" if text else "Error"
        self.messages.append({"role": "tool", "tool_call_id": call, "content": text})
        return pictures

    # blocks

    def _blocks(self, content: Any, where: str) -> list[tuple[dict[str, Any], str, str]]:
        """The blocks of a content, each with its type and its path."""
        if not isinstance(content, list):
            raise Refusal(400, f"{where}: Input should be a string or a list of content blocks")
        found = []
        for at, block in enumerate(content):
            kind = block.get("type") if isinstance(block, dict) else None
            read = _READ.get(kind) if isinstance(kind, str) else None
            if read is None:
                raise Refusal(400, f"{where}.{at}: a block of type {kind!r} cannot be given to this engine")
            if len(block) > 2:
                for name in block.keys() - read:
                    if block[name] is not None:
                        self.dropped[f"{'messages[].content' if where != 'system' else where}[].{name}"] = None
            found.append((block, str(kind), f"{where}.{at}"))
        return found

    def _part(self, block: dict[str, Any], kind: str, place: str) -> dict[str, Any]:
        if kind == "text":
            return {"type": "text", "text": _string(block, "text", place)}
        source = block.get("source")
        source = source if isinstance(source, dict) else {}
        if kind == "image":
            return {"type": "image_url", "image_url": {"url": _address(source, place)}}
        if kind == "document" and source.get("type") in ("text", "content"):
            about = [block[name] for name in ("title", "context") if isinstance(block.get(name), str)]
            name = "data" if source["type"] == "text" else "content"
            inner = source.get(name)
            parts = name == "content" and not isinstance(inner, str)
            text = self._texts(inner, f"{place}.source.{name}") if parts else _string(source, name, f"{place}.source")
            return {"type": "text", "text": "\n".join([*about, text])}
        if kind == "search_result":
            about = [block[name] for name in ("title", "source") if isinstance(block.get(name), str)]
            return {"type": "text", "text": "\n".join([*about, self._texts(block.get("content"), f"{place}.content")])}
        if kind == "tool_reference":  # Claude Code's tool search (2.1); the tools themselves are all in the prompt
            return {"type": "text", "text": _string(block, "tool_name", place)}
        raise Refusal(400, f"{place}: a block of type '{kind}' cannot be given to this engine here")

    def _texts(self, content: Any, where: str) -> str:
        texts: list[str] = []
        for block, kind, place in self._blocks(content, where):
            if kind != "text":
                raise Refusal(400, f"{place}: only text is allowed here, not a block of type '{kind}'")
            text = _string(block, "text", place)
            if text.startswith(BILLING):
                self.dropped[f"{where}[]: {BILLING}"] = None
            else:
                texts.append(text)
        return "\n".join(texts)


def _joined(parts: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Parts as a string where all of them are text."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts), []
    return "", parts


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)


def _address(source: dict[str, Any], place: str) -> str:
    kind = source.get("type")
    if kind == "base64":
        return f"data:{_string(source, 'media_type', place)};base64,{_string(source, 'data', place)}"
    if kind == "url":
        return _string(source, "url", place)
    raise Refusal(400, f"{place}.source: an image can be given as 'base64' or by 'url', not as {kind!r}")


def _string(block: dict[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise Refusal(400, f"{place}.{name}: Input should be a string")
    return value


def _same(written: str, given: dict[str, Any]) -> bool:
    try:
        return bool(msgspec.json.decode(written) == given)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
