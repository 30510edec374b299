"""One request of a client and its reply: the body read whole, the reply written as it comes, a disconnect noticed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from http import HTTPStatus
from types import TracebackType
from typing import Protocol

from proxy.errors import Refusal
from proxy.http.decompress import CODINGS, DecompressError, Decompressor, decompressor
from proxy.http.headers import Headers
from proxy.http.limits import Limits

_NOT_TO_AGENT = frozenset(
    b"connection keep-alive proxy-connection transfer-encoding te trailer upgrade content-length content-encoding "
    b"set-cookie alt-svc location content-location refresh".split()  # the last three name the engine's address
)

_STATUS = {status.value: b"HTTP/1.1 %d %s\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}
#: Not allowed in a header value: an engine's folded header must not become two of ours.
_STEERS = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class AgentLeft(Exception):
    """The client closed its connection before the reply was finished."""


class Link(Protocol):
    """What a request needs of the connection that it came on."""

    limits: Limits
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    #: No further request is answered on it.
    ending: bool

    @property
    def has_room(self) -> bool:
        """False while much of what was written waits for the client to read it."""

    async def room(self) -> None:
        """Waits until the client has read enough of what was written, or is gone."""

    def resume_reading(self) -> None: ...

    def answered(self, request: ClientRequest) -> None:
        """The end of a reply is written."""


class ClientRequest:
    """One request and its reply. `path` and `session` (the name in the path, if any) are what the routes made of it."""

    __slots__ = (
        "_bodiless", "_chunked", "_complete", "_connection", "_continued", "_discarding", "_http11", "_on_leaving",
        "_parts", "_size", "_unsent", "_waiter", "finished", "headers", "keep_alive", "left", "method", "path", "query",
        "session", "started", "target", "task",
    )  # fmt: skip

    def __init__(
        self, connection: Link, method: str, target: bytes, headers: Headers, *, keep_alive: bool, http11: bool
    ) -> None:
        """`keep_alive`: whether the connection may have another request; `http11`: the client is not of HTTP/1.0."""
        self.method = method
        self.target = target
        self.headers = headers
        self.keep_alive = keep_alive
        self.path = ""
        self.query = b""
        self.session: str | None = None
        #: What answers it.
        self.task: asyncio.Task[None]
        #: Whether the connection was lost.
        self.left = False
        self.started = False
        self.finished = False
        self._connection = connection
        self._http11 = http11
        self._chunked = False  # the reply's framing
        self._bodiless = False
        self._unsent = b""
        self._parts: list[bytes] = []
        self._size = 0
        self._complete = False  # the body is here
        self._discarding = False  # what still arrives of the body
        self._continued = False  # 100 Continue was sent
        self._waiter: asyncio.Future[None] | None = None
        self._on_leaving: Callable[[], object] | None = None

    def header(self, name: bytes) -> str | None:
        for key, value in self.headers:
            if key == name:
                return value.decode("latin-1")
        return None

    # the request's body

    async def body(self, limit: int) -> bytes:
        """The request's body, decompressed, of at most `limit` bytes either way.

        Raises `Refusal`: 400 (not of its coding), 408 (too slow), 413 (too large), 415 (unknown coding); `AgentLeft`.
        """
        if self.left:
            raise AgentLeft
        announced = self.header(b"content-length")
        if announced is not None and announced.isdigit() and int(announced) > limit:
            raise _too_large(limit)
        coding = _decompressor(self.header(b"content-encoding"))
        if self._complete and coding is None:
            return self._take(limit)
        seconds = self._connection.limits.body_time
        try:
            async with asyncio.timeout(seconds):
                return await self._read(limit, coding)
        except TimeoutError:
            raise Refusal(408, f"the request's body was not complete within {seconds:g} s") from None

    def _take(self, limit: int) -> bytes:
        """What has arrived of the body and was not taken yet."""
        if self._size > limit:
            raise _too_large(limit)
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _read(self, limit: int, coding: Decompressor | None) -> bytes:
        expected = self.header(b"expect")
        if expected is not None and expected.lower() == "100-continue" and self._http11 and not self._complete:
            self._continued = True
            self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        parts: list[bytes] = []
        size = 0
        while True:
            if self.left:
                raise AgentLeft
            complete, arrived = self._complete, self._take(limit)
            try:
                for piece in (arrived,) if coding is None else coding.feed(arrived):
                    size += len(piece)
                    if size > limit:
                        raise _too_large(limit)
                    parts.append(piece)
                if complete and coding is not None:
                    coding.finish()
            except DecompressError as error:
                raise Refusal(400, f"the request's compressed body is broken: {error}") from error
            if complete:
                return b"".join(parts)
            self._size = 0
            self._connection.resume_reading()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    # what its connection reports

    def body_arrived(self, data: bytes) -> int:
        """A piece of the body; returns how many bytes of the body wait to be read."""
        if self._discarding:
            return 0
        self._parts.append(data)
        self._size += len(data)
        self._wake()
        return self._size

    def body_complete(self) -> None:
        self._complete = True
        self._wake()

    def discard_body(self) -> None:
        """Drops what has arrived of the body and what still arrives."""
        self._discarding = True
        self._parts.clear()

    def disconnected(self) -> None:
        self.left = True
        self._wake()
        if self._on_leaving is not None:
            self._on_leaving()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def watched(self) -> Watch:
        """Within this block, a client that disconnects raises `AgentLeft`, wherever the block waits."""
        return Watch(self)

    # the reply

    def start(self, status: int, headers: Headers) -> None:
        """The head of a reply that comes in pieces. It is written with the first, or alone where none is there yet."""
        self.started = True
        self._bodiless = not self._has_body(status)
        self._chunked = self._http11 and not self._bodiless
        how = b"transfer-encoding: chunked\r\n" if self._chunked else b""
        self._unsent = self._head(status, headers, how)
        self._connection.loop.call_soon(self._flush)

    def push(self, data: bytes) -> bool:
        """Writes a piece of the reply. False: too much waits to be read; `room` says when there is room again."""
        if self.left or not data or self._bodiless:
            return True
        framed = b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
        if self._unsent:
            framed, self._unsent = self._unsent + framed, b""
        self._connection.transport.write(framed)
        return self._connection.has_room

    async def room(self) -> None:
        """Waits until the client has read enough of what was written."""
        await self._connection.room()

    def end(self, data: bytes = b"") -> None:
        """The last piece."""
        self.finished = True
        if self.left:
            return
        if self._bodiless:
            data = b""
        elif self._chunked:
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        self._connection.transport.write(self._unsent + data)
        self._unsent = b""
        self._connection.answered(self)

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole reply at once."""
        self.started = self.finished = True
        if not self.left:
            has_length = status >= 200 and status not in (204, 304)  # RFC 9110, 8.6
            head = self._head(status, headers, b"content-length: %d\r\n" % len(body) if has_length else b"")
            self._connection.transport.write(head + body if self._has_body(status) else head)
            self._connection.answered(self)

    def _head(self, status: int, headers: Headers, how: bytes) -> bytes:
        self.keep_alive = keep_alive = self.keep_alive and not self._connection.ending and self._body_end_is_certain()
        lines = [b"%b: %b\r\n" % header for header in headers if not _STEERS.search(header[1])]
        close = b"" if keep_alive else b"connection: close\r\n"
        return b"".join((status_line(status), *lines, close, how, b"\r\n"))

    def _has_body(self, status: int) -> bool:
        """Whether the reply may have a body (RFC 9110, 6.4.1)."""
        return self.method != "HEAD" and status >= 200 and status not in (204, 304)

    def _body_end_is_certain(self) -> bool:
        """Whether it is certain where the next request begins: a client that asked with `Expect` before it sends its
        body need not send one that was refused."""
        return self._complete or self._continued or self.header(b"expect") is None

    def _flush(self) -> None:
        if self._unsent and not self.left:
            self._connection.transport.write(self._unsent)
        self._unsent = b""


