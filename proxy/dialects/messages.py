"""Anthropic's Messages: `POST /v1/messages` to chat completions and back.

Anthropic's API of 2023-06-01 as Claude Code 2.1 and the official client (2.14) use it. vLLM 0.32 serves this route
itself, without token ids.
"""

from __future__ import annotations

from typing import Any, ClassVar

import orjson

from proxy.dialects.base import Dialect, Earlier, Translated
from proxy.dialects.messages_reply import MessageReply, error_object
from proxy.errors import Refusal


class Messages(Dialect):
    wire: ClassVar[str] = "anthropic-messages"
    call_type: ClassVar[str] = "anthropic_messages"
    path: ClassVar[str] = "/v1/messages"

    def translate(self, body: dict[str, Any], earlier: Earlier) -> Translated:
        chat: dict[str, Any] = {"model": body.get("model"), "messages": []}
        if body.get("system"):
            chat["messages"].append({"role": "system", "content": _text(body["system"], "system")})
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Refusal(400, "messages: a list of at least one message is needed")
        for at, message in enumerate(messages):
            if not isinstance(message, dict):
                raise Refusal(400, f"messages.{at}: an object with role and content is needed")
            chat["messages"].append(
                {"role": message.get("role"), "content": _text(message.get("content"), f"messages.{at}")}
            )
        streams = body.get("stream") is True
        if "max_tokens" not in body:
            raise Refusal(400, "max_tokens: Field required")
        chat["max_tokens"] = body["max_tokens"]
        if streams:
            chat.update(stream=True, stream_options={"include_usage": True})
        return Translated(chat, [], streams)

    def reply(self, translated: Translated) -> MessageReply:
        stops = translated.chat.get("stop")
        return MessageReply(str(translated.chat.get("model") or ""), stops if isinstance(stops, list) else [])

    def error(self, status: int, message: str, engine_error: Any = None) -> tuple[int, bytes]:
        """Statuses as Anthropic's: 422 is 400, and a busy engine's 503 is 529, which its clients wait for."""
        status = {422: 400, 503: 529}.get(status, status)
        return status, orjson.dumps(error_object(status, message))


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in content):
        return "\n".join(one["text"] for one in content)
    raise Refusal(400, f"{where}: text is needed")
