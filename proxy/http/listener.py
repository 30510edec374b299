"""Accepts clients' connections and, when the proxy stops, lets their calls finish."""

from __future__ import annotations

import asyncio
import logging
import socket

from proxy.http.connection import Connection, Handler
from proxy.http.limits import Limits

log = logging.getLogger("proxy")

BACKLOG = 4096
#: Seconds that calls get which were cancelled, to write the journal lines that record it.
CANCEL_SECONDS = 15.0


class Listener:
    """The clients' side of a proxy."""

    def __init__(self, handler: Handler, limits: Limits | None = None) -> None:
        self.handler = handler
        self.limits = limits or Limits()
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []

    async def listen(self, sockets: list[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        for bound in sockets:
            self._servers.append(await loop.create_server(self._connection, sock=bound, backlog=BACKLOG))

    def _connection(self) -> Connection:
        return Connection(self.handler, self.connections, self.tasks, self.limits)

    async def close(self, grace: float) -> None:
        """Accepts no more connections; calls that are being answered get `grace` seconds, then they are cancelled."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.shutdown()
        if self.tasks:
            _, running = await asyncio.wait(list(self.tasks), timeout=grace)
            if running:
                log.warning("%d calls still running after %g s; ending them", len(running), grace)
                for task in running:
                    task.cancel()
                await asyncio.wait(running, timeout=CANCEL_SECONDS)
        await asyncio.sleep(0)  # the callbacks of the last replies run
        while self.connections and loop.time() < deadline:  # noqa: ASYNC110 (slow clients read what was written)
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.transport.close()
        await asyncio.sleep(0)
