"""Errors of the Responses dialect: OpenAI's shape, with a type and a code by which its clients decide what to do.

OpenAI's clients call again after 408, 409, 429 and 5xx. So a request that no second call can help must not have one of
those, whatever status the engine gave it.
"""

from __future__ import annotations

from typing import Any, Final

from proxy.dialects.chat import dumps
from proxy.dialects.engine_errors import MEDIA, own_fault, too_long

_KINDS: Final = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("invalid_request_error", None),
    404: ("invalid_request_error", "not_found"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}


def error_body(status: int, message: str, engine_error: Any = None) -> tuple[int, bytes]:
    """An error's status and body. `engine_error`: the engine's own body, nested (vLLM, llama.cpp) or flat (SGLang)."""
    told = engine_error.get("error", engine_error) if isinstance(engine_error, dict) else engine_error
    said: dict[str, Any] = told if isinstance(told, dict) else {}
    if isinstance(said.get("message"), str):
        message = said["message"]
    status, kind, code = _judged(status, message)
    param = said.get("param") if isinstance(said.get("param"), str) else _named(message)
    fields = {"message": message, "type": kind, "param": param, "code": code}
    return status, dumps({"error": fields})


def failure(status: int, message: str) -> dict[str, Any]:
    """The `error` of a response that failed in mid-stream."""
    status, _, code = _judged(status, message)
    return {"code": code or ("server_error" if status >= 500 else "invalid_prompt"), "message": message}


def _judged(status: int, message: str) -> tuple[int, str, str | None]:
    if too_long(message):
        return 400, "invalid_request_error", "context_length_exceeded"
    if own_fault(message):
        media = any(words in message for words in MEDIA)
        return 400, "invalid_request_error", "unsupported_image_media_type" if media else None
    kind, known = _KINDS.get(status, ("server_error", "server_error") if status >= 500 else _KINDS[400])
    return status, kind, known


def _named(message: str) -> str | None:
    """The field that a refusal of ours begins with."""
    return message[1 : message.index("`", 1)] if message.startswith("`") and "`" in message[1:] else None
