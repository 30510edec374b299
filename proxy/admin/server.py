"""Uvicorn for the admin routes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from proxy.settings import Settings


class AdminServer:
    """Uvicorn with the admin routes, on sockets that are bound already; without any, nothing."""

    def __init__(self, app: ASGIApp, settings: Settings, sockets: list[socket.socket]) -> None:
        self._sockets = sockets
        self._server = _Server(
            uvicorn.Config(
                app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False,
                proxy_headers=False, server_header=False, date_header=False,
                timeout_graceful_shutdown=max(1, round(settings.grace)),
            )
        )  # fmt: skip
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self._sockets:
            self._serving = asyncio.ensure_future(self._server.serve(sockets=self._sockets))
            while not self._server.started:  # noqa: ASYNC110 (uvicorn tells by a flag)
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)


class _Server(uvicorn.Server):
    """Without uvicorn's signal handlers: the process that starts a proxy decides what ends it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
