"""Connections on their way between the front and its workers: an open socket, and what was already read from it.

Linux only: a packet a connection over a Unix socket pair, the descriptor beside it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import NamedTuple

from proxy.http.target import parse_target
from proxy.sessions.keys import keys

log = logging.getLogger("proxy")


class Who(NamedTuple):
    """What a request's head says of its session: the keys it offers, and the name in its path."""

    keys: tuple[str, ...]
    name: str | None


def whose(head: bytes) -> Who:
    """Reads a request's head as far as it says whose call it is. What it cannot read, it says nothing of."""
    first, _, rest = head.lstrip(b"\r\n").partition(b"\r\n\r\n")[0].partition(b"\r\n")
    headers = []
    for line in rest.split(b"\r\n"):
        name, _, value = line.partition(b":")
        headers.append((name.strip().lower(), value.strip()))
    target = parse_target(first.partition(b" ")[2].lstrip(b" ").partition(b" ")[0])
    return Who(tuple(keys(headers)), None if target is None else target.session)


class Channel:
    """One end of the way between the front and one worker."""

    READY, FAILED, CONNECTION = b"r", b"f", b"c"

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def listen(
        self,
        took: Callable[[socket.socket, bytes], None],
        told: Callable[[bytes, str], None],
        ended: Callable[[], None],
    ) -> None:
        """Calls `took` for a connection and what was read of it, `told` for a word, `ended` when the other is gone."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            while True:
                try:
                    data, descriptors, _, _ = socket.recv_fds(self._end, 4096, 2)
                except BlockingIOError:
                    return
                except OSError:
                    data, descriptors = b"", []
                if not data:
                    loop.remove_reader(self._end)
                    ended()
                    return
                if data[:1] == self.CONNECTION and len(descriptors) < data[1]:  # no room for it here: it is closed
                    for one in descriptors:
                        os.close(one)
                    log.error("a connection could not be taken over; raise the limit of open files (ulimit -n)")
                elif data[:1] == self.CONNECTION:
                    took(socket.socket(fileno=descriptors[0]), _read(descriptors[1]) if descriptors[1:] else b"")
                else:
                    told(data[:1], data[1:].decode())

        loop.add_reader(self._end, read)

    async def give(self, connection: socket.socket, early: bytes = b"") -> None:
        """Hands a connection over; it is closed here. Raises `OSError` where nobody takes it any more."""
        descriptors = [connection.fileno()]
        try:
            if early:
                descriptors.append(os.memfd_create("early"))
                with open(descriptors[1], "wb", closefd=False) as file:  # noqa: ASYNC230 (memory)
                    file.write(early)
            while True:
                try:
                    socket.send_fds(self._end, [self.CONNECTION + bytes([len(descriptors)])], descriptors)
                    return
                except BlockingIOError:
                    await asyncio.sleep(0.002)
        finally:
            connection.close()
            for one in descriptors[1:]:
                os.close(one)

    def tell(self, word: bytes, text: str = "") -> None:
        self._end.send(word + text.encode()[:4000])

    def close(self) -> None:
        self._end.close()


def _read(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
        file.seek(0)
        return file.read()
