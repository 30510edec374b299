"""`--workers N`: one port, several processes. The front hands each connection to the worker that has its session.

A session lives in one worker, which alone writes its journal. The front looks at the first request of a connection
without taking it, finds the session by its key or by the name in its path, and passes the open connection on: after
that no byte goes through it. It answers the admin routes from all workers. A worker that dies takes what it knew of its
sessions with it; the proxy then ends and says so, its journals hold every finished call.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import tempfile
import zlib
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from proxy.connection import HEAD_SECONDS, LARGEST_HEAD
from proxy.descriptors import allow_many
from proxy.errors import ProxyError
from proxy.front_admin import FrontAdmin
from proxy.handover import Channel, Who, whose
from proxy.server import AdminServer, bind, in_url, run
from proxy.settings import Settings
from proxy.worker import Place, work

log = logging.getLogger("proxy")

#: What the system says when it has no room for one more connection.
SHORT = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
#: Seconds until it is asked again, and until it is said again in the log.
PAUSE, TELL_AGAIN = 0.25, 60.0


class Worker:
    """One worker process, as the front sees it."""

    def __init__(self, index: int, pid: int, channel: Channel, admin: Path) -> None:
        self.index = index
        self.pid = pid
        self.channel = channel
        self.admin = admin
        self.ready = asyncio.Event()
        self.gone = asyncio.Event()
        self.failed: str | None = None


class Directory:
    """Which worker has which session: those that were opened by key, id and name; others by their name alone."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._by_key: dict[bytes, int] = {}
        self._keys: dict[str, bytes] = {}
        self._by_name: dict[str, int] = {"default": 0}

    def opened(self, index: int, key: str, session: str, name: str) -> None:
        self._by_key[_digest(key)] = index
        self._keys[session] = _digest(key)
        self._by_name[session] = self._by_name[name] = index

    def of_name(self, name: str) -> int:
        found = self._by_name.get(name)
        return zlib.crc32(name.encode()) % self._workers if found is None else found

    def of(self, who: Who) -> int:
        """The worker of a request; one that no session has goes to the first, which has the default, or refuses."""
        for key in who.keys:
            found = self._by_key.get(_digest(key))
            if found is not None:
                return found
        return 0 if who.name is None else self.of_name(who.name)

    def least(self) -> int:
        """The worker with the fewest opened sessions."""
        held = [0] * self._workers
        for index in self._by_key.values():
            held[index] += 1
        return min(range(self._workers), key=lambda index: (held[index], -index))

    def closed(self, session: str, name: str) -> None:
        self._by_key.pop(self._keys.pop(session, b""), None)
        self._by_name.pop(session, None)
        if name != "default":
            self._by_name.pop(name, None)


def start(settings: Settings) -> int:
    """Runs the proxy with its workers; the exit code. Raises `ProxyError` where it cannot begin."""
    settings.check()
    made_key = settings.admin_port is not None and settings.admin_key is None
    if made_key:  # before the fork: all workers ask for the same
        settings.admin_key = secrets.token_urlsafe(24)
    allow_many()
    listening = bind([settings.host, *settings.more_hosts], settings.port)
    port = int(listening[0].getsockname()[1])
    folder = Path(tempfile.mkdtemp(prefix="capture-proxy-"))
    ours: list[tuple[int, socket.socket, Path]] = []
    try:
        for index in range(settings.workers):
            end, theirs = Channel.pair()
            admin = folder / f"{index}.sock"
            pid = os.fork()
            if pid == 0:
                for one in (*listening, end, *(other for _, other, _ in ours)):
                    one.close()
                _work(settings, Place(index, port, Channel(theirs), admin))
            theirs.close()
            ours.append((pid, end, admin))
        return run(_front(settings, listening, port, ours, made_key))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _work(settings: Settings, place: Place) -> None:
    code = 1
    try:
        run(work(settings, place))
        code = 0
    except BaseException as error:
        log.exception("worker %d failed (%s)", place.index, error)
    finally:
        os._exit(code)


async def _front(
    settings: Settings,
    listening: list[socket.socket],
    port: int,
    ours: list[tuple[int, socket.socket, Path]],
    made_key: bool,
) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    workers = [Worker(index, pid, Channel(end), admin) for index, (pid, end, admin) in enumerate(ours)]
    front = Front(workers, listening)
    admin: AdminServer | None = None
    lost: Worker | None = None
    try:
        front.listen()
        await asyncio.gather(*(one.ready.wait() for one in workers))
        refused = next((one.failed for one in workers if one.failed), None)
        if refused is None and any(one.gone.is_set() for one in workers):
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
                "worker %d (process %d) died; the calls it was answering are lost, the journals of its sessions hold "
                "every finished one; the proxy ends: start it again", lost.index, lost.pid,
            )  # fmt: skip
    finally:
        await front.close()
        if admin is not None:
            await admin.close()
        for one in workers:
            with suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGTERM)
        await asyncio.gather(*(asyncio.to_thread(_ended, one.pid) for one in workers))
    return 0 if lost is None else 1


def _ended(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


class Front:
    """Takes connections, and gives each to its worker."""

    def __init__(self, workers: list[Worker], listening: list[socket.socket]) -> None:
        self.workers = workers
        self.directory = Directory(len(workers))
        self._listening = listening
        self._tasks: set[asyncio.Task[None]] = set()
        self._pausing: asyncio.TimerHandle | None = None
        self._told_short = -math.inf
        self._lost: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()

    def listen(self) -> None:
        """Hears what workers say: that they are ready, that a connection is another's, that they are gone."""
        for one in self.workers:
            self._hear(one)

    def _hear(self, worker: Worker) -> None:
        def told(word: bytes, text: str) -> None:
            worker.failed = text if word == Channel.FAILED else None
            worker.ready.set()

        def ended() -> None:
            worker.gone.set()
            worker.ready.set()
            if not self._lost.done():
                self._lost.set_result(worker)

        worker.channel.listen(lambda connection, early: self._begin(self._pass_on(connection, early)), told, ended)

    def open(self) -> None:
        for one in self._listening:
            one.listen(4096)
            one.setblocking(False)
        self._take()

    def _take(self) -> None:
        for one in self._listening:
            asyncio.get_running_loop().add_reader(one, self._accept, one)

    async def until(self, stop: asyncio.Event) -> Worker | None:
        """Waits for the word to stop (None), or for a worker that dies."""
        self._lost.add_done_callback(lambda _: stop.set())
        await stop.wait()
        return self._lost.result() if self._lost.done() else None

    async def close(self) -> None:
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
        with suppress(OSError):  # that worker is gone, and so is the proxy in a moment
            await self.workers[self.directory.of(whose(head))].channel.give(connection, early)


async def _peek(connection: socket.socket) -> bytes:
    """The head of a connection's first request, or all there is of it where it is too long or ends early."""
    seen = 0
    while True:
        await _readable(connection)
        head = connection.recv(LARGEST_HEAD, socket.MSG_PEEK)
        if not head or b"\r\n\r\n" in head or len(head) >= LARGEST_HEAD or len(head) == seen:
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


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
