"""Bounded collectors for a command's output: the head and tail of a stream, and its lines."""

from __future__ import annotations

from collections.abc import Callable


class HeadTail:
    """Keeps the first and the last half of `limit` bytes of what is added."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.dropped = 0

    def add(self, data: bytes) -> None:
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room < len(data) else b""
        excess = len(self._tail) - self._half
        if excess > self._half or (excess > 0 and len(data) > self._half):  # cut now and then, not for every piece
            del self._tail[:excess]
            self.dropped += excess

    def value(self) -> bytes:
        excess = len(self._tail) - self._half
        if excess > 0:
            del self._tail[:excess]
            self.dropped += excess
        if not self.dropped:
            return bytes(self._head + self._tail)
        return bytes(self._head) + b"\n[... %d bytes left out ...]\n" % self.dropped + bytes(self._tail)


class LineSplitter:
    """Splits a stream into lines of at most `max_length` bytes; longer lines are skipped and counted in `too_long`."""

    def __init__(self, on_line: Callable[[bytes], None], max_length: int = 32 << 20) -> None:
        self._on_line = on_line
        self._max_length = max_length
        self._parts: list[bytes] = []
        self._size = 0
        self.too_long = 0

    def feed(self, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._end_line(line)
        if rest:
            self._add(rest)

    def flush(self) -> None:
        if self._size:
            self._end_line(b"")

    def _add(self, part: bytes) -> None:
        self._size += len(part)
        if self._size <= self._max_length:
            self._parts.append(part)
        else:
            self._parts.clear()

    def _end_line(self, last: bytes) -> None:
        self._add(last)
        if self._size > self._max_length:
            self.too_long += 1
        else:
            self._on_line(b"".join(self._parts).rstrip(b"\r"))
        self._parts, self._size = [], 0
