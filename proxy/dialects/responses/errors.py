"""Errors of the Responses dialect: OpenAI's shape, with a type and a code by which its clients decide what to do.

OpenAI's clients retry after 408, 409, 429 and 5xx. So an error that a retry cannot fix must not have one of those
statuses, whatever the engine gave it.
"""

from __future__ import annotations

from typing import Any, Final

from proxy.dialects.chat import dumps
from proxy.dialects.engine_errors import MEDIA, error_message, own_fault, too_long

_KINDS: Final = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("invalid_request_error", None),
    404: ("invalid_request_error", "not_found"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}


def error_body(status: int, message: str, engine_error: Any = None) -> tuple[int, bytes]:
    """An error's status and body. `engine_error` as in `Dialect.error`."""
    message = error_message(engine_error, message)
    inner = engine_error.get("error", engine_error) if isinstance(engine_error, dict) else None
    given = inner.get("param") if isinstance(inner, dict) else None
    status, kind, code = _classify(status, message)
    param = given if isinstance(given, str) else _field_named_in(message)
    fields = {"message": message, "type": kind, "param": param, "code": code}
    return status, dumps({"error": fields})


def failure(status: int, message: str) -> dict[str, Any]:
    """The `error` of a response that failed in mid-stream."""
    status, _, code = _classify(status, message)
    return {"code": code or ("server_error" if status >= 500 else "invalid_prompt"), "message": message}


def _classify(status: int, message: str) -> tuple[int, str, str | None]:
    if too_long(message):
        return 400, "invalid_request_error", "context_length_exceeded"
    if own_fault(message):
        media = any(words in message for words in MEDIA)
        return 400, "invalid_request_error", "unsupported_image_media_type" if media else None
    kind, known = _KINDS.get(status, ("server_error", "server_error") if status >= 500 else _KINDS[400])
    return status, kind, known


def _field_named_in(message: str) -> str | None:
    """The field with which a refusal of the proxy begins."""
    return message[1 : message.index("`", 1)] if message.startswith("`") and "`" in message[1:] else None
