"""Stream chunks to the completed body the engine would have sent without `stream`, and back again.

Every choice is kept, tool calls are merged by index and id, reasoning under either of its names, and fields nobody
knows yet as they came.
"""

from __future__ import annotations

from typing import Any, Final

#: Delta fields that arrive in pieces of text.
_TEXT: Final = ("content", "reasoning", "reasoning_content", "refusal")
_CHOICE_OWN: Final = frozenset(("index", "delta", "text", "logprobs", "token_ids", "prompt_token_ids", "finish_reason"))
_BODY_OWN: Final = frozenset(("choices", "usage", "object", "prompt_token_ids", "sglext", "error"))
_COMPLETED: Final = {"chat.completion.chunk": "chat.completion"}


class Assembler:
    """Feed it the chunks of one stream; `body()` is what has come so far, whole or not."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._object: str | None = None
        self._choices: dict[int, _Choice] = {}
        self._usage: Any = None

    def add(self, chunk: dict[str, Any]) -> None:
        """One chunk. What is not of the expected shape is passed over: a relay must survive any engine."""
        if self._object is None:
            self._object = str(chunk.get("object") or "chat.completion.chunk")
        if chunk.get("usage") is not None:
            self._usage = chunk["usage"]
        for name, value in chunk.items():
            if name not in _BODY_OWN and (value is not None or name not in self._head):
                self._head[name] = value
        choices = chunk.get("choices")
        for position, part in enumerate(choices if isinstance(choices, list) else ()):
            if isinstance(part, dict):
                index = part.get("index")
                index = index if isinstance(index, int) else position
                choice = self._choices.get(index)
                if choice is None:
                    choice = self._choices[index] = _Choice(index)
                choice.add(part)

    def body(self) -> dict[str, Any]:
        """The completed body, in the engine's own shape, without token ids and logprobs."""
        body = dict(self._head)
        kind = self._object or "chat.completion.chunk"
        body["object"] = _COMPLETED.get(kind, kind)
        body["choices"] = [self._choices[index].completed() for index in sorted(self._choices)]
        if self._usage is not None:
            body["usage"] = self._usage
        return body


class _Choice:
    def __init__(self, index: int) -> None:
        self.index = index
        self.finish_reason: Any = None
        self.extra: dict[str, Any] = {}
        self.text: list[str] | None = None
        self.message: dict[str, Any] | None = None
        self.pieces: dict[str, list[str]] = {}
        self.tools: list[dict[str, Any]] = []
        self.arguments: list[list[str]] = []

    def add(self, part: dict[str, Any]) -> None:
        if part.get("finish_reason") is not None:
            self.finish_reason = part["finish_reason"]
        if len(part) > 3:
            for name, value in part.items():
                if name not in _CHOICE_OWN and (value is not None or name not in self.extra):
                    self.extra[name] = value
        text = part.get("text")
        if isinstance(text, str):
            if self.text is None:
                self.text = []
            self.text.append(text)
        delta = part.get("delta")
        if isinstance(delta, dict):
            self._delta(delta)

    def _delta(self, delta: dict[str, Any]) -> None:
        if self.message is None:
            self.message = {"role": "assistant"}
        for name, value in delta.items():
            if name == "tool_calls":
                for fragment in value if isinstance(value, list) else ():
                    if isinstance(fragment, dict):
                        self._tool(fragment)
            elif name == "function_call" and isinstance(value, dict):
                held = self.message.setdefault("function_call", {"name": "", "arguments": ""})
                for field in ("name", "arguments"):
                    if isinstance(value.get(field), str):
                        held[field] += value[field]
            elif name in _TEXT:
                if isinstance(value, str):
                    self.pieces.setdefault(name, []).append(value)
            elif value is not None or name not in self.message:
                self.message[name] = value

    def _tool(self, fragment: dict[str, Any]) -> None:
        """Opens a call or continues one: by index, else by id; a fragment with neither continues the last."""
        index, call_id = fragment.get("index"), fragment.get("id")
        place = next(
            (n for n, tool in enumerate(self.tools) if isinstance(index, int) and tool["index"] == index), None
        )
        if place is None and not isinstance(index, int):
            if call_id:
                place = next((n for n, tool in enumerate(self.tools) if tool.get("id") == call_id), None)
            elif self.tools:
                place = len(self.tools) - 1
        if place is None:
            place = len(self.tools)
            self.tools.append(
                {"index": index if isinstance(index, int) else place, "id": None, "type": "function", "function": {}}
            )
            self.arguments.append([])
        held = self.tools[place]
        for name, value in fragment.items():
            if name == "function" and isinstance(value, dict):
                self._function(held["function"], self.arguments[place], value)
            elif name not in ("index", "function") and value is not None:
                held[name] = value

    def _function(self, held: dict[str, Any], arguments: list[str], given: dict[str, Any]) -> None:
        for name, value in given.items():
            if name == "arguments":
                if isinstance(value, str):
                    arguments.append(value)
                elif value is not None:
                    held["arguments"] = value  # a dict where a string belongs: kept as the engine sent it
            elif name == "name" and isinstance(value, str):
                if held.get("name") != value:  # some engines repeat it in every fragment
                    held["name"] = held.get("name", "") + value
            elif value is not None:
                held[name] = value

    def completed(self) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": self.index}
        if self.message is not None or self.text is None:
            choice["message"] = self._message()
        else:
            choice["text"] = "".join(self.text)
        return {**choice, "logprobs": None, "finish_reason": self.finish_reason, **self.extra}

    def _message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None, **(self.message or {})}
        for name, pieces in self.pieces.items():
            message[name] = "".join(pieces)
        if self.tools:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {
                    **{name: value for name, value in tool.items() if name not in ("index", "function")},
                    "function": {"arguments": "".join(arguments), **tool["function"]},
                }
                for tool, arguments in zip(self.tools, self.arguments, strict=True)
            ]
        return message