class Watch:
    """Raises `AgentLeft` in its block when the client disconnects."""

    __slots__ = ("_request",)

    def __init__(self, request: ClientRequest) -> None:
        self._request = request

    def __enter__(self) -> None:
        if self._request.left:
            raise AgentLeft
        self._request._on_leaving = self._request.task.cancel

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._request._on_leaving = None
        if kind is asyncio.CancelledError and self._request.left and self._request.task.uncancel() == 0:
            raise AgentLeft from None


def status_line(status: int) -> bytes:
    return _STATUS.get(status) or b"HTTP/1.1 %d \r\n" % status


def reply_headers(headers: Headers, scrub: Callable[[bytes], bytes] = bytes) -> Headers:
    """The engine's headers that are passed on to the client; `scrub` takes out what it must not learn."""
    return [(name, scrub(value)) for name, value in headers if name not in _NOT_TO_AGENT]


def _decompressor(encoding: str | None) -> Decompressor | None:
    coding = (encoding or "identity").strip().lower()
    if coding in ("identity", ""):
        return None
    found = decompressor(coding)
    if found is None:
        raise Refusal(415, f"the request's content-encoding {coding!r} is not supported; send {CODINGS} or none")
    return found


def _too_large(limit: int) -> Refusal:
    return Refusal(
        413, f"the request's body is larger than {limit >> 20} MiB; start the proxy with a larger --max-body-mb"
    )
