"""Errors of the Messages dialect: Anthropic's shape, statuses and words, by which its clients decide what to do."""

from __future__ import annotations

from typing import Any, Final

from proxy.dialects.engine_errors import own_fault, too_long

#: Anthropic's error types by status; what is not here is an `api_error`, as their SDKs read any 5xx.
ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    421: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def status_of(status: int, message: str) -> int:
    """Statuses as Anthropic's: 422 is 400, and a busy engine's 503 is 529, which its clients wait for. What no second
    call can help is 400 too."""
    return 400 if own_fault(message) else {422: 400, 503: 529}.get(status, status)


def error_object(status: int, message: str) -> dict[str, Any]:
    """An error as Anthropic says it; its clients know a prompt that is too long by their own words for it."""
    if too_long(message):
        message = f"prompt is too long: {message}"
    kind = ERROR_TYPES.get(status_of(status, message), "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
