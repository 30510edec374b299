"""The agent's end of a call: its request, read whole, its reply, written as it comes, its leaving noticed."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Callable
from http import HTTPStatus
from types import TracebackType
from typing import Protocol

from proxy.errors import Refusal
from proxy.http.decompress import CODINGS, Inflate
from proxy.http.headers import Headers

#: Headers of one connection only, and those that we set ourselves.
_NOT_UPSTREAM = frozenset(
    b"host connection keep-alive proxy-connection transfer-encoding te trailer upgrade content-length content-encoding "
    b"content-type accept-encoding expect authorization x-api-key x-goog-api-key proxy-authorization cookie "
    b"x-forwarded-for x-forwarded-host x-forwarded-proto forwarded".split()
    # Gateways in front of an engine may take these for the way to another route, with the engine's key on it.
    + b"x-forwarded-prefix x-forwarded-uri x-forwarded-method x-forwarded-server x-forwarded-port x-real-ip "
    b"x-original-url x-rewrite-url x-http-method-override x-http-method x-method-override".split()
)
_NOT_TO_AGENT = frozenset(
    b"connection keep-alive proxy-connection transfer-encoding te trailer upgrade content-length content-encoding "
    b"set-cookie alt-svc location content-location refresh".split()  # the last three name the engine's address
)


#: Seconds that a request's body may take to come, at any size: a quarter of a gigabyte at a megabyte a second.
BODY_SECONDS = 300.0
_STATUS = {one.value: b"HTTP/1.1 %d %s\r\n" % (one.value, one.phrase.encode()) for one in HTTPStatus}
#: What cannot stand in a header's line: an engine's folded header must not become two of ours.
_STEERS = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class AgentLeft(Exception):
    """The agent closed its connection before the reply was over."""


class Link(Protocol):
    """What a request needs of the connection that it came on."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    #: No further request is answered on it.
    ending: bool

    @property
    def has_room(self) -> bool:
        """Whether the client takes what is written, or much of it waits here."""

    async def room(self) -> None:
        """Waits until the client has taken enough of what was written, or is gone."""

    def resume_reading(self) -> None: ...

    def answered(self, agent: ClientRequest) -> None:
        """The end of a reply is written."""


