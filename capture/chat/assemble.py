"""Stream chunks to the completed body the engine would have sent without `stream`, and back again.

Every choice is kept, with reasoning under either of its names and fields that nobody knows yet as they came. An empty
string is an absent value: it never replaces one that came before.
"""

from __future__ import annotations

from typing import Any, Final

from capture.chat.surrogates import join_pairs
from capture.chat.tool_calls import ToolCalls, is_absent

#: Where engines, and gateways before them, put ids: these keys, also below these objects.
SAMPLED_IDS: Final = ("token_ids", "response_token_ids", "completion_token_ids")
ID_KEYS: Final = frozenset((*SAMPLED_IDS, "prompt_token_ids"))
NESTED: Final = frozenset(("provider_specific_fields", "raw_output", "message"))
_HOLDS_IDS: Final = ID_KEYS | NESTED | {"sglext", "choices"}

#: Delta fields that arrive in pieces of text.
_TEXT: Final = frozenset(("content", "reasoning", "reasoning_content", "refusal"))
_CHOICE_OWN: Final = frozenset(("index", "delta", "text", "logprobs", "finish_reason")) | ID_KEYS
_BODY_OWN: Final = frozenset(("choices", "usage", "object", "sglext", "error")) | ID_KEYS
_COMPLETED: Final = {"chat.completion.chunk": "chat.completion"}


class Assembler:
    """Feed it the chunks of one stream; `body()` is what has come so far, whole or not."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._object: str | None = None
        self._choices: dict[int, _Choice] = {}
        self._usage: Any = None
        self._error: Any = None

    def fail(self, chunk: dict[str, Any]) -> None:
        """An error that came in the stream, nested (vLLM) or flat (SGLang): the body says it beside what had come."""
        self._error = chunk.get("error") or chunk

    def add(self, chunk: dict[str, Any]) -> None:
        """One chunk. What is not of the expected shape is passed over: a relay must survive any engine."""
        if self._object is None:
            self._object = str(chunk.get("object") or "chat.completion.chunk")
        if chunk.get("usage"):
            self._usage = chunk["usage"]
        head = self._head
        for name, value in chunk.items():
            if name not in _BODY_OWN and (name not in head or (value != head[name] and not is_absent(value))):
                head[name] = value
        choices = chunk.get("choices")
        for position, part in enumerate(choices if isinstance(choices, list) else ()):
            if isinstance(part, dict):
                index = part.get("index")
                index = index if type(index) is int else position
                choice = self._choices.get(index)
                if choice is None:
                    choice = self._choices[index] = _Choice(index)
                choice.add(part)

    def add_text(self, index: int, field: str | None, text: str) -> None:
        """One more piece of a field of a choice that has begun: what `add` does with a chunk of that alone."""
        choice = self._choices[index]
        if choice.message is None:
            choice.message = {"role": "assistant"}
        if field is not None:
            choice.pieces.setdefault(field, []).append(text)

    def finish(self, index: int, reason: str, stop: str | int | None) -> None:
        """The end of such a choice, and what stopped it."""
        choice = self._choices[index]
        choice.finish_reason = reason
        if stop is not None or "stop_reason" not in choice.extra:
            choice.extra["stop_reason"] = stop

    @property
    def is_empty(self) -> bool:
        """Whether no choice has a text or a tool call so far."""
        return not any(choice.has_content for choice in self._choices.values())

    def body(self) -> dict[str, Any]:
        """The completed body, in the engine's own shape, without token ids and logprobs."""
        body = without_ids(self._head)
        kind = self._object or "chat.completion.chunk"
        body["object"] = _COMPLETED.get(kind, kind)
        body["choices"] = [self._choices[index].completed() for index in sorted(self._choices)]
        if self._usage is not None:
            body["usage"] = self._usage
        if self._error is not None:
            body["error"] = self._error
        return body


def without_ids(body: dict[str, Any]) -> dict[str, Any]:
    """A copy of a body or a choice without token ids, at whatever depth."""
    copy = dict(body)
    if _HOLDS_IDS.isdisjoint(body):
        return copy
    for name in ID_KEYS.intersection(copy):
        del copy[name]
    for name in NESTED.intersection(copy):
        if isinstance(copy[name], dict):
            copy[name] = without_ids(copy[name])
    ext = copy.get("sglext")
    if isinstance(ext, dict):
        copy["sglext"] = {name: value for name, value in ext.items() if name not in ("input_ids", "output_ids")}
        if not copy["sglext"]:
            del copy["sglext"]
    if isinstance(copy.get("choices"), list):
        copy["choices"] = [without_ids(choice) if isinstance(choice, dict) else choice for choice in copy["choices"]]
    return copy


