"""The answer to a call past the session's budget: a message of the assistant that ends its turn, in any dialect."""

from __future__ import annotations

import secrets
import time
from typing import Any

import orjson

from capture.engines.base import Engine
from capture.engines.reader import Reader
from capture.engines.request import UpstreamRequest
from capture.engines.wires import CHAT
from proxy.calls.reply_writer import WholeReply
from proxy.calls.request_body import Request
from proxy.calls.translator import Translator
from proxy.http.headers import JSON_HEADERS


def last_message(translator: Translator, request: Request, wire: str, text: str) -> WholeReply | bytes:
    """The reply with `text` as the whole message, or its events where the agent streams. Nothing of it is recorded."""
    body = dict(request.upstream)
    reader = Reader(Engine(), wire, body, UpstreamRequest(dict(body), unstreamed=request.streams))
    data = orjson.dumps(_completion(wire, str(body.get("model")), text))
    return translator.whole(reader, data, list(JSON_HEADERS), streams=request.streams)


def _completion(wire: str, model: str, text: str) -> dict[str, Any]:
    content = {"message": {"role": "assistant", "content": text}} if wire == CHAT else {"text": text}
    return {
        "id": "budget-" + secrets.token_hex(8),
        "object": "chat.completion" if wire == CHAT else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }
