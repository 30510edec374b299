"""The process of one worker: an ordinary proxy on its own port, with the sessions that live in it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from proxy.errors import ProxyError
from proxy.runtime.fd_limits import log_when_none_are_left
from proxy.runtime.logs import log_to_stderr
from proxy.runtime.loop import run
from proxy.runtime.memory import start_gc_timer, trim_malloc, tune_gc
from proxy.server import Share, serve
from proxy.sessions.factory import SessionFactory
from proxy.sessions.registry import say_stopped
from proxy.workers.process import Start

log = logging.getLogger("proxy")


def main() -> None:
    """Serves what the supervisor wrote to stdin; stdout tells the supervisor in one line whether it could start."""
    report = os.dup(1)
    os.dup2(2, 1)  # what a package prints is no report
    log_to_stderr()
    trim_malloc()
    try:
        start = pickle.load(sys.stdin.buffer)  # noqa: S301 (the supervisor wrote it)
        run(work(start, report))
    except BaseException as error:
        log.exception("a worker failed (%s)", error)
        sys.exit(1)


async def work(start: Start, report: int) -> None:
    """Serves until the supervisor sends SIGTERM, or is gone."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    loop.add_reader(sys.stdin.fileno(), stop.set)  # nothing more is written to it: readable is its end
    sockets = [socket.socket(fileno=number) for number in start.sockets]
    try:
        async with serve(
            start.settings, Share(start.placement, sockets, start.admin, start.paused, partial(_restore, start))
        ) as proxy:
            tune_gc()
            start_gc_timer()
            log_when_none_are_left()
            _tell(report, None)
            await stop.wait()
            loop.remove_reader(sys.stdin.fileno())
        say_stopped(f"worker {start.placement.index} ", proxy.sessions)
    except ProxyError as error:
        _tell(report, str(error))


def _tell(report: int, failure: str | None) -> None:
    with suppress(OSError):  # the supervisor is gone
        os.write(report, json.dumps({"failure": failure}).encode() + b"\n")


def _restore(start: Start, factory: SessionFactory) -> None:
    """Opens the sessions again that an earlier process of this worker had, under their keys and ids."""
    factory.sessions.set_policies(start.policies)
    for session in start.sessions:
        options = {name: value for name, value in session.fields.items() if name not in ("name", "journal")}
        journal = Path(str(session.fields["journal"]))
        try:
            factory.open_session(session.name, journal=journal, key=session.key, session_id=session.id, **options)
        except ProxyError as error:
            log.error("session %s is not opened again: %s; its key opens nothing any more", session.name, error)
