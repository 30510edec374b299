"""OpenAI's Responses dialect, which Codex speaks: `POST /v1/responses`, streamed and not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from proxy.dialects.base import ChatRequest, Dialect, EarlierAnswers, ReplyTranslator
from proxy.dialects.chat import arguments_name, dumps, first_choice, objects
from proxy.dialects.responses.errors import error_body
from proxy.dialects.responses.reply import ResponsesReply
from proxy.dialects.responses.request import Context, translate
from proxy.dialects.responses.tools import chat_name


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

    def reply(self, translated: ChatRequest) -> ReplyTranslator:
        return ResponsesReply(translated)

    def error(self, status: int, message: str, engine_error: Any = None) -> tuple[int, bytes]:
        return error_body(status, message, engine_error)

    def cache_entries(
        self, translated: ChatRequest, chat: dict[str, Any], body: dict[str, Any]
    ) -> Mapping[str, str | bytes]:
        """The conversation so far, for `previous_response_id`, unless `store` is false; and the arguments of custom
        calls as they were sampled, for their text alone does not tell how they were written."""
        context: Context = translated.context
        kept: dict[str, str | bytes] = {
            arguments_name(call_id): arguments for call_id, arguments in _custom(context, chat, body)
        }
        if context.store:
            kept[body["id"]] = dumps([*context.items, *body["output"]])
        return kept


def _custom(context: Context, chat: dict[str, Any], body: dict[str, Any]) -> list[tuple[str, str]]:
    calls = [item for item in body["output"] if item["type"] in ("function_call", "custom_tool_call")]
    functions = [one.get("function") for one in objects(first_choice(chat)[1].get("tool_calls"))]
    sampled = [one if isinstance(one, dict) else {} for one in functions]
    return [
        (item["call_id"], str(function.get("arguments")))
        for item, function in zip(calls, sampled, strict=False)
        if item["type"] == "custom_tool_call" and function.get("name") == chat_name(item["name"], item.get("namespace"))
    ]
