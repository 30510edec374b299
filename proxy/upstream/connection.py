"""One connection to an engine, and the answer that arrives over it.

The parser is httptools. Every wait is bounded. Closing a response closes its connection, which tells the engine to stop
generating.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Protocol, cast

import httptools

from proxy.errors import UpstreamBroke, UpstreamTimeout
from proxy.http.decompress import DecompressError, Decompressor, decompressor
from proxy.http.headers import Headers
from proxy.settings import Timeouts
from proxy.upstream.client import LARGEST, LARGEST_HEAD, read_all
from proxy.upstream.gate import Gate

#: A timer that fires this many seconds late shows that the process was stopped, or had no CPU.
LATE = 0.5
#: Reading pauses when this many bytes wait for an agent that reads slowly, and resumes at half of them.
HIGH_WATER = 1 << 20


class Pool(Protocol):
    """Where a connection returns to when its answer is complete, and what forgets it when it is closed."""

    #: No time counts while it is closed: a trainer may have frozen the engine's calls.
    gate: Gate

    def release(self, connection: Connection) -> None: ...
    def forget(self, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    """asyncio's protocol, httptools' callbacks, and a `Response`, in one object: no other is made per answer."""

    def __init__(self, pool: Pool) -> None:
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
        self._overhead = 0
        self._pending: list[bytes] = []
        self._waiting_bytes = 0
        self._paused = False
        self._decompressor: Decompressor | None = None
        self._take: Callable[[bytes], bool] | None = None
        self._full = False
        self._fault: BaseException | None = None

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self.untouched = False
        self._last_data = self.loop.time()
        if not self._busy or self._complete:  # unsolicited bytes: never mistake them for an answer
            self.drop()
            return
        self._overhead += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            self.drop()  # `_fail` said why
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._complete:  # else it is about what came after the answer
                self._fail(UpstreamBroke(f"the engine's answer is not HTTP ({error})"))
            self.drop()
        if self._surplus:
            self.drop()
        elif self._overhead > LARGEST_HEAD and not self._complete:
            where = "between two pieces of its body" if self._head else "before its body"
            self._fail(UpstreamBroke(f"the engine's answer has more than {LARGEST_HEAD >> 10} KiB {where}"))
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
        self._overhead = 0
        names = dict(self.headers)
        encoding = names.get(b"content-encoding", b"").lower().strip()
        if encoding and encoding != b"identity":
            name = encoding.decode("latin-1")
            self._decompressor = decompressor(name)
            if self._decompressor is None:
                self._fail(UpstreamBroke(f"the engine answered with content-encoding {name!r}, which nobody asked for"))
                raise ValueError(name)
        self._ends_with_connection = (
            b"content-length" not in names and b"chunked" not in names.get(b"transfer-encoding", b"").lower()
        )

    def on_body(self, data: bytes) -> None:
        if not self._complete:
            self._overhead = 0
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
        self._last_data = self._sent_at = now = self.loop.time()
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
        """One timer, which checks the clock and sleeps again, instead of one per call or per chunk."""
        if not self._busy:
            self._timer = None
            return
        # A head has one deadline: neither trickling bytes nor interim answers extend it.
        bound = self._timeouts.idle if self._head else self._timeouts.first_byte
        now = self.loop.time()
        since = max(self._last_data if self._head else self._sent_at, self._pool.gate.counts_from(now))
        left = since + bound - now
        if self._paused:  # it is the agent who is slow
            left = bound
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
        """Waits for a part of the body; False at its end. Raises the error that ended it too early."""
        while not self._pending:
            if self._complete:
                try:
                    if self._decompressor is not None:
                        self._decompressor.finish()
                except DecompressError as error:
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
        return (data,) if self._decompressor is None else self._inflated(data)

    def _inflated(self, data: bytes) -> Iterator[bytes]:
        assert self._decompressor is not None
        try:
            yield from self._decompressor.feed(data)
        except DecompressError as error:
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

    async def read(self, largest: int = LARGEST) -> bytes:
        return await read_all(self, largest)

    def close(self) -> None:
        """Returns the connection to its pool when the answer is complete and both sides keep it; else drops it."""
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
    """Bytes written to a connection that its peer has not acknowledged."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(transport.get_extra_info("socket"), termios.TIOCOUTQ, b"\0" * 4))[0])
    except (OSError, ValueError):
        return 0


def _not_compressed(error: DecompressError) -> UpstreamBroke:
    return UpstreamBroke(f"the engine's compressed answer is broken ({error})")
