"""The benchmark's load client: many keep-alive connections on one epoll, reading replies with as little work as counts.

A reply's end, its events and its first sampled token are found in the raw bytes; nothing is parsed. So the client costs
a few microseconds per read, which the caller can see (`Result.client_cpu`) beside what the target cost.
"""

from __future__ import annotations

import re
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

EVENT = b"data: {"
END = b"\r\n0\r\n\r\n"
#: The first piece of text that was sampled, in a chunk or a whole body, spaced or not; also in other dialects' deltas.
TOKEN = re.compile(rb'"(?:content|text|delta)": ?"[^"]')


@dataclass(slots=True)
class Result:
    """What one load brought. Times are seconds; `events` counts all streamed events but [DONE]."""

    asked: int = 0
    whole: int = 0
    failed: int = 0
    events: int = 0
    bytes: int = 0
    wall: float = 0.0
    client_cpu: float = 0.0
    ttft: list[float] = field(default_factory=list)
    sample: bytes = b""
    failure: str = ""


class _Stream:
    __slots__ = ("began", "events", "fd", "first", "got", "head", "kept", "left", "out", "request", "sock", "tail")

    def __init__(self) -> None:
        self.sock: socket.socket | None = None
        self.fd = -1
        self.kept: list[bytes] | None = None
        self.out = b""

    def begin(self, now: float) -> None:
        self.began = now
        self.head = b""
        self.tail = b""
        self.left = -1  # bytes of the body that are to come; -1 while it is chunked or unknown
        self.first = True
        self.events = 0


class Load:
    """`streams` connections to one address; `run` sends requests over them, each the next of `requests`."""

    def __init__(self, port: int, streams: int) -> None:
        self.port = port
        self.epoll = select.epoll()
        self.streams = [_Stream() for _ in range(streams)]
        self.by_fd: dict[int, _Stream] = {}

    def close(self) -> None:
        for stream in self.streams:
            self._disconnect(stream)
        self.epoll.close()

    def run(self, requests: Sequence[bytes], count: int, *, limit: float, at_least: int = 0) -> Result:
        """Sends `count` requests; a stream sends its next when its last is answered.

        No request begins after `limit` seconds, but the first `at_least`; what is unanswered after twice that is
        given up and counted as failed.
        """
        result = self._result = Result()
        self.requests, self.count, self.limit, self.at_least = requests, count, limit, at_least
        cpu, self.started = time.process_time(), time.perf_counter()
        self.busy = 0
        first = deque(self.streams)
        while first or self.busy:
            while first and self.busy < len(self.streams):
                self._next(first.popleft())
            now = time.perf_counter()
            if now - self.started > 2 * limit + 5:
                result.failed += self.busy
                result.failure = result.failure or f"{self.busy} requests unanswered after {now - self.started:.0f} s"
                for each in self.streams:
                    self._disconnect(each)
                break
            for fd, event in self.epoll.poll(1.0):
                stream = self.by_fd.get(fd)
                if stream is None:
                    continue
                if event & select.EPOLLOUT:
                    self._flush(stream)
                if event & ~select.EPOLLOUT:
                    self._receive(stream)
        result.wall = time.perf_counter() - self.started
        result.client_cpu = time.process_time() - cpu
        return result

    def _next(self, stream: _Stream) -> None:
        result, now = self._result, time.perf_counter()
        if result.asked >= self.count or (now - self.started > self.limit and result.asked >= self.at_least):
            return
        if stream.sock is None:
            sock = socket.create_connection(("127.0.0.1", self.port), timeout=10)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
            stream.sock, stream.fd = sock, sock.fileno()
            self.by_fd[stream.fd] = stream
            self.epoll.register(stream.fd, select.EPOLLIN)
        stream.request = result.asked
        result.asked += 1
        self.busy += 1
        stream.kept = [] if not result.sample and stream.request < len(self.streams) else None
        stream.begin(time.perf_counter())
        stream.out = self.requests[stream.request % len(self.requests)]
        self._flush(stream)

    def _flush(self, stream: _Stream) -> None:
        assert stream.sock is not None
        try:
            sent = stream.sock.send(stream.out)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._fail(stream, str(error))
            return
        before, stream.out = stream.out, stream.out[sent:]
        if stream.out:
            self.epoll.modify(stream.fd, select.EPOLLIN | select.EPOLLOUT)
        elif sent < len(before) or before is not self.requests[stream.request % len(self.requests)]:
            self.epoll.modify(stream.fd, select.EPOLLIN)

    def _receive(self, stream: _Stream) -> None:
        assert stream.sock is not None
        try:
            data = stream.sock.recv(262144)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(stream, str(error))
            return
        if not data:
            self._fail(stream, "the connection was closed in the middle of a reply")
            return
        result = self._result
        result.bytes += len(data)
        if stream.kept is not None:
            stream.kept.append(data)
        if stream.head is not None:
            data = stream.head + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                stream.head = data
                return
            head, data = data[:end].lower(), data[end + 2 :]  # the line end stays, as before every chunk
            stream.head = None
            if b" 200 " not in head[:16]:
                self._fail(stream, (head[:60] + data[:200]).decode("utf-8", "replace"))
                return
            at = head.find(b"content-length:")
            if at >= 0:
                stream.left = int(head[at + 15 :].split(b"\r", 1)[0]) + 2
        if stream.first and TOKEN.search(data):
            stream.first = False
            result.ttft.append(time.perf_counter() - stream.began)
        tail = stream.tail
        seen = tail + data
        # What straddles two reads is found with the end of the last one; what is in it is not counted twice.
        stream.events += seen.count(EVENT) - tail.count(EVENT)
        if stream.left >= 0:
            stream.left -= len(data)
            done = stream.left <= 0
        else:
            done = seen.endswith(END)
        stream.tail = seen[-6:]
        if done:
            self._done(stream)

    def _done(self, stream: _Stream) -> None:
        result = self._result
        result.whole += 1
        result.events += stream.events
        if stream.kept is not None and not result.sample:
            result.sample = b"".join(stream.kept)
        self.busy -= 1
        self._next(stream)

    def _fail(self, stream: _Stream, why: str) -> None:
        self._result.failed += 1
        self._result.failure = self._result.failure or why
        self.busy -= 1
        self._disconnect(stream)
        if self._result.failed < 100:
            self._next(stream)

    def _disconnect(self, stream: _Stream) -> None:
        if stream.sock is not None:
            self.by_fd.pop(stream.fd, None)
            self.epoll.unregister(stream.fd)
            stream.sock.close()
            stream.sock = None
