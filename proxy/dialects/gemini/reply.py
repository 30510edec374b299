"""A chat answer as Gemini's: text and thoughts as they are sampled, each call of a function when it is whole."""

from __future__ import annotations

import secrets
from typing import Any, Final

import orjson

from capture.assemble import Assembler
from proxy.dialects.base import ReplyTranslator
from proxy.dialects.chat import dumps, first_choice, objects
from proxy.dialects.gemini.history import signature

Json = dict[str, Any]

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

    def __init__(self, model: str, *, thoughts: bool) -> None:
        self.model = model
        self.thoughts = thoughts
        self.id = secrets.token_hex(11)
        self._calls = Assembler()
        self._called = False
        self._reasoning: list[str] = []
        self._unsigned = False
        self._said = False
        self._usage: Any = None
        self._finish: Any = None

    # a stream

    def feed(self, chunk: dict[str, Any]) -> bytes:
        self.model = chunk.get("model") or self.model
        if chunk.get("usage") is not None:
            self._usage = chunk["usage"]
        parts: list[Json] = []
        for choice in objects(chunk.get("choices")):
            if choice.get("index"):
                continue  # one answer: there is no second candidate
            if isinstance(choice.get("delta"), dict):
                self._delta(choice["delta"], parts)
            self._finish = choice.get("finish_reason") or self._finish
        return _event(self._response(parts)) if parts else b""

    def _delta(self, delta: Json, parts: list[Json]) -> None:
        thought = delta.get("reasoning") or delta.get("reasoning_content")
        if thought and isinstance(thought, str):
            self._reasoning.append(thought)
            self._unsigned = True
            if self.thoughts:
                parts.append({"text": thought, "thought": True})
        text = delta.get("content") or delta.get("refusal")
        if text and isinstance(text, str):
            parts.append(self._signed({"text": text}))
            self._said = True
        if delta.get("tool_calls") or delta.get("function_call"):
            self._called = True
            self._calls.add({"choices": [{"index": 0, "delta": delta}]})

    def _signed(self, part: Json) -> Json:
        """The first part after reasoning carries it."""
        if not self._unsigned:
            return part
        self._unsigned = False
        return {**part, "thoughtSignature": signature("".join(self._reasoning))}

    def finish(self) -> bytes:
        parts, finish = self._rest()
        return _event(self._response(parts, finish))

    def _rest(self) -> tuple[list[Json], Json]:
        """The calls, which are whole now, and how the answer ended."""
        parts: list[Json] = []
        broken: list[str] = []
        for call in _calls(self._calls.body()) if self._called else ():
            function = call.get("function") or {}
            args = _parsed(function.get("arguments"))
            if args is None:
                broken.append(f"{function.get('name')}({function.get('arguments')})")
                continue
            made = {"id": call.get("id"), "name": function.get("name"), "args": args}
            parts.append(self._signed({"functionCall": {name: one for name, one in made.items() if one is not None}}))
        if not parts and (not self._said or self._unsigned):
            parts.append(self._signed({"text": ""}))
        finish: Json = {"finishReason": _FINISHES.get(str(self._finish), "STOP")}
        if broken and self._finish != "length":
            finish = {
                "finishReason": "MALFORMED_FUNCTION_CALL",
                "finishMessage": f"Malformed function call: {'; '.join(broken)}",
            }
        return parts, finish

    def error_event(self, status: int, message: str) -> bytes:
        name = STATUSES.get(status, "INTERNAL" if status >= 500 else "INVALID_ARGUMENT")
        return _event({"error": {"code": status, "message": message, "status": name}})

    def ping(self) -> bytes:
        """An answer without a candidate: Google's clients read a comment as a part of one."""
        return _event({"modelVersion": self.model, "responseId": self.id})

    # a whole answer

    def body(self, chat: dict[str, Any]) -> dict[str, Any]:
        choice, message = first_choice(chat)
        one = GeminiReply(chat.get("model") or self.model, thoughts=self.thoughts)
        one.id, one._usage, one._finish = self.id, chat.get("usage"), choice.get("finish_reason")
        parts: list[Json] = []
        one._delta(message, parts)
        rest, finish = one._rest()
        if one._finish is None:
            finish = {"finishReason": "OTHER"}  # it broke off
        return one._response(parts + rest, finish)

    def _response(self, parts: list[Json], finish: Json | None = None) -> Json:
        candidate: Json = {"content": {"parts": parts, "role": "model"}, "index": 0}
        made: Json = {"candidates": [candidate], "modelVersion": self.model, "responseId": self.id}
        if finish is not None:
            candidate |= finish
            made["usageMetadata"] = _usage(self._usage)
        return made


def _event(value: Json) -> bytes:
    return b"data: %b\r\n\r\n" % dumps(value)


def _usage(usage: Any) -> Json:
    told: Json = usage if isinstance(usage, dict) else {}
    made = {"promptTokenCount": "prompt_tokens", "candidatesTokenCount": "completion_tokens"}
    counts = {ours: told[theirs] for ours, theirs in made.items() if type(told.get(theirs)) is int}
    cached = told.get("prompt_tokens_details")
    if isinstance(cached, dict) and type(cached.get("cached_tokens")) is int:
        counts["cachedContentTokenCount"] = cached["cached_tokens"]
    return {**counts, "totalTokenCount": sum(counts.get(name, 0) for name in made)}


def _calls(body: Json) -> list[Json]:
    choices = body["choices"]
    calls = choices[0]["message"] if choices else {}
    made: list[Json] = calls.get("tool_calls") or []
    if not made and isinstance(calls.get("function_call"), dict):
        made = [{"function": calls["function_call"]}]
    return made


def _parsed(arguments: Any) -> Json | None:
    """Arguments as an object, an empty one where there are none. None where they are no object."""
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments) if arguments.strip() else {}
        except orjson.JSONDecodeError:
            return None
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) else None
