"""`--workers N`: several processes, each an ordinary proxy on a port of its own, started again when it dies.

A session lives in one worker, which alone writes its journal; `proxy/sessions/placement.py` says which. The supervisor
handles no call. It holds the listening sockets, answers the admin routes from all workers, and starts a worker that
died again: its sessions are opened under their keys, on their journals, which hold every finished call. What they
remembered is forgotten, and the calls that it was answering are broken off.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from proxy.admin.server import AdminServer
from proxy.errors import ProxyError
from proxy.http.sockets import bind, in_url
from proxy.runtime.fd_limits import raise_fd_limit
from proxy.runtime.loop import run
from proxy.sessions.placement import Placement
from proxy.settings import Settings
from proxy.workers.admin import WorkersAdmin
from proxy.workers.opened_sessions import OpenedSessions
from proxy.workers.process import DEATHS, WITHIN, Worker

log = logging.getLogger("proxy")


def start(settings: Settings) -> int:
    """Runs the proxy with its workers; the exit code. Raises `ProxyError` where it cannot begin."""
    settings.check()
    made_key = settings.admin_port is not None and settings.admin_key is None
    settings = settings.with_admin_key()  # all workers ask for the same
    raise_fd_limit()
    folder = Path(tempfile.mkdtemp(prefix="capture-proxy-"))
    try:
        return run(_supervise(settings, folder, made_key))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _supervise(settings: Settings, folder: Path, made_key: bool) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    workers = _workers(settings, folder)
    opened = OpenedSessions(len(workers))
    admin: AdminServer | None = None
    running: dict[asyncio.Task[Any], Worker] = {}
    try:
        for failure in await asyncio.gather(*(worker.start() for worker in workers)):
            if failure is not None:
                raise ProxyError(failure or "a worker could not start; the lines above say why")
        ports = workers[0].placement.ports
        log.info(
            "agents: http://%s:%d/v1 (%d workers, on ports %s)",
            in_url(settings.host), ports[0], len(workers), ", ".join(map(str, ports)),
        )  # fmt: skip
        if settings.admin_port is not None:
            sockets = bind([settings.admin_host], settings.admin_port, option="--admin-port")
            admin = AdminServer(WorkersAdmin(workers, opened).app(), settings, sockets)
            await admin.start()
            key = f" (key {settings.admin_key})" if made_key else ""
            log.info("admin: http://%s:%d%s", in_url(settings.admin_host), sockets[0].getsockname()[1], key)
        running = {asyncio.create_task(_keep_running(worker, opened)): worker for worker in workers}
        stopping: asyncio.Task[Any] = asyncio.create_task(stop.wait())
        await asyncio.wait([*running, stopping], return_when=asyncio.FIRST_COMPLETED)
        lost = next((worker for task, worker in running.items() if task.done()), None)
        if lost is not None:
            log.error(
                "worker %d died %d times within %g s; the journals of its sessions hold every finished call; the proxy "
                "ends: see above what killed it, and start it again", lost.index, DEATHS, WITHIN,
            )  # fmt: skip
        return 0 if lost is None else 1
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if admin is not None:
            await admin.close()
        for worker in workers:
            worker.stop()
        await asyncio.gather(*(worker.ended() for worker in workers))


def _workers(settings: Settings, folder: Path) -> list[Worker]:
    """Workers with their sockets bound: on `--port` and the ports after it, or on free ports for `--port 0`."""
    bound: list[list[socket.socket]] = []
    try:
        for port in islice(_ports(settings), settings.workers):
            bound.append(bind([settings.host, *settings.more_hosts], port))
    except ProxyError:
        for sockets in bound:
            for listening in sockets:
                listening.close()
        raise
    ports = tuple(int(sockets[0].getsockname()[1]) for sockets in bound)
    return [
        Worker(Placement(index, ports), sockets, settings, folder / f"{index}.sock")
        for index, sockets in enumerate(bound)
    ]


def _ports(settings: Settings) -> Iterator[int]:
    for port in count(settings.port, 1 if settings.port else 0):
        if not port or port != settings.admin_port:
            yield port


async def _keep_running(worker: Worker, opened: OpenedSessions) -> None:
    """Starts a worker again whenever it dies, with its opened sessions; returns when it died too often."""
    failure: str | None = None
    while True:
        pid, how = worker.pid, await worker.ended()
        if failure:
            log.error("worker %d could not start again: %s", worker.index, failure)
        else:
            log.error(
                "worker %d (process %d) died (%s): the calls it was answering are broken off, and in no journal",
                worker.index, pid, how,
            )  # fmt: skip
        if worker.died():
            return
        sessions = opened.of_worker(worker.index)
        try:
            failure = await worker.start(sessions, opened.policies)
        except OSError as error:
            failure = error.strerror
            await asyncio.sleep(1)
        if failure is None:
            log.info(
                "worker %d is up again (process %d), with %d opened sessions under their keys; what they remembered is "
                "forgotten", worker.index, worker.pid, len(sessions),
            )  # fmt: skip
