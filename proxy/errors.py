"""What can go wrong in the proxy, and how an agent is told in the words of its engine.

ProxyError                    text is fit for the person who runs the proxy
├── SettingsError             an option cannot be used as given
├── SessionError              a session cannot be opened or closed
│   └── NoSuchSession         it is not open (any more)
└── UpstreamError             the engine did not answer as it should
    ├── UpstreamUnreachable   nothing was sent
    ├── UpstreamTimeout       it was sent; no answer, or no more of it, in time
    ├── UpstreamBroke         the connection ended, or what came is not HTTP
    ├── UpstreamFault         an error inside an answer that began as a success
    └── NotBridged            nothing was sent: token-in is required, and cannot be done for this call

Refusal                       an answer of our own to an agent: a status and a sentence
"""

from __future__ import annotations

from typing import Any

import orjson

from capture.errors import BenchError

#: What an agent is told of a fault of the proxy's own.
FAILED = "the proxy failed; its log says how"


class ProxyError(BenchError):
    """Root of the proxy's errors; its text is fit for people."""


class SettingsError(ProxyError):
    """An option cannot be used as given."""


class SessionError(ProxyError):
    """A session cannot be opened, found or closed."""


class NoSuchSession(SessionError):
    """No session of this id or name is open."""


class UpstreamError(ProxyError):
    """The engine did not answer as it should. The text names no address, `status` is what the agent gets."""

    status = 502


class UpstreamUnreachable(UpstreamError):
    """No connection: nothing was sent, so trying another replica is safe."""


class UpstreamTimeout(UpstreamError):
    """The engine did not answer, or stopped answering, within its bound."""

    status = 504


class UpstreamBroke(UpstreamError):
    """The connection ended in the middle, or what came is not HTTP."""


class UpstreamFault(UpstreamError):
    """The engine reported an error inside an answer that began as a success."""

    def __init__(self, status: int, message: str, engine_error: dict[str, Any]) -> None:
        """`engine_error` is the engine's own parsed error."""
        super().__init__(message)
        self.status = status
        self.engine_error = engine_error


class NotBridged(UpstreamError):
    """Token-in is required, and the call cannot be bridged: nothing was sent."""

    status = 422  # no client's library repeats a call for it, as it would for 409


class Refusal(Exception):
    """An answer of our own instead of the engine's."""

    def __init__(self, status: int, message: str, kind: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind or _KINDS.get(status, "InternalServerError")


_KINDS = {
    400: "BadRequestError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "PayloadTooLargeError",
    417: "ExpectationFailedError",
    421: "MisdirectedRequestError",
    431: "RequestHeaderFieldsTooLargeError",
    501: "NotImplementedError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
    505: "HTTPVersionNotSupportedError",
}


def error_object(status: int, message: str, kind: str, *, flat: bool = False) -> dict[str, Any]:
    """An error in the engine's own shape: `flat` (SGLang 0.5), or nested under `error` (vLLM, llama.cpp)."""
    fields = {"message": message, "type": kind, "param": None, "code": status}
    if flat:
        return {"object": "error", **fields}
    return {"error": fields}


def error_body(refusal: Refusal, *, flat: bool = False) -> bytes:
    return orjson.dumps(error_object(refusal.status, refusal.message, refusal.kind, flat=flat))