def stream_of(body: dict[str, Any], *, include_usage: bool = False) -> list[dict[str, Any]]:
    """The chunks of a stream that says what `body`, a completed answer, says: for an answer that came whole."""
    chat = body.get("object") != "text_completion"
    head: dict[str, Any] = {
        name: body[name] for name in ("id", "created", "model", "system_fingerprint") if name in body
    }
    head["object"] = "chat.completion.chunk" if chat else "text_completion"
    choices = [one for one in body.get("choices") or [] if isinstance(one, dict)]
    chunks = [{**head, "choices": [part]} for one in choices for part in (_chat_parts if chat else _text_parts)(one)]
    if include_usage:
        chunks.append({**head, "choices": [], "usage": body.get("usage")})
    return chunks


def _chat_parts(choice: dict[str, Any]) -> list[dict[str, Any]]:
    message = choice.get("message") if isinstance(choice.get("message"), dict) else {}
    assert isinstance(message, dict)
    index, logprobs = choice.get("index", 0), choice.get("logprobs")
    deltas: list[dict[str, Any]] = [{"role": message.get("role", "assistant"), "content": ""}]
    deltas += [{name: message[name]} for name in ("reasoning_content", "reasoning") if message.get(name)]
    deltas += [{name: message[name]} for name in ("content", "refusal") if message.get(name)]
    tools = message.get("tool_calls")
    if tools:
        deltas.append({"tool_calls": [{"index": place, **tool} for place, tool in enumerate(tools)]})
    if message.get("function_call"):
        deltas.append({"function_call": message["function_call"]})
    parts = [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
    parts.append({"index": index, "delta": {}, "logprobs": None, "finish_reason": choice.get("finish_reason")})
    parts[1 if len(parts) > 2 else -1]["logprobs"] = logprobs
    parts[-1].update({name: choice[name] for name in ("stop_reason", "matched_stop") if name in choice})
    return parts


def _text_parts(choice: dict[str, Any]) -> list[dict[str, Any]]:
    index = choice.get("index", 0)
    last = {"index": index, "text": "", "logprobs": None, "finish_reason": choice.get("finish_reason")}
    last.update({name: choice[name] for name in ("stop_reason", "matched_stop") if name in choice})
    text = {"index": index, "text": choice.get("text") or "", "logprobs": choice.get("logprobs"), "finish_reason": None}
    return [text, last]
