"""The clients' side of HTTP/1.1: one connection, its requests in order, with bounds on what it may cost.

Why not a general server: the same routes behind Uvicorn (0.54, its fastest setting) take about a fifth more processor
time for a short call (`ours-on-uvicorn` in benchmarks/README.md), and Uvicorn bounds neither the size of a request's
head (100 MB of one header were read into memory), nor the time that it may take, nor the time that a client may leave
its reply unread. A malicious agent must not fill the proxy's memory with any of these, nor keep descriptors and the
engine's slots by sending nothing. The parser is httptools (llhttp).
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
from proxy.http.client_request import ClientRequest, status_line
from proxy.http.head_rules import broken, head_error, parse_error, too_large
from proxy.http.headers import JSON_HEADERS, Headers
from proxy.http.limits import Limits

log = logging.getLogger("proxy")

#: Answers a request: called with it, awaited to the end of its reply.
Handler = Callable[[ClientRequest], Coroutine[Any, Any, None]]


class Connection(asyncio.Protocol):
    """One connection of a client. Requests that come before their turn wait, and nothing more is read meanwhile."""

    def __init__(
        self,
        handler: Handler,
        connections: set[Connection],
        tasks: set[asyncio.Task[None]],
        limits: Limits,
    ) -> None:
        """`connections` and `tasks` have this connection, and the tasks that answer its requests, while they live."""
        self.loop = asyncio.get_running_loop()
        self.limits = limits
        self.lost = False
        #: No further request is answered on it.
        self.ending = False
        self.tasks = tasks
        self._handler = handler
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._refusal: Refusal | None = None  # why a callback stopped the parser
        self._target = b""
        self._headers: Headers = []
        self._in_head = True
        self._head_started = False  # a byte of a request line is here
        self._head_size = 0  # bytes that were read before this piece and belong to no body
        self._arriving: ClientRequest | None = None
        self._answering: ClientRequest | None = None
        self._waiting: deque[ClientRequest] = deque()
        self._idle = False
        self._reading = True
        self._writable: asyncio.Event | None = None  # there is one while writing is paused
        self._unread_timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self._connections.add(self)
        self._set_deadline(self.limits.head_time)

    def data_received(self, data: bytes) -> None:
        idle, self._idle = self._idle, False
        if self._head_size > self.limits.head_size:  # what comes in one piece with the body is let through
            self._refuse(too_large(f"the request's head is larger than {self.limits.head_size >> 10} KiB"))
            return
        self._head_size += len(data)
        self._feed(data)
        self._answer_next()
        if idle and self._answering is None and not self.lost:
            self._set_deadline(self.limits.head_time)

    def _feed(self, data: bytes) -> None:
        first = self._in_head and not self._head_started
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                if not self._in_head:
                    self._refuse(broken("CONNECT is not served here"))
                    return
                data = self._head_without_upgrade() + data[offer.args[0] :]
            except httptools.HttpParserError as error:
                self._refuse(self._refusal or parse_error(error, data, first))
                return

    def _head_without_upgrade(self) -> bytes:
        """The head that was just read, for a new parser, less its offer of another protocol.

        The parser takes what follows such an offer for the other protocol: the body, where Java's client offers HTTP/2
        with its POST. A server may ignore an offer (RFC 9110, 7.8).
        """
        old, self._parser = self._parser, httptools.HttpRequestParser(self)
        lines = [b"%b: %b\r\n" % header for header in self._headers if header[0] != b"upgrade"]
        version = old.get_http_version().encode()
        return b"%b %b HTTP/%b\r\n%b\r\n" % (old.get_method(), self._target, version, b"".join(lines))

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._connections.discard(self)
        for timer in (self._timer, self._unread_timer):
            if timer is not None:
                timer.cancel()
        if self._writable is not None:
            self._writable.set()
        self._waiting.clear()
        self._arriving = None
        if self._answering is not None:
            self._answering.disconnected()
        del self._parser  # it refers to this object as this object refers to it

    def pause_writing(self) -> None:
        self._writable = asyncio.Event()
        self._unread_timer = self.loop.call_later(self.limits.unread_time, self.transport.abort)

    def resume_writing(self) -> None:
        if self._writable is not None:
            self._writable.set()
            self._writable = None
        if self._unread_timer is not None and not self.transport.is_closing():
            self._unread_timer.cancel()
            self._unread_timer = None
        self._answer_next()

    # called by httptools

    def on_message_begin(self) -> None:
        self._target, self._headers = b"", []
        self._head_size, self._in_head, self._head_started = 0, True, True

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are dropped: a gateway that checks keys has not seen them
            if len(self._headers) == self.limits.headers:
                self._stop(too_large(f"the request has more than {self.limits.headers} headers"))
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        method = parser.get_method()
        if parser.should_upgrade() and method != b"CONNECT":
            return  # it is read again without the offer
        if len(self._waiting) == self.limits.pipelined:
            self._stop(broken("too many requests were sent before the first was answered"))
        version = parser.get_http_version()
        error = head_error(version, self._headers)
        if error is not None:
            self._stop(error)
        self._head_size, self._in_head, self._head_started = 0, False, False
        http11 = version == "1.1"
        self._arriving = request = ClientRequest(
            self,
            method.decode("ascii"),
            self._target,
            self._headers,
            keep_alive=http11 and parser.should_keep_alive(),
            http11=http11,
        )
        self._headers = []
        self._waiting.append(request)

    def on_body(self, body: bytes) -> None:
        self._head_size = 0
        if self._arriving is not None and self._arriving.body_arrived(body) > self.limits.high_water:
            self.pause_reading()

    def on_message_complete(self) -> None:
        if self._in_head:
            return
        self._head_size, self._in_head = 0, True
        if self._arriving is not None:
            self._arriving.body_complete()
            self._arriving = None
        if self._answering is None and not self._waiting:  # it was answered before it was complete
            self._end_request()

    def _stop(self, refusal: Refusal) -> None:
        """Ends the parsing; the parser makes an error of its own of whatever a callback raises."""
        self._refusal = refusal
        raise refusal

    # called by requests

    @property
    def has_room(self) -> bool:
        return self._writable is None

    async def room(self) -> None:
        """Waits until the client has read enough of what was written, or is gone."""
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

    def answered(self, request: ClientRequest) -> None:
        """The end of a reply is written, or its handler ended without one."""
        self._answering = None
        if self.lost:
            return
        if not (request.finished and request.keep_alive):
            self.ending = True
            self._waiting.clear()
        if not request.finished:
            self._close()
        elif self._arriving is request:
            # Closed at once, the connection would be reset under a client that still sends, which then reads no reply.
            request.discard_body()
            self.resume_reading()
            self._set_deadline(self.limits.linger_time)
        else:
            self._end_request()

    # the order of requests

    def shutdown(self) -> None:
        """Answers the request that is being answered, and no further one."""
        self.ending = True
        self._waiting.clear()
        if self._answering is None:
            self._close()

    def _answer_next(self) -> None:
        """Answers the next request when the last reply is finished and read; reads on when no request waits."""
        if self._answering is None and self._waiting and self._writable is None and not self.transport.is_closing():
            self._answering = request = self._waiting.popleft()
            request.task = task = self.loop.create_task(self._handler(request))
            self.tasks.add(task)
            task.add_done_callback(partial(self._handler_ended, request))
        if self._waiting:
            self.pause_reading()
        elif self._arriving is None and not self.ending:  # a body that arrives is read when there is room for more
            self.resume_reading()

    def _handler_ended(self, request: ClientRequest, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request failed by a fault of the proxy's own (%s); please report it", error, exc_info=error)
            if not request.started:
                request.answer(500, JSON_HEADERS, error_body(Refusal(500, FAILED)))
        if not request.finished:
            self.answered(request)

    def _end_request(self) -> None:
        """A request is complete and answered: turns to the next one."""
        if self.ending and not self._waiting:
            self._close()
            return
        self._answer_next()
        if self._answering is None:
            self._idle = not (self._head_started or self._head_size)
            self._set_deadline(self.limits.idle_time if self._idle else self.limits.head_time)

    def _close(self) -> None:
        """Closes when what was written is out, or when the client has read nothing of it for too long."""
        self.transport.close()
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(self.limits.unread_time, self.transport.abort)

    # requests that come too late, or are refused

    def _set_deadline(self, seconds: float) -> None:
        """Something has to come within `seconds`, unless a request is being answered then. One timer, seldom set."""
        self._deadline = self.loop.time() + seconds
        if self._timer is not None and self._timer.when() > self._deadline:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self.loop.call_at(self._deadline, self._check_deadline)

    def _check_deadline(self) -> None:
        self._timer = None
        if self._answering is not None or self._waiting:
            return  # the end of that request sets the timer again
        if self.loop.time() < self._deadline:
            self._timer = self.loop.call_at(self._deadline, self._check_deadline)
        elif self._in_head and not self._idle:
            self._refuse(Refusal(408, f"the request's head was not complete within {self.limits.head_time:g} s"))
        else:
            self._close()

    def _refuse(self, refusal: Refusal) -> None:
        """Answers with an error what is no request, and closes. Complete requests before it are answered first."""
        self.ending = True
        self.pause_reading()
        arriving, self._arriving = self._arriving, None
        if arriving is not None and arriving.started:  # it has its reply
            self._close()
            return
        if arriving is not None and arriving in self._waiting:
            self._waiting.remove(arriving)
        if not self._waiting and self._answering in (None, arriving) and not self.transport.is_closing():
            body = error_body(refusal)
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(status_line(refusal.status) + head + body)
            self._close()
