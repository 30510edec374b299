"""Helpers to read and write an engine's reply: events, JSON that may be invalid, an error's message."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import orjson

from proxy.http.headers import Headers

KEEP_ALIVE = b": keep-alive\n\n"


def one_event(data: bytes) -> bytes:
    """A whole body as one event: its line ends would break the event."""
    return b"data: " + b" ".join(data.splitlines()) + b"\n\n"


def sse(data: bytes | None) -> bytes:
    return b"" if data is None else b"data: " + data + b"\n\n"


def is_event_stream(headers: Headers) -> bool:
    return any(name == b"content-type" and value.lower().startswith(b"text/event-stream") for name, value in headers)


def loads(data: bytes) -> Any:
    with suppress(orjson.JSONDecodeError):
        return orjson.loads(data)
    return None


def refusal_text(data: bytes) -> str:
    """The sentence in an engine's error body, shortened."""
    return error_text(loads(data)) or one_line(data[:200].decode("utf-8", "replace"))


def error_text(body: Any) -> str | None:
    """The sentence in a parsed error: nested under `error` (vLLM, llama.cpp), flat (SGLang), or a word (vLLM's 401)."""
    error = body.get("error", body) if isinstance(body, dict) else body
    text = error.get("message") if isinstance(error, dict) else error
    return (one_line(text) or None) if isinstance(text, str) else None


def one_line(text: str) -> str:
    """Foreign text for a log or a terminal: on one line, shortened, without control characters."""
    return "".join(sign for sign in " ".join(text.split()) if sign.isprintable())[:300]
