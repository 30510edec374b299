"""The HTTP/1.1 client of the hot path: one call to an engine, its bytes as they arrive, on the event loop.

Small because it does one thing: POST or GET to a plain-http engine that is near. The parser is httptools; connections
are kept and reused; every wait has a bound; closing a response closes its connection, which is how an engine learns
that nobody listens any more. Why not a general client: it is most of what a capture proxy costs.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
import zlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from proxy.errors import UpstreamBroke, UpstreamTimeout, UpstreamUnreachable
from proxy.inflate import CODINGS, Inflate

Headers = list[tuple[bytes, bytes]]

#: Uvicorn, in front of vLLM and SGLang, closes a connection that was idle for 5 s; one of ours is dropped well before.
IDLE_EXPIRY = 3.0
#: A kept connection that the engine closes later than this after a call was sent on it may have had the call read.
CLOSED_AT_ONCE = 1.0
#: An answer read whole is at most this large; a compressed one of a few MiB could otherwise take all memory.
LARGEST = 1 << 30
#: A timer that comes so much later than it was set for says that the process was stopped, or had no CPU.
LATE = 0.5
#: Reading stops when this much waits for an agent that reads slowly, and goes on at half of it.
HIGH_WATER = 1 << 20


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds: to connect, to the first byte of the answer, between two pieces of it."""

    connect: float = 10.0
    first_byte: float = 600.0
    idle: float = 300.0


class Response(Protocol):
    """An answer whose head has arrived."""

    status: int
    headers: Headers

    def chunks(self) -> AsyncIterator[bytes]:
        """The body, decompressed, in pieces as they arrive. Raises `UpstreamBroke` or `UpstreamTimeout`."""
        ...

    async def pump(self, take: Callable[[bytes], bool], room: Callable[[], Awaitable[None]]) -> None:
        """`chunks`, each handed to `take` as it arrives; where that says False, `room` is awaited before the next."""
        ...

    def end_within(self, seconds: float) -> None:
        """`pump` waits no longer for what may still come; then it raises `UpstreamTimeout`."""
        ...

    async def read(self) -> bytes:
        """The whole body."""
        ...

    def close(self) -> None:
        """Done with it. Before the end of the body this drops the connection, and the engine stops generating."""
        ...


class Client(Protocol):
    """Sends requests to one upstream."""

    async def send(self, method: str, path: str, headers: Headers, body: bytes) -> Response: ...
    async def close(self) -> None: ...


