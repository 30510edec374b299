"""`bench proxy` with Uvicorn as its HTTP server: the same routes, calls and journal behind ASGI.

    python -m benchmarks.proxy.uvicorn_listener OPTIONS-OF-BENCH-PROXY

It is the target `ours-on-uvicorn` of compare.py, which shows what the server in `proxy/http` buys. Uvicorn has
its fastest setting: httptools, uvloop, no access log, no date. A call writes with `send` directly, without a queue.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any, cast

from starlette.types import Message, Receive, Scope, Send

import proxy.server
from proxy.admin.server import AdminServer
from proxy.cli import app
from proxy.http.client_request import ClientRequest, Link
from proxy.http.connection import Handler
from proxy.http.headers import Headers
from proxy.http.limits import Limits
from proxy.settings import Settings


class AsgiRequest(ClientRequest):
    """A request under ASGI, with the methods that a call uses."""

    __slots__ = ("_receive", "_send", "_suspended", "_watching")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        headers: Headers = list(scope["headers"])
        link = cast(Link, None)  # every method that uses it is overridden
        super().__init__(link, scope["method"], scope["raw_path"] + query, headers, keep_alive=True, http11=True)
        self._receive = receive
        self._send = send
        self._suspended: Coroutine[Any, Any, None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def body(self, limit: int) -> bytes:
        more = True
        while more:
            message = await self._receive()
            more = message.get("more_body", False)
            self.body_arrived(message.get("body", b""))
        self.body_complete()
        self._watching = asyncio.create_task(self._watch())
        return await super().body(limit)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.disconnected()

    def start(self, status: int, headers: Headers) -> None:
        self.started = True
        self._say({"type": "http.response.start", "status": status, "headers": headers})

    def push(self, data: bytes) -> bool:
        if data and not self.left:
            self._say({"type": "http.response.body", "body": data, "more_body": True})
        return self._suspended is None

    async def room(self) -> None:
        suspended, self._suspended = self._suspended, None
        if suspended is not None:
            await suspended

    def end(self, data: bytes = b"") -> None:
        self.finished = True
        self._say({"type": "http.response.body", "body": data})

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        self.end(body)

    def _say(self, message: Message) -> None:
        """Sends at once: Uvicorn's `send` waits only where the client takes nothing."""
        sending = cast(Coroutine[Any, Any, None], self._send(message))
        if self._suspended is not None:
            sending = _both(self._suspended, sending)
            self._suspended = None
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return
        self._suspended = _resumed(sending, waits_for)

    async def finish(self) -> None:
        await self.room()
        if self._watching is not None:
            self._watching.cancel()


async def _both(first: Coroutine[Any, Any, None], second: Coroutine[Any, Any, None]) -> None:
    await first
    await second


@coroutine
def _resumed(sending: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """The rest of a coroutine that was begun outside a task and waits."""
    try:
        while True:
            waits_for = sending.send((yield waits_for))
    except StopIteration:
        return


class UvicornListener:
    """In the place of `proxy.http.listener.Listener`."""

    def __init__(self, handler: Handler, limits: Limits) -> None:
        self.handler = handler
        self._server: AdminServer | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = AsgiRequest(scope, receive, send)
        task = asyncio.current_task()
        assert task is not None
        request.task = task
        await self.handler(request)
        await request.finish()

    async def listen(self, sockets: list[socket.socket]) -> None:
        self._server = AdminServer(self, Settings(), sockets)
        await self._server.start()

    async def close(self, grace: float) -> None:
        if self._server is not None:
            await self._server.close()


if __name__ == "__main__":
    proxy.server.Listener = UvicornListener  # type: ignore[assignment, misc]
    app()
