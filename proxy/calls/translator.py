"""How a call's request and reply are translated: not at all for chat completions, by a dialect for others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from capture.chat.assemble import stream_of
from capture.engines.reader import Reader
from capture.sse import Event
from proxy.calls.reply_bytes import KEEP_ALIVE, loads, sse
from proxy.calls.reply_writer import WholeReply
from proxy.calls.request_body import Request
from proxy.errors import Refusal, error_body
from proxy.http.headers import JSON_HEADERS, Headers
from proxy.settings import SessionOptions

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Translated:
    """A call in a dialect, for its record: the agent's body of the answer, and the engine's as chat.

    `sent`: whether the request could be translated at all. `call_ids`: those of the answer's tool calls as the agent
    got them, in the order of `chat`.
    """

    body: Any
    chat: dict[str, Any] | None
    dropped: list[str]
    sent: bool
    call_ids: Sequence[str] = ()


class Translator(ABC):
    """The translator of one call, used once, in the order of its methods; bytes are whole events."""

    #: Whether a stream's head goes out with the engine's; else it waits for the first event: an error gets its status.
    starts_at_once: bool = True
    #: Whether a stream that breaks off at the engine breaks off for the agent; else it ends with an error event.
    cuts: bool = True

    def request(self, request: Request, options: SessionOptions) -> Request:
        """The request as it goes to the engine. Raises `Refusal`."""
        return request

    @abstractmethod
    def event(self, reader: Reader, event: Event) -> bytes:
        """The events for an event of the engine that has data."""

    @abstractmethod
    def comment(self, event: Event) -> bytes:
        """What the agent gets for an event without data."""

    @abstractmethod
    def done(self, reader: Reader, event: Event) -> bytes:
        """What the agent gets for the engine's [DONE]."""

    @abstractmethod
    def finish(self, reader: Reader) -> bytes:
        """The events that end a stream. May raise `UpstreamError`."""

    @abstractmethod
    def whole(self, reader: Reader, data: bytes, headers: Headers, *, streams: bool) -> WholeReply | bytes:
        """The reply for an answer that the engine did not stream: events where the agent `streams`.

        `headers` are those of the engine that may be passed on. May raise `UpstreamError`.
        """

    @abstractmethod
    def engine_error(self, status: int, data: bytes, headers: Headers) -> WholeReply:
        """The reply for an error answer of the engine."""

    @abstractmethod
    def error(self, refusal: Refusal, engine_error: Any = None, *, flat: bool = False) -> WholeReply:
        """The reply for an error of ours, or for an error (`engine_error`) inside an answer.

        `flat`: whether the engine's own errors are (see `error_object`).
        """

    @abstractmethod
    def ping(self) -> bytes:
        """What keeps a quiet stream open."""

    def translated(self, reader: Reader | None, outcome: str) -> Translated | None:
        """For the record, when the call has ended; None where there was nothing to translate."""
        return None


class PassThrough(Translator):
    """Chat completions and completions: the engine's bytes, less what exists only because we asked for it."""

    def __init__(self, on_fault: Callable[[Exception], None]) -> None:
        """`on_fault` gets the error where an answer cannot be read, which is then passed on unchanged."""
        self._on_fault = on_fault

    def event(self, reader: Reader, event: Event) -> bytes:
        data = event.data
        assert data is not None
        try:
            given = reader.event(data, event.event)
        except Exception as error:
            self._on_fault(error)
            return event.raw
        if given is data:
            return event.raw
        if given is None:
            return b""
        name = b"event: " + event.event + b"\n" if event.event else b""
        return name + sse(given)

    def comment(self, event: Event) -> bytes:
        return event.raw

    def done(self, reader: Reader, event: Event) -> bytes:
        return sse(reader.rest()) + event.raw

    def finish(self, reader: Reader) -> bytes:
        return sse(reader.rest())

    def whole(self, reader: Reader, data: bytes, headers: Headers, *, streams: bool) -> WholeReply | bytes:
        try:
            given = reader.body(data)
        except Exception as error:
            self._on_fault(error)
            given = data
        body = loads(given) if streams and reader.upstream.unstreamed else None
        if not isinstance(body, dict):
            return WholeReply(200, headers, given)
        options = reader.request.get("stream_options")
        usage = isinstance(options, dict) and options.get("include_usage") is True
        events = [b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in stream_of(body, include_usage=usage)]
        return b"".join((*events, DONE))

    def engine_error(self, status: int, data: bytes, headers: Headers) -> WholeReply:
        return WholeReply(status, headers, data)

    def error(self, refusal: Refusal, engine_error: Any = None, *, flat: bool = False) -> WholeReply:
        return WholeReply(refusal.status, list(JSON_HEADERS), error_body(refusal, flat=flat))

    def ping(self) -> bytes:
        return KEEP_ALIVE
