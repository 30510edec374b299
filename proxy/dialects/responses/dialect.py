"""OpenAI's Responses dialect, which Codex speaks: `POST /v1/responses`, streamed and not."""

from __future__ import annotations

from typing import Any, ClassVar

from proxy.dialects.base import ChatRequest, Dialect, EarlierAnswers, ReplyTranslator
from proxy.dialects.responses.errors import error_body
from proxy.dialects.responses.reply import ResponsesReply
from proxy.dialects.responses.request import translate


class ResponsesDialect(Dialect):
    wire: ClassVar[str] = "openai-responses"
    call_type: ClassVar[str] = "responses"
    paths: ClassVar[tuple[str, ...]] = ("/v1/responses",)
    not_served: ClassVar[str] = (
        "no answer is kept to be fetched, and no background runs. POST /v1/responses is, with the whole history or a "
        "previous_response_id of the same session"
    )

    def translate(self, body: dict[str, Any], earlier: EarlierAnswers) -> ChatRequest:
        return translate(body, earlier)

    def reply(self, request: ChatRequest) -> ReplyTranslator:
        return ResponsesReply(request)

    def error(self, status: int, message: str, engine_error: Any = None) -> tuple[int, bytes]:
        return error_body(status, message, engine_error)
