"""The agents' side of HTTP/1.1: one connection, its requests in their order, with bounds on what it may cost.

An agent must not fill the proxy's memory with headers, bodies or answers that it does not read, nor hold its
descriptors and the engine's slots by sending nothing. The parser is httptools. Why not a general server's protocol: a
request's way through its messages was a third of what a call costs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, cast

import httptools

from proxy.errors import FAILED, Refusal, error_body
from proxy.http.client_request import ClientRequest
from proxy.http.headers import JSON_HEADERS, Headers

log = logging.getLogger("proxy")

#: Bytes of a request's line and headers, or of what stands between two bytes of its body: lengths of chunks, their
#: extensions, trailers. The parser itself would take any number of them.
LARGEST_HEAD = 256 * 1024
#: Headers of a request: each costs more memory than its bytes.
MOST_HEADERS = 1000
#: Requests that wait for their turn: one piece of what is read may hold ten thousand.
MOST_WAITING = 256
#: Seconds from a connection, or from the first byte of a further request on it, to the end of the request's headers.
HEAD_SECONDS = 60.0
#: Seconds that a connection is kept between two requests.
KEPT_SECONDS = 75.0
#: Seconds that an agent may go on sending a body that was answered already.
LINGER = 10.0
#: Seconds that a reply, or the end of a connection, waits for an agent that takes none of it; then it counts as gone.
UNREAD_SECONDS = 300.0
#: Bytes of a body that wait to be taken before reading stops.
HIGH_WATER = 64 * 1024
_BAD, _TOO_LARGE = b"400 Bad Request", b"431 Request Header Fields Too Large"

#: Answers a request: called with it, awaited to the end of its reply.
Handler = Callable[[ClientRequest], Coroutine[Any, Any, None]]


class Connection(asyncio.Protocol):
    """One connection of an agent's. Requests that come before their turn wait, and nothing more is read meanwhile."""

    def __init__(self, handler: Handler, connections: set[Connection], tasks: set[asyncio.Task[None]]) -> None:
        """`connections` and `tasks`: where it, and what answers its requests, are held while they live."""
        self.loop = asyncio.get_running_loop()
        self.lost = False
        #: No further request is answered on it.
        self.ending = False
        self._handler = handler
        self._connections = connections
        self.tasks = tasks
        self._parser = httptools.HttpRequestParser(self)
        self._why = _BAD  # what the parser does not take, or what a callback has raised about
        self._target = b""
        self._headers: Headers = []
        self._in_head = True
        self._begun = False  # a byte of a request's line is here
        self._head = 0  # bytes of a head, or of what is no body, that were read before this piece
        self._arriving: ClientRequest | None = None
        self._answering: ClientRequest | None = None
        self._waiting: deque[ClientRequest] = deque()
        self._idle = False
        self._reading = True
        self._writable: asyncio.Event | None = None  # set where writing is paused
        self._unread: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._connections.add(self)
        self._expect(HEAD_SECONDS)

    def data_received(self, data: bytes) -> None:
        idle, self._idle = self._idle, False
        if self._head > LARGEST_HEAD:  # what is in one piece with the body is let through
            self._refuse(_TOO_LARGE)
            return
        self._head += len(data)
        self._feed(data)
        self._next()
        if idle and self._answering is None and not self.lost:
            self._expect(HEAD_SECONDS)

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                if not self._in_head:
                    self._refuse(_BAD)  # CONNECT: what follows is for no one
                    return
                data = self._without_offer() + data[offer.args[0] :]
            except httptools.HttpParserError:
                self._refuse(self._why)
                return

    def _without_offer(self) -> bytes:
        """The head that was just read, for a parser that has not read it, less its offer of another protocol.

        The parser takes what follows one for that other protocol: the body, where Java's client offers HTTP/2 with its
        POST. An offer may be passed over (RFC 9110, 7.8).
        """
        old, self._parser = self._parser, httptools.HttpRequestParser(self)
        lines = [b"%b: %b\r\n" % one for one in self._headers if one[0] != b"upgrade"]
        version = old.get_http_version().encode()
        return b"%b %b HTTP/%b\r\n%b\r\n" % (old.get_method(), self._target, version, b"".join(lines))

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._connections.discard(self)
        for timer in (self._timer, self._unread):
            if timer is not None:
                timer.cancel()
        if self._writable is not None:
            self._writable.set()
        self._waiting.clear()
        self._arriving = None
        if self._answering is not None:
            self._answering.leave()
        del self._parser  # it holds this object as this object holds it

    def pause_writing(self) -> None:
        self._writable = asyncio.Event()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        if self._writable is not None:
            self._writable.set()
            self._writable = None
        if self._unread is not None and not self.transport.is_closing():
            self._unread.cancel()
            self._unread = None
        self._next()

    # httptools' side

    def on_message_begin(self) -> None:
        self._target, self._headers = b"", []
        self._head, self._in_head, self._begun = 0, True, True

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer is none: a gateway that looks at keys has not seen it
            if len(self._headers) == MOST_HEADERS:
                self._why = _TOO_LARGE
                raise ValueError("too many headers")
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        method = parser.get_method()
        if parser.should_upgrade() and method != b"CONNECT":
            return  # it is read again without that
        if len(self._waiting) == MOST_WAITING:
            raise ValueError("too many requests at once")
        self._head, self._in_head, self._begun = 0, False, False
        modern = parser.get_http_version() == "1.1"
        self._arriving = agent = ClientRequest(
            self,
            method.decode("ascii"),
            self._target,
            self._headers,
            keeps=modern and parser.should_keep_alive(),
            chunked=modern,
        )
        self._headers = []
        self._waiting.append(agent)

    def on_body(self, body: bytes) -> None:
        self._head = 0
        if self._arriving is not None and self._arriving.arrives(body) > HIGH_WATER:
            self.pause_reading()

    def on_message_complete(self) -> None:
        if self._in_head:
            return
        self._head, self._in_head = 0, True
        if self._arriving is not None:
            self._arriving.arrived()
            self._arriving = None
        if self._answering is None and not self._waiting:  # it was answered before it was here
            self._over()

    # the agents' side

    @property
    def has_room(self) -> bool:
        return self._writable is None

    async def room(self) -> None:
        """When the agent has taken enough of what was written, or is gone."""
        if self._writable is not None:
            await self._writable.wait()

    def pause_reading(self) -> None:
        if self._reading and not self.transport.is_closing():
            self._reading = False
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._reading and not self.transport.is_closing():
            self._reading = True
            self.transport.resume_reading()

    # the proxy's side

    def shutdown(self) -> None:
        """What is being answered is the last thing."""
        self.ending = True
        self._waiting.clear()
        if self._answering is None:
            self._close()

    def _next(self) -> None:
        """Answers the next request, when the last one is answered and its answer taken; reads on when none waits."""
        if self._answering is None and self._waiting and self._writable is None and not self.transport.is_closing():
            self._answering = agent = self._waiting.popleft()
            agent.task = task = self.loop.create_task(self._handler(agent))
            self.tasks.add(task)
            task.add_done_callback(partial(self._done, agent))
        if self._waiting:
            self.pause_reading()
        elif self._arriving is None and not self.ending:  # else what arrives is taken when there is room for more
            self.resume_reading()

    def answered(self, agent: ClientRequest) -> None:
        """The end of an answer is written, or it has none."""
        self._answering = None
        if self.lost:
            return
        if not (agent.ended and agent.keeps):
            self.ending = True
            self._waiting.clear()
        if not agent.ended:
            self._close()
        elif self._arriving is agent:  # closed at once, an agent in the middle of sending would see that, and no answer
            agent.forget()
            self.resume_reading()
            self._expect(LINGER)
        else:
            self._over()

    def _done(self, agent: ClientRequest, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request failed by a fault of the proxy's own (%s); please report it", error, exc_info=error)
            if not agent.started:
                agent.answer(500, JSON_HEADERS, error_body(Refusal(500, FAILED)))
        if not agent.ended:
            self.answered(agent)

    def _over(self) -> None:
        """A request is here and answered: the next one's turn."""
        if self.ending and not self._waiting:
            self._close()
            return
        self._next()
        if self._answering is None:
            self._idle = not (self._begun or self._head)
            self._expect(KEPT_SECONDS if self._idle else HEAD_SECONDS)

    def _close(self) -> None:
        """What was written still goes out."""
        self.transport.close()
        if self._unread is None:
            self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    # what comes too late, or is no request

    def _expect(self, seconds: float) -> None:
        """Something has to come within `seconds`, unless a request is being answered then. One timer, seldom set."""
        self._due = self.loop.time() + seconds
        if self._timer is not None and self._timer.when() > self._due:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self.loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._answering is not None or self._waiting:
            return  # what trickles in besides can wait; its end sets the timer again
        if self.loop.time() < self._due:
            self._timer = self.loop.call_at(self._due, self._look)
        elif self._in_head and not self._idle:
            self._refuse(b"408 Request Timeout")
        else:
            self._close()

    def _refuse(self, status: bytes) -> None:
        """What came is no request of HTTP, or too much of one. Those that are here whole are answered first."""
        self.ending = True
        self.pause_reading()
        arriving, self._arriving = self._arriving, None
        if arriving is not None and arriving.started:  # it has its answer
            self._close()
            return
        if arriving is not None and arriving in self._waiting:
            self._waiting.remove(arriving)
        if not self._waiting and self._answering in (None, arriving) and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self._close()
