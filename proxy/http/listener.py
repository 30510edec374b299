"""Takes agents' connections, on sockets of its own or handed to it, and on closing lets their calls come to an end."""

from __future__ import annotations

import asyncio
import logging
import socket

from proxy.http.connection import Connection, Handler

log = logging.getLogger("proxy")

BACKLOG = 4096
#: Seconds that calls get which were told to end, for the lines that say so.
ENDING = 15.0


class Listener:
    """The agents' side of a proxy."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []

    async def listen(self, sockets: list[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        for one in sockets:
            self._servers.append(await loop.create_server(self.connection, sock=one, backlog=BACKLOG))

    def connection(self) -> Connection:
        return Connection(self.handler, self.connections, self.tasks)

    async def close(self, grace: float) -> None:
        """No new connections; calls that are being answered get `grace` seconds, then they are ended."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + grace
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
                await asyncio.wait(running, timeout=ENDING)
        await asyncio.sleep(0)  # the last answers' ends are seen to
        while self.connections and loop.time() < ends:  # noqa: ASYNC110 (what is answered is on its way to slow agents)
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.transport.close()
        await asyncio.sleep(0)