class ClientRequest:
    """One request and its reply. `path` and `session` (the name in the path, if any) are what the routes made of it."""

    __slots__ = (
        "_chunked", "_connection", "_forgotten", "_on_leaving", "_parts", "_promised", "_size", "_unsent", "_waiter",
        "_whole", "ended", "headers", "keeps", "left", "method", "path", "query", "session", "started", "target",
        "task",
    )  # fmt: skip

    def __init__(
        self, connection: Link, method: str, target: bytes, headers: Headers, *, keeps: bool, chunked: bool
    ) -> None:
        """`keeps`: whether the connection may have another request; `chunked`: whether its end can be told without."""
        self.method = method
        self.target = target
        self.headers = headers
        self.keeps = keeps
        self.path = ""
        self.query = b""
        self.session: str | None = None
        #: What answers it.
        self.task: asyncio.Task[None]
        #: Whether the connection was lost.
        self.left = False
        self.started = False
        self.ended = False
        self._connection = connection
        self._chunked = chunked
        self._unsent = b""
        self._parts: list[bytes] = []
        self._size = 0
        self._whole = False
        self._forgotten = False
        self._promised = False  # to one that asked, that its body is waited for
        self._waiter: asyncio.Future[None] | None = None
        self._on_leaving: Callable[[], object] | None = None

    def header(self, name: bytes) -> str | None:
        for key, value in self.headers:
            if key == name:
                return value.decode("latin-1")
        return None

    # the request's body

    async def body(self, limit: int) -> bytes:
        """The request's body, decompressed. Raises `Refusal` (408, 413, 400) and `AgentLeft`."""
        if self.left:
            raise AgentLeft
        told = self.header(b"content-length")
        if told is not None and told.isdigit() and int(told) > limit:
            raise _too_large(limit)
        inflate = _inflater(self.header(b"content-encoding"))
        if self._whole and inflate is None:
            return self._taken(limit)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await self._body(limit, inflate)
        except TimeoutError:
            raise Refusal(408, f"the request's body did not come whole within {BODY_SECONDS:g} s") from None

    def _taken(self, limit: int) -> bytes:
        if self._size > limit:
            raise _too_large(limit)
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _body(self, limit: int, inflate: Inflate | None) -> bytes:
        expected = self.header(b"expect")
        if expected is not None and expected.lower() == "100-continue" and self._chunked and not self._whole:
            self._promised = True
            self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        parts: list[bytes] = []
        size = 0
        while True:
            if self.left:
                raise AgentLeft
            whole, arrived = self._whole, self._taken(limit)
            try:
                for piece in (arrived,) if inflate is None else inflate.feed(arrived):
                    size += len(piece)
                    if size > limit:
                        raise _too_large(limit)
                    parts.append(piece)
                if whole and inflate is not None:
                    inflate.finish()
            except zlib.error as error:
                raise Refusal(400, f"the request's compressed body is broken: {error}") from error
            if whole:
                return b"".join(parts)
            self._size = 0
            self._connection.resume_reading()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    # what its connection says

    def arrives(self, data: bytes) -> int:
        """A piece of the body; how many bytes of it wait to be taken."""
        if self._forgotten:
            return 0
        self._parts.append(data)
        self._size += len(data)
        self._wake()
        return self._size

    def arrived(self) -> None:
        """The body is here."""
        self._whole = True
        self._wake()

    def forget(self) -> None:
        """What still comes of the body is of no use."""
        self._forgotten = True
        self._parts.clear()

    def leave(self) -> None:
        """The connection is lost."""
        self.left = True
        self._wake()
        if self._on_leaving is not None:
            self._on_leaving()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # what goes on to the engine

    def upstream_headers(self) -> Headers:
        """What of the agent's headers goes on to the engine: all but keys, cookies and those of one connection."""
        dropped = _NOT_UPSTREAM
        for name, value in self.headers:
            if name == b"connection" and value not in (b"keep-alive", b"close"):  # it names others of this connection
                dropped = dropped.union(one.strip() for one in value.lower().split(b","))
        return [(name, value) for name, value in self.headers if name not in dropped]

    def watched(self) -> Watch:
        """While this lasts, an agent that leaves ends the block with `AgentLeft`, wherever it waits."""
        return Watch(self)

    # the reply

    def start(self, status: int, headers: Headers) -> None:
        """The head of a reply that comes in pieces. It goes out with the first one, or by itself where none is here."""
        self.started = True
        how = b"transfer-encoding: chunked\r\n" if self._chunked else b""
        self._unsent = self._head(status, headers, how)
        self._connection.loop.call_soon(self._flush)

    def push(self, data: bytes) -> bool:
        """Writes a piece of the reply; whether there is room for more. Without, `room` says when there is again."""
        if self.left or not data:
            return True
        framed = b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
        if self._unsent:
            framed, self._unsent = self._unsent + framed, b""
        self._connection.transport.write(framed)
        return self._connection.has_room

    async def room(self) -> None:
        """Waits until the agent has taken enough of what was written."""
        await self._connection.room()

    def end(self, data: bytes = b"") -> None:
        """The last piece."""
        self.ended = True
        if self.left:
            return
        if self._chunked:
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        self._connection.transport.write(self._unsent + data)
        self._unsent = b""
        self._connection.answered(self)

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole reply at once."""
        self.started = self.ended = True
        if not self.left:
            head = self._head(status, headers, b"content-length: %d\r\n" % len(body))
            self._connection.transport.write(head if self.method == "HEAD" else head + body)
            self._connection.answered(self)

    def _head(self, status: int, headers: Headers, how: bytes) -> bytes:
        self.keeps = keeps = self.keeps and self._chunked and not self._connection.ending and self._frames()
        lines = [b"%b: %b\r\n" % one for one in headers if not _STEERS.search(one[1])]
        close = b"" if keeps else b"connection: close\r\n"
        first = _STATUS.get(status) or b"HTTP/1.1 %d \r\n" % status
        return b"".join((first, *lines, close, how, b"\r\n"))

    def _frames(self) -> bool:
        """Whether it is certain where the next request begins: an agent may ask before it sends a body, and not send
        one that was refused."""
        return self._whole or self._promised or self.header(b"expect") is None

    def _flush(self) -> None:
        if self._unsent and not self.left:
            self._connection.transport.write(self._unsent)
        self._unsent = b""


class Watch:
    """Ends the block with `AgentLeft` when its agent leaves."""

    __slots__ = ("_agent",)

    def __init__(self, agent: ClientRequest) -> None:
        self._agent = agent

    def __enter__(self) -> None:
        if self._agent.left:
            raise AgentLeft
        self._agent._on_leaving = self._agent.task.cancel

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._agent._on_leaving = None
        if kind is asyncio.CancelledError and self._agent.left and self._agent.task.uncancel() == 0:
            raise AgentLeft from None


def reply_headers(headers: Headers, scrub: Callable[[bytes], bytes] = bytes) -> Headers:
    """What of the engine's headers goes on to the agent; `scrub` takes out what it must not learn."""
    return [(name, scrub(value)) for name, value in headers if name not in _NOT_TO_AGENT]


def _inflater(encoding: str | None) -> Inflate | None:
    coding = (encoding or "identity").strip().lower()
    if coding == "identity":
        return None
    if coding.encode("latin-1") in CODINGS:
        return Inflate()
    raise Refusal(415, f"the request's content-encoding {coding!r} is not understood; send gzip or none")


def _too_large(limit: int) -> Refusal:
    return Refusal(
        413, f"the request's body is larger than {limit >> 20} MiB; start the proxy with a larger --max-body-mb"
    )