class HttpClient:
    """A pool of keep-alive connections to one plain-http upstream."""

    def __init__(self, url: str, timeouts: Timeouts | None = None) -> None:
        """`url` is scheme, host, port and an optional path prefix, without `/v1`."""
        parts = urlsplit(url)
        self.host = parts.hostname or "127.0.0.1"
        self.port = parts.port or 80
        self.prefix = parts.path.rstrip("/")
        self.timeouts = timeouts or Timeouts()
        self._idle: deque[_Connection] = deque()
        self._expiring: asyncio.TimerHandle | None = None
        self._open: set[_Connection] = set()
        self._netloc = parts.netloc.rpartition("@")[2].encode()

    async def send(self, method: str, path: str, headers: Headers, body: bytes) -> Response:
        """Sends one request and waits for the head of the answer.

        Raises `UpstreamUnreachable` (nothing was sent), `UpstreamTimeout` or `UpstreamBroke`. A request that was sent
        is sent again only where a kept connection turned out to be closed, at once, before it brought a byte, and with
        the request unread: an engine that reads a call and dies is not called again. It goes once more, over a
        connection of its own: a request that an engine dies of must not be tried on every connection there is.
        """
        wire = _request(method, self.prefix + path, self._netloc, headers, body)
        reuse = True
        while True:
            connection, reused = await self._connection(reuse)
            reuse = False
            sent = connection.loop.time()
            try:
                await connection.exchange(wire, self.timeouts)
                return connection
            except UpstreamBroke:
                connection.close()
                waited = connection.loop.time() - sent
                if not (reused and connection.unread and waited < CLOSED_AT_ONCE):
                    raise
            except BaseException:
                connection.close()
                raise

    async def _connection(self, reuse: bool) -> tuple[_Connection, bool]:
        while reuse and self._idle:
            connection = self._idle.pop()  # the warmest first, so that the others can expire
            if connection.usable and connection.loop.time() - connection.idle_since < IDLE_EXPIRY:
                return connection, True
            connection.drop()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.timeouts.connect):
                _, connection = await loop.create_connection(lambda: _Connection(self), self.host, self.port)
        except (OSError, TimeoutError) as error:
            raise UpstreamUnreachable("the engine cannot be reached") from error
        self._open.add(connection)
        return connection, False

    def release(self, connection: _Connection) -> None:
        self._idle.append(connection)
        if self._expiring is None:
            self._expiring = connection.loop.call_later(IDLE_EXPIRY, self._expire, connection.loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """The coldest go when their time is over, also when no call follows: a burst must not hold its sockets."""
        self._expiring = None
        now = loop.time()
        while self._idle and now - self._idle[0].idle_since >= IDLE_EXPIRY:
            self._idle.popleft().drop()
        if self._idle:
            left = IDLE_EXPIRY - (now - self._idle[0].idle_since)
            self._expiring = loop.call_later(max(left, 0.1), self._expire, loop)

    def forget(self, connection: _Connection) -> None:
        self._open.discard(connection)

    @property
    def open_connections(self) -> int:
        return len(self._open)

    async def close(self) -> None:
        if self._expiring is not None:
            self._expiring.cancel()
        for connection in list(self._open):
            connection.drop()
        self._idle.clear()
        await asyncio.sleep(0)


class _Connection(asyncio.Protocol):
    """One connection, and the one answer that is on its way over it."""

    def __init__(self, pool: HttpClient) -> None:
        self._pool = pool
        self.loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.idle_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._end: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._lost: UpstreamBroke | UpstreamTimeout | None = None
        self._busy = False
        self._parser = httptools.HttpResponseParser(self)
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self.untouched = True
        self.unread = False
        self._head = False
        self._ends_with_connection = False
        self._complete = False
        self._kept = False
        self._surplus = False
        self._pending: list[bytes] = []
        self._waiting_bytes = 0
        self._paused = False
        self._inflate: Inflate | None = None
        self._take: Callable[[bytes], bool] | None = None
        self._full = False
        self._fault: BaseException | None = None

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self.untouched = False
        self._last_data = self.loop.time()
        if not self._busy or self._complete:  # bytes nobody asked for: never mistake them for an answer
            self.drop()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            self.drop()  # `_fail` said why
        except httptools.HttpParserError as error:
            if not self._complete:  # else it is about what came after the answer
                self._fail(UpstreamBroke(f"the engine's answer is not HTTP ({error})"))
            self.drop()
        if self._surplus:
            self.drop()
        if self._take is not None:
            self._pump()
            if not (self._full or self._complete or self._lost or self._fault):
                return
        if self._waiting_bytes > HIGH_WATER and not self._paused and self._transport:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        # The end of a connection that was closed before our request came acknowledges nothing of it; the end of one
        # whose other side took the request and died acknowledges all of it.
        if self._busy and self.untouched and self._transport:
            self.unread = _unacknowledged(self._transport) > 0
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        self._stop_watching()
        self._transport = None
        self.unread |= self.untouched and isinstance(exc, ConnectionError)  # reset: closed with the request unread
        if self._busy and not self._complete:
            if self._head and self._ends_with_connection and exc is None:
                self._complete = True
            else:
                self._fail(UpstreamBroke("the engine closed the connection in the middle of its answer"))
        self._wake()

    # httptools' side

    def on_message_begin(self) -> None:
        self._surplus = self._complete  # a second answer right behind the first

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head:  # a trailer is no header, nor is what comes behind the answer
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200:  # an interim answer; the real one follows
            self.headers.clear()
            return
        self.status = status
        self._head = True
        names = dict(self.headers)
        encoding = names.get(b"content-encoding", b"").lower().strip()
        if encoding in CODINGS:
            self._inflate = Inflate()
        elif encoding and encoding != b"identity":
            told = encoding.decode("latin-1")
            self._fail(UpstreamBroke(f"the engine answered with content-encoding {told!r}, which nobody asked for"))
            raise ValueError(told)
        self._ends_with_connection = (
            b"content-length" not in names and b"chunked" not in names.get(b"transfer-encoding", b"").lower()
        )

    def on_body(self, data: bytes) -> None:
        if not self._complete:
            self._pending.append(data)
            self._waiting_bytes += len(data)

    def on_message_complete(self) -> None:
        if self._head:
            self._complete = True
            self._kept = self._parser.should_keep_alive()  # asked later, llhttp has forgotten the answer's head

    # the pool's side

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, wire: Iterable[bytes], timeouts: Timeouts) -> None:
        """Sends the request and returns when the head of the answer is here."""
        assert self._transport is not None
        self._reset()
        self._busy = True
        self._lost = None
        self._timeouts = timeouts
        self._last_data = now = self.loop.time()
        if self._timer is None or self._timer.when() > now + timeouts.first_byte:
            self._stop_watching()
            self._due = now
            self._watch()
        self._transport.writelines(wire)
        while not self._head:
            if self._lost:
                raise self._lost
            await self._wait()

    def _watch(self) -> None:
        """One timer, which looks at the clock and sleeps again, instead of one a call, or a chunk."""
        if not self._busy:
            self._timer = None
            return
        bound = self._timeouts.idle if self._head else self._timeouts.first_byte
        left = self._last_data + bound - self.loop.time()
        if self._paused:  # it is the agent who is slow
            left = bound
        now = self.loop.time()
        if (
            left <= 0 and now - self._due > LATE
        ):  # it is this process that stood still: what came meanwhile is read first
            left = LATE
        if left <= 0:
            what = "sent nothing more" if self._head else "did not begin to answer"
            self._fail(UpstreamTimeout(f"the engine {what} within {bound:g} s"))
            self.drop()
            return
        wait = min(left, max(0.05, self._timeouts.idle))
        self._due = now + wait
        self._timer = self.loop.call_later(wait, self._watch)

    async def chunks(self) -> AsyncIterator[bytes]:
        while await self._more():
            for piece in self._arrived():
                yield piece

    async def pump(self, take: Callable[[bytes], bool], room: Callable[[], Awaitable[None]]) -> None:
        # What arrives is taken right where it arrives: waking the call's task for a chunk costs more than the chunk.
        while await self._more():
            for piece in self._arrived():
                if not take(piece):
                    await room()
            if self._pending:  # came while there was no room
                continue
            self._take = take
            try:
                while not (self._full or self._complete or self._lost or self._fault):
                    await self._wait()
            finally:
                self._take = None
            if self._fault is not None:
                raise self._fault
            if self._full:
                self._full = False
                await room()

    def _pump(self) -> None:
        assert self._take is not None
        try:
            for piece in self._arrived():
                self._full |= not self._take(piece)
        except BaseException as fault:  # it is the task's, which waits in `pump`
            self._fault = fault
        if self._full or self._fault is not None:
            self._take = None  # what comes now waits

    async def _more(self) -> bool:
        """Whether there is something of the body, waited for; False at its end. Raises what ended it too early."""
        while not self._pending:
            if self._complete:
                try:
                    if self._inflate is not None:
                        self._inflate.finish()
                except zlib.error as error:
                    raise _not_compressed(error) from error
                return False
            if self._lost:
                raise self._lost
            await self._wait()
        return True

    def _arrived(self) -> Iterable[bytes]:
        """What has arrived, decompressed."""
        if not self._pending:
            return ()
        data = self._pending[0] if len(self._pending) == 1 else b"".join(self._pending)
        self._pending.clear()
        self._waiting_bytes = 0
        if self._paused and self._transport:
            self._paused = False
            self._last_data = self.loop.time()
            self._transport.resume_reading()
        return (data,) if self._inflate is None else self._inflated(data)

    def _inflated(self, data: bytes) -> Iterator[bytes]:
        assert self._inflate is not None
        try:
            yield from self._inflate.feed(data)
        except zlib.error as error:
            raise _not_compressed(error) from error

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end_within(self, seconds: float) -> None:
        if not self._complete and self._end is None:
            self._end = self.loop.call_later(seconds, self._lingers)

    def _lingers(self) -> None:
        self._fail(UpstreamTimeout("the engine did not end its answer"))
        self.drop()

    async def read(self) -> bytes:
        return await read_all(self)

    def close(self) -> None:
        """Gives the connection back when the answer is whole and both sides keep it; drops it otherwise."""
        if not self._busy:
            return
        self._busy = False
        if self._end:
            self._end.cancel()
            self._end = None
        if self._kept and self.usable and not self._pending:
            self.idle_since = self.loop.time()
            self._pool.release(self)
        else:
            self.drop()

    def drop(self) -> None:
        self._pool.forget(self)
        if self._transport:
            self._transport.abort()

    def _fail(self, error: UpstreamBroke | UpstreamTimeout) -> None:
        self._lost = self._lost or error

    async def _wait(self) -> None:
        self._waiter = self.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)