class _Choice:
    def __init__(self, index: int) -> None:
        self.index = index
        self.finish_reason: Any = None
        self.extra: dict[str, Any] = {}
        self.text: list[str] | None = None
        self.message: dict[str, Any] | None = None
        self.pieces: dict[str, list[str]] = {}
        self.tools = ToolCalls()

    def add(self, part: dict[str, Any]) -> None:
        finish = part.get("finish_reason")
        if finish is not None and finish != "":
            self.finish_reason = finish
        if len(part) > 3:
            for name, value in part.items():
                if name not in _CHOICE_OWN and (name not in self.extra or not is_absent(value)):
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
                for _ in self.tools.add(value):
                    pass
            elif name == "function_call" and isinstance(value, dict):
                if not isinstance(self.message.get("function_call"), dict):
                    self.message["function_call"] = {"name": "", "arguments": ""}
                for field in ("name", "arguments"):
                    if isinstance(value.get(field), str):
                        self.message["function_call"][field] += value[field]
            elif name in _TEXT and isinstance(value, str):
                self.pieces.setdefault(name, []).append(value)
            elif isinstance(value, list) and isinstance(self.message.get(name), list):
                self.message[name] = self.message[name] + value  # parts, such as a hosted API's reasoning details
            elif not is_absent(value) or (name not in self.message and name not in _TEXT):
                self.message[name] = value

    @property
    def has_content(self) -> bool:
        called = self.tools.calls or (self.message or {}).get("function_call")
        return bool(called) or any(self.text or ()) or any(map(any, self.pieces.values()))

    def completed(self) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": self.index}
        if self.message is not None or self.text is None:
            choice["message"] = self._message()
        else:
            choice["text"] = join_pairs("".join(self.text))
        return without_ids({**choice, "logprobs": None, "finish_reason": self.finish_reason, **self.extra})

    def _message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None, **(self.message or {})}
        for name, pieces in self.pieces.items():
            message[name] = join_pairs("".join(pieces))
        if self.tools.calls:
            message["content"] = message["content"] or None  # as vLLM and SGLang answer unstreamed
            message["tool_calls"] = [call.json() for call in self.tools.calls]
        return message


def stream_of(body: dict[str, Any], *, include_usage: bool = False) -> list[dict[str, Any]]:
    """The chunks of a stream that says what `body`, a completed answer, says: for an answer that came whole.

    Token ids and logprobs that are still in it were asked for by the agent, and go along. An error is one chunk.
    """
    if "choices" not in body:
        return [body]
    chat = body.get("object") != "text_completion"
    head: dict[str, Any] = {
        name: body[name] for name in ("id", "created", "model", "system_fingerprint") if name in body
    }
    head["object"] = "chat.completion.chunk" if chat else "text_completion"
    choices = body["choices"] if isinstance(body["choices"], list) else []
    chunks: list[dict[str, Any]] = []
    for choice in choices:
        if isinstance(choice, dict):
            parts = _chat_parts(choice) if chat else _text_parts(choice)
            first = {"prompt_token_ids": body["prompt_token_ids"]} if body.get("prompt_token_ids") is not None else {}
            chunks += [{**head, "choices": [part], **(first if n == 0 else {})} for n, part in enumerate(parts)]
    if body.get("sglext"):
        chunks.append({**head, "choices": [], "sglext": body["sglext"]})
    if include_usage:
        chunks.append({**head, "choices": [], "usage": body.get("usage")})
    return chunks


#: Message fields in the order in which engines stream them.
_STREAMED: Final = ("reasoning_content", "reasoning", "content", "refusal", "tool_calls", "function_call")


def _chat_parts(choice: dict[str, Any]) -> list[dict[str, Any]]:
    given = choice.get("message")
    message: dict[str, Any] = given if isinstance(given, dict) else {}
    index = choice.get("index", 0)
    deltas: list[dict[str, Any]] = [{"role": message.get("role") or "assistant", "content": ""}]
    names = [*_STREAMED, *(name for name in message if name not in ("role", *_STREAMED))]
    deltas += [{name: _streamed(name, message[name])} for name in names if message.get(name)]
    parts = [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
    parts.append({"index": index, "delta": {}, "logprobs": None, "finish_reason": choice.get("finish_reason")})
    parts[1]["logprobs"] = choice.get("logprobs")
    parts[1].update(_present(choice, *SAMPLED_IDS))
    parts[-1].update(_present(choice, "stop_reason", "matched_stop"))
    parts[0].update(_present(choice, "prompt_token_ids"))
    return parts


def _streamed(name: str, value: Any) -> Any:
    if name != "tool_calls" or not isinstance(value, list):
        return value
    return [{**tool, "index": place} for place, tool in enumerate(value) if isinstance(tool, dict)]


def _text_parts(choice: dict[str, Any]) -> list[dict[str, Any]]:
    index = choice.get("index", 0)
    text = {"index": index, "text": choice.get("text") or "", "logprobs": choice.get("logprobs"), "finish_reason": None}
    text.update(_present(choice, *SAMPLED_IDS, "prompt_token_ids"))
    last = {"index": index, "text": "", "logprobs": None, "finish_reason": choice.get("finish_reason")}
    return [text, {**last, **_present(choice, "stop_reason", "matched_stop")}]


def _present(choice: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: choice[name] for name in names if name in choice}
