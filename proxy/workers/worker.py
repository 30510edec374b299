"""One of several workers that share a port: the sessions it has, on connections that the front hands to it."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy.errors import ProxyError
from proxy.http.connection import LARGEST_HEAD, Connection
from proxy.http.listener import Listener
from proxy.http.target import parse_target
from proxy.runtime.fd_limits import say_when_none_are_left
from proxy.runtime.logs import log_to_stderr
from proxy.runtime.loop import run
from proxy.runtime.memory import start_gc_timer, trim_malloc, tune_gc
from proxy.server import Proxy, Share, serve
from proxy.sessions.keys import keys
from proxy.sessions.registry import say_stopped
from proxy.settings import Settings
from proxy.workers.fd_channel import Channel, Who, whose
from proxy.workers.session_index import Opened

log = logging.getLogger("proxy")


@dataclass
class Place:
    """A worker's place among the others: its number, the agents' port, its end of the channel, its admin socket; and,
    where another process had the place before, the sessions and policy versions that it had."""

    index: int
    port: int
    channel: Channel
    admin: Path
    sessions: list[Opened]
    versions: dict[str, str]


class SharedConnection(Connection):
    """One connection of an agent's, for as long as its requests are of one session.

    A request of another session's, on a connection that was kept, goes back to the front with the connection and all
    that was read of it: its worker answers.
    """

    _who: Who | None = None
    _early = b""
    _looked_at = False  # the next request's head

    def __init__(self, listener: Listener, front: Channel, early: bytes) -> None:
        super().__init__(listener.handler, listener.connections, listener.tasks)
        self._front = front
        self._first = early

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._first:
            self.data_received(self._first)

    def data_received(self, data: bytes) -> None:
        if self.between and not self.transport.get_write_buffer_size():
            self._early = (self._early + data).lstrip(b"\r\n")  # as the parser does
            if b"\r\n\r\n" not in self._early and len(self._early) <= LARGEST_HEAD:
                self.head_begins()
                return
            data, self._early = self._early, b""
            who = whose(data)
            if self._who is None:
                self._who = who
            elif who != self._who:
                self._hand_back(data)
                return
            self._looked_at = True
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """A request right behind another cannot be handed back: this worker would make a session of its name."""
        looked_at, self._looked_at = self._looked_at, False
        if not looked_at:
            target = parse_target(self._target)
            if Who(tuple(keys(self._headers)), None if target is None else target.session) != self._who:
                self._why = b"421 Misdirected Request"
                raise ValueError("another worker's")
        super().on_headers_complete()

    def _hand_back(self, early: bytes) -> None:
        try:
            connection = socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno()))
        except OSError as error:
            log.error("a connection of another worker's is closed (%s); raise the limit of open files", error.strerror)
            self.transport.abort()
            return
        self.transport.pause_reading()
        self.transport.abort()  # closes this descriptor of it; the other stays open
        giving = self.loop.create_task(self._give(connection, early))
        self.tasks.add(giving)
        giving.add_done_callback(self.tasks.discard)

    async def _give(self, connection: socket.socket, early: bytes) -> None:
        with suppress(OSError):  # the front is gone, or no descriptor is left: the agent asks again
            await self._front.give(connection, early)


def main(channel: int, boot: int) -> None:
    """A worker's process, from the two descriptors that the front gave it."""
    log_to_stderr()
    trim_malloc()
    index = -1
    try:
        with open(boot, "rb") as file:
            settings, index, port, admin, sessions, versions = pickle.load(file)  # noqa: S301 (of the front's own)
        place = Place(index, port, Channel(socket.socket(fileno=channel)), admin, sessions, versions)
        run(work(settings, place))
    except BaseException as error:
        log.exception("worker %d failed (%s)", index, error)
        sys.exit(1)


async def work(settings: Settings, place: Place) -> None:
    """Serves until the front says stop, or is gone."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    share = Share(place.index, place.port, place.admin)
    try:
        async with serve(settings, share) as proxy:
            tune_gc()
            start_gc_timer()
            say_when_none_are_left()
            arriving: set[asyncio.Task[Any]] = set()

            def took(connection: socket.socket, early: bytes) -> None:
                def protocol() -> SharedConnection:
                    assert share.listener is not None
                    return SharedConnection(share.listener, place.channel, early)

                arrives = loop.create_task(loop.connect_accepted_socket(protocol, connection))
                arriving.add(arrives)
                arrives.add_done_callback(arriving.discard)

            await _open_again(proxy, place)
            place.channel.listen(took, lambda word, text: None, stop.set)
            place.channel.tell(Channel.READY)
            await stop.wait()
        say_stopped(f"worker {place.index} ", proxy.sessions)
    except ProxyError as error:
        place.channel.tell(Channel.FAILED, str(error))


async def _open_again(proxy: Proxy, place: Place) -> None:
    proxy.sessions.set_versions(place.versions)
    for one in place.sessions:
        options = {name: value for name, value in one.fields.items() if name not in ("name", "journal")}
        journal = Path(str(one.fields["journal"]))
        try:
            await proxy.open_session(one.name, journal=journal, key=one.key, session_id=one.session, **options)
        except ProxyError as error:
            log.error("session %s is not opened again: %s; its key opens nothing any more", one.name, error)
