"""Gemini's dialect, which Gemini CLI speaks: `POST /v1beta/models/<model>:generateContent` and
`:streamGenerateContent?alt=sse`. The path names the model and whether the answer is streamed."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from proxy.dialects.base import ChatRequest, Dialect, EarlierAnswers, ReplyTranslator
from proxy.dialects.chat import dumps
from proxy.dialects.engine_errors import error_message, own_fault
from proxy.dialects.gemini.history import messages_of
from proxy.dialects.gemini.reply import STATUSES, GeminiReply
from proxy.dialects.gemini.request import camel, chat_fields
from proxy.errors import Refusal

#: Gemini CLI uses the first prefix, later clients of Google's the second.
PREFIXES: Final = ("/v1beta/models/", "/v1/models/")
_METHODS: Final = (":generateContent", ":streamGenerateContent")


class GeminiDialect(Dialect):
    """`for_call` gives the dialect of one call: its address names the model, and whether the answer is streamed."""

    wire: ClassVar[str] = "gemini"
    call_type: ClassVar[str] = "gemini"
    paths: ClassVar[tuple[str, ...]] = PREFIXES

    def __init__(self, model: str = "", streams: bool = False) -> None:
        self.model = model
        self.streams = streams

    def for_call(self, path: str, query: bytes) -> GeminiDialect:
        """The dialect of a call to `path`. Raises `Refusal` (404) for what is no call of a model."""
        model, _, method = path.split("/models/", 1)[1].rpartition(":")
        if not model or f":{method}" not in _METHODS:
            raise Refusal(404, f"{path} is not served here; a model's name is followed by {' or '.join(_METHODS)}")
        streams = method == "streamGenerateContent"
        if streams and b"alt=sse" not in query:
            raise Refusal(400, "`alt` must be sse: answers are streamed as server-sent events only")
        return GeminiDialect(model, streams)

    def translate(self, body: dict[str, Any], earlier: EarlierAnswers) -> ChatRequest:
        body = camel(body)
        fields, dropped, thoughts = chat_fields(body)
        chat = {"model": self.model, "messages": messages_of(body, earlier), **fields}
        if self.streams:
            chat |= {"stream": True, "stream_options": {"include_usage": True}}
        return ChatRequest(chat=chat, dropped=dropped, streams=self.streams, context=thoughts)

    def reply(self, request: ChatRequest) -> ReplyTranslator:
        return GeminiReply(request)

    def error(self, status: int, message: str, engine_error: Any = None) -> tuple[int, bytes]:
        message = error_message(engine_error, message)
        if own_fault(message):
            status = 400
        name = STATUSES.get(status, "INTERNAL" if status >= 500 else "INVALID_ARGUMENT")
        return status, dumps({"error": {"code": status, "message": message, "status": name}})
