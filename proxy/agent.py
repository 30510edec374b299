"""The agent's end of a call: its request read whole, its reply written as it comes, its leaving noticed."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from starlette.types import Receive, Scope, Send

from proxy.errors import Refusal
from proxy.inflate import CODINGS, Inflate
from proxy.protocol import Line
from proxy.upstream import Headers

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
#: Seconds that an agent may go on sending a body that was refused.
LINGER = 10.0


class AgentLeft(Exception):
    """The agent closed its connection before the reply was over."""


class Agent:
    """One request and its reply, over ASGI."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.headers: Headers = scope["headers"]
        self._receive = receive
        self._send = send
        self._line: Line | None = scope.get("capture.line")
        self._unsent = b""
        self.left = False
        self.started = False

    def header(self, name: bytes) -> str | None:
        for key, value in self.headers:
            if key == name:
                return value.decode("latin-1")
        return None

    async def body(self, limit: int) -> bytes:
        """The request's body, decompressed. Raises `Refusal` (408, 413, 400) and `AgentLeft`."""
        if self._line is not None and self._line.read_whole:
            return await self._body(limit)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await self._body(limit)
        except TimeoutError:
            raise Refusal(408, f"the request's body did not come whole within {BODY_SECONDS:g} s") from None

    async def _body(self, limit: int) -> bytes:
        told = self.header(b"content-length")
        if told is not None and told.isdigit() and int(told) > limit:
            raise _too_large(limit)
        inflate = _inflater(self.header(b"content-encoding"))
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.left = True
                raise AgentLeft
            part, last = message.get("body", b""), not message.get("more_body", False)
            try:
                for piece in (part,) if inflate is None else inflate.feed(part):
                    size += len(piece)
                    if size > limit:
                        raise _too_large(limit)
                    parts.append(piece)
                if last and inflate is not None:
                    inflate.finish()
            except zlib.error as error:
                raise Refusal(400, f"the request's compressed body is broken: {error}") from error
            if last:
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def upstream_headers(self) -> Headers:
        """What of the agent's headers goes on to the engine: all but keys, cookies and those of one connection."""
        dropped = _NOT_UPSTREAM
        for name, value in self.headers:
            if name == b"connection" and b"," in value:  # it names further headers of this connection only
                dropped = dropped.union(one.strip() for one in value.lower().split(b","))
        return [(name, value) for name, value in self.headers if name not in dropped]

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """While this lasts, an agent that leaves ends the block with `AgentLeft`, wherever it waits."""
        task = asyncio.current_task()
        assert task is not None

        def leave() -> None:
            self.left = True
            task.cancel()

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            leave()

        line = self._line
        watcher = asyncio.ensure_future(watch()) if line is None else None
        if line is not None:
            if line.gone:
                self.left = True
                raise AgentLeft
            line.on_gone.add(leave)
        try:
            yield
        except asyncio.CancelledError:
            if self.left and task.uncancel() == 0:
                raise AgentLeft from None
            raise
        finally:
            if line is not None:
                line.on_gone.discard(leave)
            if watcher is not None:
                watcher.cancel()
                with suppress(asyncio.CancelledError):
                    await asyncio.gather(watcher, return_exceptions=True)

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def push(self, data: bytes) -> bool:
        """Writes at once where that is possible; False where the rest, or all of it, has to wait for `room`."""
        if self._line is None or not self.started:
            self._unsent += data
            return False
        return self._line.write(data)

    async def room(self) -> None:
        """Writes what `push` could not, and waits until the agent has taken enough of it."""
        data, self._unsent = self._unsent, b""
        if data:
            await self.write(data)
        elif self._line is not None:
            await self._line.drained()

    async def end(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole reply at once."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.end(body)

    async def answer_unread(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole reply to a request that is not read to its end; the connection closes after it.

        What the agent still sends is taken and thrown away for a while: closing at once would reset the connection, and
        an agent in the middle of sending would see that instead of the answer.
        """
        await self.start(status, [*headers, (b"connection", b"close"), (b"content-length", b"%d" % len(body))])
        await self.write(body)
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER):
                while (message := await self._receive())["type"] == "http.request" and message.get("more_body"):
                    pass
        await self.end()


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
