"""The HTTP/1.1 client of the hot path: a pool of keep-alive connections to one plain-http engine, on the event loop.

It only sends POST and GET to an engine nearby; `connection.py` has the protocol of one connection. A general client
would be most of what a capture proxy costs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from urllib.parse import urlsplit

from proxy.errors import UpstreamBroke, UpstreamUnreachable
from proxy.http.headers import Headers
from proxy.settings import Timeouts
from proxy.upstream.client import Response
from proxy.upstream.connection import Connection
from proxy.upstream.gate import Gate


class HttpClient:
    """A pool of keep-alive connections to one plain-http upstream."""

    def __init__(self, url: str, timeouts: Timeouts | None = None, gate: Gate | None = None) -> None:
        """`url` is scheme, host, port and an optional path prefix, without `/v1`."""
        parts = urlsplit(url)
        self.host = parts.hostname or "127.0.0.1"
        self.port = parts.port or 80
        self.prefix = parts.path.rstrip("/")
        self.timeouts = timeouts or Timeouts()
        self.gate = gate or Gate()
        #: Uvicorn, in front of vLLM and SGLang, closes a connection that was idle for 5 s; ours are dropped before.
        self.idle_expiry = 3.0
        #: An engine that closes a reused connection later than this after a call was sent may have read the call.
        self.closed_unread_within = 1.0
        self._idle: deque[Connection] = deque()
        self._expiring: asyncio.TimerHandle | None = None
        self._open: set[Connection] = set()
        self._netloc = parts.netloc.rpartition("@")[2].encode()

    async def send(self, method: str, path: str, headers: Headers, body: bytes) -> Response:
        """Sends one request and waits for the head of the answer.

        Raises `UpstreamUnreachable` (nothing was sent), `UpstreamTimeout` or `UpstreamBroke`. A request is sent again
        only where a reused connection turned out to be closed, at once, before it brought a byte, and with the request
        unread: an engine that reads a call and dies is not called again. It is sent again once, over a new connection:
        a request that crashes an engine must not be tried on every connection in the pool.
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
                if not (reused and connection.unread and waited < self.closed_unread_within):
                    raise
            except BaseException:
                connection.close()
                raise

    async def _connection(self, reuse: bool) -> tuple[Connection, bool]:
        while reuse and self._idle:
            connection = self._idle.pop()  # the most recently used first, so that the others can expire
            if connection.usable and connection.loop.time() - connection.idle_since < self.idle_expiry:
                return connection, True
            connection.drop()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.timeouts.connect):
                _, connection = await loop.create_connection(lambda: Connection(self), self.host, self.port)
        except (OSError, TimeoutError) as error:
            raise UpstreamUnreachable("the engine cannot be reached") from error
        self._open.add(connection)
        return connection, False

    def release(self, connection: Connection) -> None:
        self._idle.append(connection)
        if self._expiring is None:
            self._expiring = connection.loop.call_later(self.idle_expiry, self._expire, connection.loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Drops the connections idle for too long, also when no call follows: a burst must not hold its sockets."""
        self._expiring = None
        now = loop.time()
        while self._idle and now - self._idle[0].idle_since >= self.idle_expiry:
            self._idle.popleft().drop()
        if self._idle:
            left = self.idle_expiry - (now - self._idle[0].idle_since)
            self._expiring = loop.call_later(max(left, 0.1), self._expire, loop)

    def forget(self, connection: Connection) -> None:
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


def _request(method: str, path: str, netloc: bytes, headers: Headers, body: bytes) -> list[bytes]:
    head = [b"%s %s HTTP/1.1\r\nhost: %s\r\n" % (method.encode(), path.encode("ascii", "replace"), netloc)]
    head += [b"%s: %s\r\n" % header for header in headers]
    if body or method != "GET":
        head.append(b"content-length: %d\r\n" % len(body))
    head.append(b"\r\n")
    return [b"".join(head), body] if body else [b"".join(head)]