def _unacknowledged(transport: asyncio.Transport) -> int:
    """Bytes written to a connection of which its other side has not said that they arrived."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(transport.get_extra_info("socket"), termios.TIOCOUTQ, b"\0" * 4))[0])
    except (OSError, ValueError):
        return 0


async def read_all(response: Response) -> bytes:
    """An answer's whole body. Raises `UpstreamBroke` where it is larger than `LARGEST`."""
    parts: list[bytes] = []
    size = 0
    async for data in response.chunks():
        size += len(data)
        if size > LARGEST:
            raise UpstreamBroke(f"the engine's answer is larger than {LARGEST >> 20} MiB")
        parts.append(data)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _not_compressed(error: zlib.error) -> UpstreamBroke:
    return UpstreamBroke(f"the engine's compressed answer is broken ({error})")


def _request(method: str, path: str, netloc: bytes, headers: Headers, body: bytes) -> list[bytes]:
    head = [b"%s %s HTTP/1.1\r\nhost: %s\r\n" % (method.encode(), path.encode("ascii", "replace"), netloc)]
    head += [b"%s: %s\r\n" % header for header in headers]
    if body or method != "GET":
        head.append(b"content-length: %d\r\n" % len(body))
    head.append(b"\r\n")
    return [b"".join(head), body] if body else [b"".join(head)]
