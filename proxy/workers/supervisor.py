"""`--workers N`: one port, several processes. The front hands each connection to the worker that has its session.

A session lives in one worker, which alone writes its journal. The front looks at the first request of a connection
without taking it, finds the session by its key or by the name in its path, and passes the open connection on: after
that no byte goes through it. It answers the admin routes from all workers. A worker that dies is started again: its
sessions are opened again under their keys, on their journals, which hold every finished call. What they remembered is
forgotten, and the calls that were being answered are broken off.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import shutil
import signal
import socket
import tempfile
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from proxy.admin.server import AdminServer
from proxy.errors import ProxyError
from proxy.http.connection import HEAD_SECONDS, LARGEST_HEAD
from proxy.http.sockets import bind, in_url
from proxy.runtime.fd_limits import raise_fd_limit
from proxy.runtime.loop import run
from proxy.settings import Settings
from proxy.workers.admin import FrontAdmin
from proxy.workers.fd_channel import Channel, whose
from proxy.workers.process import BACK_SECONDS, DEATHS, WITHIN, Worker
from proxy.workers.session_index import Directory, Opened

log = logging.getLogger("proxy")

#: What the system says when it has no room for one more connection.
SHORT = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
#: Seconds until it is asked again, and until it is said again in the log.
PAUSE, TELL_AGAIN = 0.25, 60.0


def start(settings: Settings) -> int:
    """Runs the proxy with its workers; the exit code. Raises `ProxyError` where it cannot begin."""
    settings.check()
    made_key = settings.admin_port is not None and settings.admin_key is None
    settings = settings.with_admin_key()  # all workers ask for the same
    raise_fd_limit()
    listening = bind([settings.host, *settings.more_hosts], settings.port)
    folder = Path(tempfile.mkdtemp(prefix="capture-proxy-"))
    try:
        return run(_front(settings, listening, folder, made_key))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _front(settings: Settings, listening: list[socket.socket], folder: Path, made_key: bool) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    port = int(listening[0].getsockname()[1])
    workers = [Worker(index, port, settings, folder / f"{index}.sock") for index in range(settings.workers)]
    front = Front(workers, listening)
    admin: AdminServer | None = None
    lost: Worker | None = None
    try:
        front.start()
        await asyncio.gather(*(one.heard.wait() for one in workers))
        refused = next((one.failed for one in workers if one.failed), None)
        if refused is None and not all(one.up.is_set() for one in workers):
            refused = "a worker could not start; what it said stands above"
        if refused is not None:
            raise ProxyError(refused)
        log.info("agents: http://%s:%d/v1 (%d workers)", in_url(settings.host), port, len(workers))
        if settings.admin_port is not None:
            sockets = bind([settings.admin_host], settings.admin_port, option="--admin-port")
            admin = AdminServer(FrontAdmin(workers, front.directory).app(), settings, sockets)
            await admin.start()
            told = f" (key {settings.admin_key})" if made_key else ""
            log.info("admin: http://%s:%d%s", in_url(settings.admin_host), sockets[0].getsockname()[1], told)
        front.open()
        lost = await front.until(stop)
        if lost is not None:
            log.error(
                "worker %d died %d times within %g s; the journals of its sessions hold every finished call; the proxy "
                "ends: see above what killed it, and start it again", lost.index, DEATHS, WITHIN,
            )  # fmt: skip
    finally:
        await front.close()
        if admin is not None:
            await admin.close()
        for one in workers:
            one.stop()
        await asyncio.gather(*(asyncio.to_thread(one.ended) for one in workers))
    return 0 if lost is None else 1


class Front:
    """Takes connections, and gives each to its worker; starts a worker that dies again."""

    def __init__(self, workers: list[Worker], listening: list[socket.socket]) -> None:
        self.workers = workers
        self.directory = Directory(len(workers))
        self._listening = listening
        self._tasks: set[asyncio.Task[None]] = set()
        self._pausing: asyncio.TimerHandle | None = None
        self._told_short = -math.inf
        self._stopping = False
        self._opened = False
        self._lost: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        for one in self.workers:
            one.start()
            self._hear(one)

    def _hear(self, worker: Worker) -> None:
        """What a worker says: that it is ready, that a connection is another's, that it is gone."""

        def told(word: bytes, text: str) -> None:
            if word == Channel.FAILED:
                worker.failed = text
            else:
                worker.up.set()
                worker.heard.set()

        def ended() -> None:
            worker.up.clear()
            worker.heard.set()
            worker.channel.close()
            if self._opened and not self._stopping:
                self._begin(self._again(worker))

        worker.channel.listen(lambda connection, early: self._begin(self._pass_on(connection, early)), told, ended)

    async def _again(self, worker: Worker) -> None:
        """A worker died: another process takes its place, with the sessions that were opened in it."""
        pid, how = worker.pid, await asyncio.to_thread(worker.ended)
        if worker.failed:
            log.error("worker %d could not start again: %s", worker.index, worker.failed)
        else:
            log.error(
                "worker %d (process %d) died (%s): the calls it was answering are broken off, and in no journal",
                worker.index, pid, how,
            )  # fmt: skip
        sessions = await self._start_again(worker)
        await worker.heard.wait()
        if worker.up.is_set():
            log.info(
                "worker %d is up again (process %d), with %d opened sessions under their keys; what they remembered is "
                "forgotten", worker.index, worker.pid, len(sessions),
            )  # fmt: skip

    async def _start_again(self, worker: Worker) -> list[Opened]:
        while not worker.died():
            sessions = self.directory.of_worker(worker.index)
            try:
                worker.start(sessions, self.directory.versions)
            except OSError as error:
                log.error("worker %d cannot be started: %s", worker.index, error.strerror)
                await asyncio.sleep(1)
            else:
                self._hear(worker)
                return sessions
        if not self._lost.done():
            self._lost.set_result(worker)
        return []

    def open(self) -> None:
        self._opened = True
        for one in self._listening:
            one.listen(4096)
            one.setblocking(False)
        self._take()
        for worker in self.workers:
            if not worker.up.is_set():  # it died since it was ready
                self._begin(self._again(worker))

    def _take(self) -> None:
        for one in self._listening:
            asyncio.get_running_loop().add_reader(one, self._accept, one)

    async def until(self, stop: asyncio.Event) -> Worker | None:
        """Waits for the word to stop (None), or for a worker that dies again and again."""
        self._lost.add_done_callback(lambda _: stop.set())
        await stop.wait()
        return self._lost.result() if self._lost.done() else None

    async def close(self) -> None:
        self._stopping = True
        if self._pausing is not None:
            self._pausing.cancel()
        for one in self._listening:
            asyncio.get_running_loop().remove_reader(one)
            one.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(64):
            try:
                connection, _ = listening.accept()
            except OSError as error:  # none left, or one that broke off while it waited
                if error.errno in SHORT:
                    self._pause(error)
                return
            connection.setblocking(False)
            self._begin(self._first(connection))

    def _pause(self, error: OSError) -> None:
        """Connections wait where they are for a moment: to ask for them again at once would be asked without end."""
        loop = asyncio.get_running_loop()
        for one in self._listening:
            loop.remove_reader(one)
        self._pausing = loop.call_later(PAUSE, self._take)
        if loop.time() - self._told_short > TELL_AGAIN:
            self._told_short = loop.time()
            log.error(
                "no more connections can be taken (%s): agents wait until others have left; raise the limit of open "
                "files (ulimit -n)", error.strerror,
            )  # fmt: skip

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _first(self, connection: socket.socket) -> None:
        """A new connection: its first request says whose it is; it is looked at and left where it is."""
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                head = await _peek(connection)
        except (TimeoutError, OSError):
            connection.close()
            return
        except asyncio.CancelledError:
            connection.close()
            raise
        if not head:
            connection.close()
            return
        await self._give(connection, head, b"")

    async def _pass_on(self, connection: socket.socket, early: bytes) -> None:
        """A kept connection, on which a request of another session's came."""
        await self._give(connection, early, early)

    async def _give(self, connection: socket.socket, head: bytes, early: bytes) -> None:
        worker = self.workers[self.directory.of(whose(head))]
        try:
            async with asyncio.timeout(BACK_SECONDS):
                await worker.up.wait()
        except TimeoutError:
            connection.close()
            return
        except asyncio.CancelledError:
            connection.close()
            raise
        with suppress(OSError):  # it has died this moment: the agent asks again
            await worker.channel.give(connection, early)


async def _peek(connection: socket.socket) -> bytes:
    """The head of a connection's first request, or all there is of it where it is too long or ends early."""
    seen = 0
    while True:
        await _readable(connection)
        head = connection.recv(LARGEST_HEAD, socket.MSG_PEEK)
        if not head or b"\r\n\r\n" in head.lstrip(b"\r\n") or len(head) >= LARGEST_HEAD or len(head) == seen:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            return head
        seen = len(head)
        # Readable again when there is more of it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, seen + 1)


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(connection, readable)
    try:
        await ready
    finally:
        loop.remove_reader(connection)
