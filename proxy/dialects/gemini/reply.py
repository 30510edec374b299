"""A chat answer as Gemini's: text and thoughts as they are sampled, each function call when it is complete."""

from __future__ import annotations

import secrets
from typing import Any, Final

import orjson

from capture.chat.surrogates import SurrogateJoiner
from capture.chat.tool_calls import ToolCall, ToolCalls
from capture.json import objects
from proxy.dialects.base import ChatRequest, ReplyTranslator
from proxy.dialects.call_ids import CallIds
from proxy.dialects.chat import Json, arguments_name, as_chunk, dumps, reasoning_of, tool_calls
from proxy.dialects.gemini.history import signature

STATUSES: Final = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_FINISHES: Final = {"length": "MAX_TOKENS", "content_filter": "SAFETY", "abort": "OTHER", "error": "OTHER"}


class GeminiReply(ReplyTranslator):
    """`thoughts`: whether the agent asked to see reasoning. It comes back by signatures, shown or not."""

    def __init__(self, request: ChatRequest) -> None:
        self.model = request.chat["model"]
        self.thoughts: bool = request.context
        self.id = secrets.token_hex(11)
        self._ids = CallIds("call", request.chat["messages"])
        self._parts = _Parts(self.thoughts)
        self._usage: Any = None
        self._finish: Any = None

    # a stream

    def feed(self, chunk: dict[str, Any]) -> bytes:
        parts = self._feed(chunk, self._parts)
        return _event(self._response(parts)) if parts else b""

    def _feed(self, chunk: dict[str, Any], into: _Parts) -> list[Json]:
        self.model = chunk.get("model") or self.model
        self._usage = chunk.get("usage") or self._usage
        parts: list[Json] = []
        for choice in objects(chunk.get("choices")):
            if choice.get("index"):
                continue  # one answer: there is no second candidate
            if isinstance(choice.get("delta"), dict):
                parts += into.feed(choice["delta"])
            self._finish = choice.get("finish_reason") or self._finish
        return parts

    def finish(self) -> bytes:
        parts, end = self._rest(self._parts)
        return _event(self._response(parts, end))

    def _rest(self, parts: _Parts) -> tuple[list[Json], Json]:
        """The last parts, calls among them, and how the answer ended."""
        rest, broken = parts.rest(self._ids)
        if broken and self._finish != "length":
            return rest, {
                "finishReason": "MALFORMED_FUNCTION_CALL",
                "finishMessage": f"Malformed function call: {'; '.join(broken)}",
            }
        return rest, {"finishReason": _FINISHES.get(str(self._finish), "STOP")}

    def error_event(self, status: int, message: str) -> bytes:
        name = STATUSES.get(status, "INTERNAL" if status >= 500 else "INVALID_ARGUMENT")
        return _event({"error": {"code": status, "message": message, "status": name}})

    def ping(self) -> bytes:
        """An answer without a candidate: Google's clients read a comment as a part of one."""
        return _event({"modelVersion": self.model, "responseId": self.id})

    # a completed body

    def body(self, chat: dict[str, Any]) -> dict[str, Any]:
        """Each text as one part, also after a stream, which had it in pieces."""
        self._finish = None
        self._parts = _Parts(self.thoughts)
        parts = self._feed(as_chunk(chat), self._parts)
        rest, end = self._rest(self._parts)
        if not self._finish:
            end = {"finishReason": "OTHER"}  # it broke off
        return self._response(parts + rest, end)

    def call_ids(self) -> list[str]:
        return [self._ids.of(place, call.id) for place, call in enumerate(self._parts.calls)]

    def cache_entries(self) -> dict[str, str | bytes]:
        """The arguments of calls as the model wrote them."""
        calls = zip(self.call_ids(), self._parts.calls, strict=True)
        return {arguments_name(call_id): call.arguments for call_id, call in calls if call.pieces}

    def _response(self, parts: list[Json], end: Json | None = None) -> Json:
        candidate: Json = {"content": {"parts": parts, "role": "model"}, "index": 0}
        made: Json = {"candidates": [candidate], "modelVersion": self.model, "responseId": self.id}
        if end is not None:
            candidate |= end
            made["usageMetadata"] = _usage(self._usage)
        return made


class _Parts:
    """The parts of one answer, as its deltas come."""

    def __init__(self, thoughts: bool) -> None:
        self._thoughts = thoughts
        self._calls = ToolCalls()
        self._reasoning: list[str] = []
        self._thought_joiner = SurrogateJoiner()
        self._text_joiner = SurrogateJoiner()
        self._unsigned = False
        self._said = False

    @property
    def calls(self) -> list[ToolCall]:
        return self._calls.calls

    def feed(self, delta: Json) -> list[Json]:
        parts: list[Json] = []
        if thought := self._thought_joiner.feed(reasoning_of(delta)):
            self._reasoning.append(thought)
            self._unsigned = True
            if self._thoughts:
                parts.append({"text": thought, "thought": True})
        text = delta.get("content") or delta.get("refusal")
        if text and isinstance(text, str):
            parts += self._text(self._text_joiner.feed(text))
        for _ in self._calls.add(tool_calls(delta)):
            pass
        return parts

    def _text(self, text: str) -> list[Json]:
        self._said = self._said or bool(text)
        return [self._signed({"text": text})] if text else []

    def rest(self, ids: CallIds) -> tuple[list[Json], list[str]]:
        """The calls, which are complete now, and those whose arguments are no object."""
        parts = self._text(self._text_joiner.flush())
        broken: list[str] = []
        for place, call in enumerate(self._calls.calls):
            args = _object(call.arguments)
            if args is None:
                broken.append(f"{call.name}({call.arguments})")
            else:
                function = {"id": ids.of(place, call.id), "name": call.name or "", "args": args}
                parts.append(self._signed({"functionCall": function}))
        if not parts and (not self._said or self._unsigned):
            parts.append(self._signed({"text": ""}))
        return parts, broken

    def _signed(self, part: Json) -> Json:
        """The first part after reasoning carries it."""
        if not self._unsigned:
            return part
        self._unsigned = False
        return {**part, "thoughtSignature": signature("".join(self._reasoning))}


def _event(value: Json) -> bytes:
    return b"data: %b\r\n\r\n" % dumps(value)


def _usage(usage: Any) -> Json:
    reported: Json = usage if isinstance(usage, dict) else {}
    names = {"promptTokenCount": "prompt_tokens", "candidatesTokenCount": "completion_tokens"}
    counts = {ours: reported[theirs] for ours, theirs in names.items() if type(reported.get(theirs)) is int}
    cached = reported.get("prompt_tokens_details")
    if isinstance(cached, dict) and type(cached.get("cached_tokens")) is int:
        counts["cachedContentTokenCount"] = cached["cached_tokens"]
    return {**counts, "totalTokenCount": sum(counts.get(name, 0) for name in names)}


def _object(arguments: str) -> Json | None:
    """Arguments as an object, an empty one where there are none. None where they are no object."""
    try:
        value = orjson.loads(arguments) if arguments.strip() else {}
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
