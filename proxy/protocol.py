"""The agents' side of HTTP: uvicorn's protocol with bounds on what one connection may cost, in bytes and in time.

An agent must not fill the proxy's memory with headers, nor hold its descriptors and the engine's slots by sending
nothing, or by reading nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

#: Bytes of a request's line and headers. The parser itself would take any number of them.
LARGEST_HEAD = 256 * 1024
#: Seconds from a connection, or from the first byte of a further request on it, to the end of the request's headers.
HEAD_SECONDS = 60.0
#: Seconds that a reply waits for an agent that takes none of it; then the agent counts as gone.
UNREAD_SECONDS = 300.0
_UPGRADE = re.compile(rb"(?i)\r\nupgrade[ \t]*:[^\r\n]*")


class Line:
    """The way to one request's agent without ASGI's messages, which cost more than the bytes that they carry."""

    __slots__ = ("_cycle", "_protocol")

    def __init__(self, protocol: BoundedProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle

    @property
    def read_whole(self) -> bool:
        """The request's body is all here."""
        return not self._cycle.more_body

    @property
    def gone(self) -> bool:
        return self._cycle.disconnected

    @property
    def on_gone(self) -> set[Callable[[], None]]:
        """Called when the agent is gone."""
        return self._protocol.on_gone

    def write(self, data: bytes) -> bool:
        """A piece of a reply that has begun and is chunked, `data` not empty; whether there is room for more."""
        cycle = self._cycle
        if cycle.disconnected:
            return True
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return not cycle.flow.write_paused

    async def drained(self) -> None:
        """When the agent has taken enough of what was written."""
        await self._cycle.flow.drain()


class BoundedProtocol(HttpToolsProtocol):
    """One connection of an agent's."""

    _head = 0
    _in_head = True
    _waiting: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        #: Called when the agent is gone.
        self.on_gone: set[Callable[[], None]] = set()
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)
        for tell in list(self.on_gone):
            tell()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head, self._in_head = 0, True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer is none: a gateway that looks at keys has not seen it
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.scope["capture.line"] = Line(self, self.cycle)  # type: ignore[typeddict-unknown-key]

    def on_message_complete(self) -> None:
        self._head, self._in_head = 0, True
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head += len(data)
            if self._head > LARGEST_HEAD + len(data):  # what is in one piece with the body is let through
                self._refuse(b"431 Request Header Fields Too Large")
                return
            if self._waiting is None:
                self._wait_for_head()
            if data.find(b"pgrade", 0, 8192) > 0:
                # The parser would take what follows for another protocol and drop it: the body, where Java's client
                # offers HTTP/2 with its POST. An offer may be passed over (RFC 9110, 7.8).
                head, end, rest = data.partition(b"\r\n\r\n")
                data = _UPGRADE.sub(b"", head) + end + rest
        super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _wait_for_head(self) -> None:
        self._waiting = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _head_is_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait_for_head()  # a call is being answered on this connection: what trickles in besides can wait
        else:
            self._refuse(b"408 Request Timeout")

    def _refuse(self, status: bytes) -> None:
        self._stop_waiting()
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()
