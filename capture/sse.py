"""Server-Sent Events, decoded as they arrive: bytes in, events out, no socket.

Every event keeps the exact bytes it came in, so that a relay can pass it on untouched. LF, CRLF and CR end a line,
events may be split anywhere and be of any size; the work is linear in the bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_BOM: Final = b"\xef\xbb\xbf"
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
#: A line end and an empty line after it. A CR that a LF follows is one line end, never two.
_EVENT_END: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?!\n))")
_LONGEST_END: Final = 4


@dataclass(slots=True)
class Event:
    """`data` is the joined data lines, None where the event has none (a comment); `event` its name, if any.

    `raw` is the event as it came, its blank line included. `complete` is False for the rest of a stream that ended
    too early.
    """

    data: bytes | None
    event: bytes | None
    raw: bytes
    complete: bool = True


class EventDecoder:
    """Takes the bytes of a stream as they come; returns the events that they complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0
        self._carriage_returns = False
        self._started = False

    def feed(self, data: bytes) -> list[Event]:
        """The events completed by `data`, in order."""
        if not data:
            return []
        if b"\r" in data:
            self._carriage_returns = True
        found: list[Event] = []
        if not self._buffer and not self._carriage_returns:
            used = self._one_line_events(data, found)
            if used == len(data):
                return found
            data = data[used:]
        if self._buffer:
            self._buffer += data
            used = self._split(bytes(self._buffer) if len(self._buffer) < 4096 else self._buffer, found)
            del self._buffer[:used]
        else:
            used = self._split(data, found)
            self._buffer += data[used:] if used else data
        # The buffer holds no end of an event, except one that the next bytes may complete.
        self._searched = max(0, len(self._buffer) - _LONGEST_END)
        return found

    @property
    def pending(self) -> int:
        """Bytes of an event whose end has not come."""
        return len(self._buffer)

    def flush(self) -> list[Event]:
        """The rest when the stream has ended. An event without its blank line is not complete."""
        left = bytes(self._buffer)
        self._buffer.clear()
        self._searched = 0
        if not left.strip(b"\r\n"):
            return []
        # A CR that ended the stream may have ended its last event: `feed` had to wait for a LF to follow.
        return [self._event(left, left.rstrip(b"\r\n"), complete=left.endswith((b"\r\r", b"\n\r")))]

    def _one_line_events(self, data: bytes, events: list[Event]) -> int:
        """Adds those with which `data` begins, ended by LF alone, as engines send them; returns where they end."""
        start = 0
        while data.startswith(b"data: ", start):
            end = data.find(b"\n", start)
            if end < 0 or not data.startswith(b"\n", end + 1):
                break
            events.append(Event(data[start + 6 : end], None, data[start : end + 2]))
            start = end + 2
            self._started = True
        return start

    def _split(self, data: bytes | bytearray, events: list[Event]) -> int:
        """Adds the events of `data`; returns where they end."""
        start, search = 0, self._searched
        while True:
            end = self._end(data, search)
            if end < 0:
                return start
            raw = bytes(data[start:end])
            events.append(self._event(raw, raw.rstrip(b"\r\n"), complete=True))
            start = search = end

    def _end(self, data: bytes | bytearray, search: int) -> int:
        """Where the first event from `search` on ends, or -1."""
        if not self._carriage_returns:
            # Looking for one byte is twenty times faster than for two, and most events are one long line.
            first = data.find(b"\n", search)
            at = data.find(b"\n\n", first) if first >= 0 else -1
            return at + 2 if at >= 0 else -1
        # A CR that ends the data may be half of a CRLF: it is looked at again with what follows.
        bound = len(data) - 1 if data.endswith(b"\r") else len(data)
        found = _EVENT_END.search(data, search, bound)
        return -1 if found is None else found.end()

    def _event(self, raw: bytes, block: bytes, *, complete: bool) -> Event:
        if not self._started:
            self._started = True
            block = block.removeprefix(_BOM)
        if block.startswith(b"data: ") and b"\n" not in block and b"\r" not in block:
            return Event(block[6:], None, raw, complete)
        return _parsed(raw, block, complete)


def _parsed(raw: bytes, block: bytes, complete: bool) -> Event:
    data: list[bytes] = []
    name: bytes | None = None
    for line in _LINE_END.split(block):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return Event(b"\n".join(data) if data else None, name, raw, complete)
