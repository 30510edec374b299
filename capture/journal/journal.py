"""The append-only journal of calls, `llm_trajectory.jsonl`: written one whole line at a time, read lazily.

A line is one call. The writer never changes what it wrote; a line torn by a crash stays, and the reader reports it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from capture.errors import FileFormatError, JournalClosed, JournalError
from capture.journal.call import Call, Known

#: The number of a call in a line's metadata, or a field of the agent's own JSON: the parsed line tells which.
_NUMBER = re.compile(rb'"call": ?(\d{1,18})(?!\d)')
#: Calls without a line that are named.
_NAMED_GAPS = 5


class JournalWriter:
    """Appends whole lines to one journal, one `write` per line; a second writer of the same file is refused.

    With `fsync`, `append` returns when the line is on the disk; without, when the operating system has it, which
    survives a `kill -9` but not a power cut.
    """

    def __init__(self, path: Path, *, fsync: bool = False, left: tuple[int, int] | None = None) -> None:
        """Opens, and creates where needed, the journal. Raises `JournalError`.

        `left` is `(size in bytes, number of the next call)` as its last writer left it, where that is known. If the
        file still has this size, it is not searched for the number, which blocks for half a second per gigabyte.
        """
        self.path = path
        self.fsync = fsync
        self.lines = 0
        #: One more than the highest call number in the file: numbering continues after a restart.
        self.next_call = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        except OSError as error:
            remedy = "give a folder that can be written"
            if error.errno in (errno.EMFILE, errno.ENFILE):
                remedy = "an open session holds one, a call two more: raise the limit (ulimit -n)"
            raise JournalError(f"cannot open the journal {path}: {error.strerror}; {remedy}") from error
        opened = os.fstat(self._fd)
        if not stat.S_ISREG(opened.st_mode):
            os.close(self._fd)
            raise JournalError(
                f"cannot open the journal {path}: it is a pipe, a device or a link to one, which keeps no lines; "
                "remove it, or write elsewhere"
            )
        try:
            self._file = _identity(opened)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._begin_on_a_fresh_line(left)
        except BlockingIOError as error:
            os.close(self._fd)
            raise JournalError(
                f"another process writes the journal {path}; a journal has one writer: end that one, or write elsewhere"
            ) from error
        except OSError as error:
            os.close(self._fd)
            raise JournalError(f"cannot use the journal {path}: {error.strerror}") from error

    def _begin_on_a_fresh_line(self, left: tuple[int, int] | None) -> None:
        """After a crash the last line may lack its line end: the next line must not be appended to it."""
        size = os.fstat(self._fd).st_size
        if left is not None and left[0] == size:
            self.next_call = left[1]
        elif size:
            with mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ) as written:
                self.next_call = 1 + _highest_number(written)
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def append(self, line: bytes) -> None:
        """Writes `line` (without a newline in it) and a newline. Raises `JournalError`; the file is then as before.

        Blocks while the disk works: call it off the event loop for long lines.
        """
        if self._fd < 0:
            raise JournalClosed(f"the journal {self.path} is sealed")
        data = line + b"\n"
        written = 0
        try:
            while written < len(data):  # more than once after a signal, or where a disk is nearly full
                written += os.write(self._fd, data[written:] if written else data)
            if self.fsync:
                os.fdatasync(self._fd)
        except OSError as error:
            with suppress(OSError):  # a part of a line is no record: take it back, we are the only writer
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise JournalError(f"cannot write the journal {self.path}: {error.strerror}") from error
        if not self._in_place():
            raise JournalError(
                f"the journal {self.path} was deleted or moved while it was being written; what is recorded from now "
                "on is not at its path"
            )
        self.lines += 1

    def _in_place(self) -> bool:
        """Whether the file that is being written is the one that a reader finds at the path."""
        try:
            return _identity(os.stat(self.path)) == self._file  # noqa: PTH116 (a call of the hot path)
        except OSError:
            return False

    def sync(self) -> None:
        """Returns when what was written is on the disk, or cannot be. Blocks while the disk works."""
        with suppress(OSError):
            os.fsync(self._fd)

    def close(self, *, synced: bool = False) -> None:
        """Seals the journal: synced to disk (unless it is), closed; further lines are refused. May be called twice."""
        if self._fd < 0:
            return
        if not synced:
            self.sync()
        os.close(self._fd)
        self._fd = -1


def _highest_number(written: mmap.mmap) -> int:
    """The highest number of a call in a journal; -1 where there is none.

    Agents' own JSON stands in the lines as they sent it, so a number counts only where the parsed line has it as its
    own. The likeliest are looked at first: of a journal that nobody tampered with, one line is parsed.
    """
    candidates = sorted(((int(found[1]), found.start()) for found in _NUMBER.finditer(written)), reverse=True)
    highest = -1
    for number, at in candidates:
        if number <= highest:
            break
        start, end = written.rfind(b"\n", 0, at) + 1, written.find(b"\n", at)
        with suppress(FileFormatError):  # a torn line is no call, and has no number
            own = Call(0, written[start : end if end >= 0 else len(written)]).own_number
            highest = max(highest, -1 if own is None else own)
    return highest


def _identity(file: os.stat_result) -> tuple[int, int]:
    """Device and inode: no other file has them while this one is open, deleted or not."""
    return file.st_dev, file.st_ino


@dataclass(frozen=True, slots=True)
class Problem:
    """A line of a journal that is no call: its 0-based number, and a sentence that says what is wrong."""

    line: int
    what: str


class JournalReader:
    """Iterates the calls of a journal in file order, with one line in memory at a time.

    After the iteration a line that is no JSON object, and so left out, is in `problems`; calls whose line is missing
    between others are in `gaps`.
    Raises `JournalError` when the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[Problem] = []
        #: A sentence on calls that have no line, where their numbers are missing between others; else None.
        self.gaps: str | None = None
        self._known = Known()

    def __iter__(self) -> Iterator[Call]:
        self.problems = []
        numbers: list[int] = []
        offset = 0
        try:
            with self.path.open("rb", buffering=1 << 20) as file:
                for number, raw in enumerate(file):
                    if not raw.isspace():
                        call = self._call(number, raw, offset)
                        if call is not None:
                            if call.own_number is not None:
                                numbers.append(call.own_number)
                            yield call
                    offset += len(raw)
                    if not raw.endswith(b"\n"):
                        break  # the end as it was when we came there; a writer may be going on behind it
        except OSError as error:
            raise JournalError(f"cannot read the journal {self.path}: {error.strerror}") from error
        self.gaps = _gaps(numbers, len(self.problems))

    def at(self, line: int, offset: int) -> Call:
        """The call that begins `offset` bytes into the file, again. Raises `JournalError`, `FileFormatError`."""
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                return Call(line, file.readline(), offset, self._known)
        except OSError as error:
            raise JournalError(f"cannot read the journal {self.path}: {error.strerror}") from error

    def _call(self, number: int, raw: bytes, offset: int) -> Call | None:
        try:
            return Call(number, raw, offset, self._known)
        except FileFormatError as error:
            torn = not raw.endswith(b"\n")
            what = "the last line was cut off while it was being written" if torn else str(error)
            self.problems.append(Problem(number, f"line {number + 1}: {what}; it is left out"))
            return None


def purpose_of(journal: Path) -> str:
    """What its calls are for, `train` or `eval`: all of them say the same. Raises `JournalError`."""
    first = next(iter(JournalReader(journal)), None)
    return "eval" if first is not None and first.metadata.get("purpose") == "eval" else "train"


def _gaps(numbers: Sequence[int], unreadable: int) -> str | None:
    """What is said where numbers of calls are missing between others: their lines could not be written (a full disk).

    `unreadable` lines may be those of as many of them. A journal with the same number twice was written by two proxies:
    its numbers say nothing.
    """
    known = set(numbers)
    missing = max(known, default=-1) + 1 - len(known)
    if len(known) < len(numbers) or missing <= unreadable:
        return None
    first = [str(number) for number in islice((n for n in count() if n not in known), min(missing, _NAMED_GAPS))]
    calls = f"{missing} calls ({', '.join(first)}{', ...' if missing > len(first) else ''}) have"
    if missing == 1:
        calls = f"call {first[0]} has"
    return f"{calls} no line: still running, or it could not be written (the proxy's log says why)"
