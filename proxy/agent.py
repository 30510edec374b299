"""The agent's end of a call: its request read whole, its reply written as it comes, its leaving noticed."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.types import Receive, Scope, Send

from proxy.errors import Refusal
from proxy.upstream import Headers

#: Headers of one connection only, and those that we set ourselves.
_NOT_UPSTREAM = frozenset(
    b"host connection keep-alive proxy-connection transfer-encoding te trailer upgrade content-length content-encoding "
    b"content-type accept-encoding expect authorization x-api-key x-goog-api-key proxy-authorization cookie "
    b"x-forwarded-for x-forwarded-host x-forwarded-proto forwarded".split()
)
_NOT_TO_AGENT = frozenset(
    b"connection keep-alive proxy-connection transfer-encoding te trailer upgrade content-length content-encoding "
    b"set-cookie alt-svc".split()
)


class AgentLeft(Exception):
    """The agent closed its connection before the reply was over."""


class Agent:
    """One request and its reply, over ASGI."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.headers: Headers = scope["headers"]
        self._receive = receive
        self._send = send
        self.left = False
        self.started = False

    def header(self, name: bytes) -> str | None:
        for key, value in self.headers:
            if key == name:
                return value.decode("latin-1")
        return None

    async def body(self, limit: int) -> bytes:
        """The request's body, decompressed. Raises `Refusal` (413, 400) and `AgentLeft`."""
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
            part = message.get("body", b"")
            if inflate is not None:
                try:
                    part = inflate.decompress(part, limit + 1 - size)
                except zlib.error as error:
                    raise Refusal(400, f"the request's compressed body is broken: {error}") from error
                if inflate.unconsumed_tail:
                    raise _too_large(limit)
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def upstream_headers(self) -> Headers:
        """What of the agent's headers goes on to the engine: all but keys, cookies and those of one connection."""
        return [(name, value) for name, value in self.headers if name not in _NOT_UPSTREAM]

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """While this lasts, an agent that leaves ends the block with `AgentLeft`, wherever it waits."""
        task = asyncio.current_task()
        assert task is not None

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self.left = True
            task.cancel()

        watcher = asyncio.ensure_future(watch())
        try:
            yield
        except asyncio.CancelledError:
            if self.left and task.uncancel() == 0:
                raise AgentLeft from None
            raise
        finally:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(watcher, return_exceptions=True)

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole reply at once."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.end(body)


def reply_headers(headers: Headers) -> Headers:
    """What of the engine's headers goes on to the agent."""
    return [(name, value) for name, value in headers if name not in _NOT_TO_AGENT]


def _inflater(encoding: str | None) -> zlib._Decompress | None:
    coding = (encoding or "identity").strip().lower()
    if coding == "identity":
        return None
    if coding in ("gzip", "x-gzip", "deflate"):
        return zlib.decompressobj(zlib.MAX_WBITS | 32)
    raise Refusal(415, f"the request's content-encoding {coding!r} is not understood; send gzip or none")


def _too_large(limit: int) -> Refusal:
    return Refusal(
        413, f"the request's body is larger than {limit >> 20} MiB; start the proxy with a larger --max-body-mb"
    )
