"""What every sandbox can do, whatever it is made of: run commands, talk to one, move files, end everything.

`docker.py` is the real one. `local.py` has the same shape for machines without Docker, and isolates nothing.
"""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

STDOUT, STDERR = 1, 2
OUTPUT_LIMIT = 1 << 20


@dataclass(frozen=True)
class Ran:
    """How a command ended. `exit_code` is None when the time ran out first: the command may still be running."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    #: Bytes of output beyond the limit, thrown away.
    dropped: int = 0

    @property
    def timed_out(self) -> bool:
        return self.exit_code is None

    @property
    def output(self) -> str:
        return (self.stdout + self.stderr).decode(errors="replace")

    def tail(self, characters: int = 300) -> str:
        """The last words, on one line, for an error's sentence."""
        return " / ".join(line.strip() for line in self.output.splitlines() if line.strip())[-characters:]


class Pipe(Protocol):
    """The standard streams of a running command."""

    def read(self, timeout: float) -> tuple[int, bytes] | None:
        """`(STDOUT | STDERR, bytes)`, None at the end. Raises `TimeoutError` when nothing came in `timeout` seconds."""

    def write(self, data: bytes) -> None:
        """Raises `OSError` when the command no longer listens."""

    def close_stdin(self) -> None: ...

    def close(self) -> None: ...

    def exit_code(self) -> int:
        """Of a command whose `read` returned None; -1 when nobody knows."""


class Sandbox(Protocol):
    """One sandbox. Commands are argument lists; `env` is added to the sandbox's own and is on no command line."""

    workdir: str
    #: False for a box that only looks like a sandbox.
    isolates: bool

    def open(
        self, argv: Sequence[str], *, user: str = "root", env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> Pipe: ...

    def put(self, archive: bytes, to: str) -> None:
        """Unpacks a tar archive into the folder `to`, owners and modes as it says."""

    def get(self, path: str, limit: int) -> bytes | None:
        """A tar archive of `path`, None when it is missing or a link. Raises `AgentError` over `limit` bytes."""

    def end_processes(self) -> None:
        """Ends every process in the sandbox and proves it; files stay. Raises `DockerError` without proof."""

    def cause_of_death(self, exit_code: int | None) -> tuple[str, str] | None:
        """`(category, words)` when the sandbox's own limits ended a command, None otherwise."""

    def remove(self) -> None: ...


def run(
    sandbox: Sandbox,
    argv: Sequence[str],
    *,
    user: str = "root",
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdin: bytes = b"",
    timeout: float = 60.0,
    limit: int = OUTPUT_LIMIT,
    on_line: Callable[[bytes], None] | None = None,
) -> Ran:
    """Runs a command to its end, or until `timeout` seconds are over. Each line of standard output also goes to
    `on_line`; of each stream the first half of `limit` bytes and the last half are kept."""
    pipe = sandbox.open(argv, user=user, env=env, cwd=cwd)
    kept = {STDOUT: Bounded(limit), STDERR: Bounded(limit)}
    lines = Lines(on_line) if on_line else None
    deadline = time.monotonic() + timeout
    try:
        if stdin:
            pipe.write(stdin)
        pipe.close_stdin()
        while True:
            try:
                piece = pipe.read(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                code: int | None = None
                break
            if piece is None:
                code = pipe.exit_code()
                break
            kept[piece[0]].add(piece[1])
            if lines and piece[0] == STDOUT:
                lines.feed(piece[1])
    finally:
        pipe.close()
    if lines:
        lines.flush()
    return Ran(code, kept[STDOUT].value(), kept[STDERR].value(), kept[STDOUT].dropped + kept[STDERR].dropped)


class Bounded:
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
        over = len(self._tail) - self._half
        if over > self._half or (over > 0 and len(data) > self._half):  # cut now and then, not for every piece
            del self._tail[:over]
            self.dropped += over

    def value(self) -> bytes:
        over = len(self._tail) - self._half
        if over > 0:
            del self._tail[:over]
            self.dropped += over
        if not self.dropped:
            return bytes(self._head + self._tail)
        return bytes(self._head) + b"\n[... %d bytes left out ...]\n" % self.dropped + bytes(self._tail)


class Lines:
    """Splits a stream into lines, each at most `longest` bytes; a longer one is passed by whole and counted."""

    def __init__(self, on_line: Callable[[bytes], None], longest: int = 32 << 20) -> None:
        self._on_line = on_line
        self._longest = longest
        self._parts: list[bytes] = []
        self._size = 0
        self.too_long = 0

    def feed(self, data: bytes) -> None:
        *whole, rest = data.split(b"\n")
        for line in whole:
            self._end(line)
        if rest:
            self._keep(rest)

    def flush(self) -> None:
        if self._size:
            self._end(b"")

    def _keep(self, part: bytes) -> None:
        self._size += len(part)
        if self._size <= self._longest:
            self._parts.append(part)
        else:
            self._parts.clear()

    def _end(self, last: bytes) -> None:
        self._keep(last)
        if self._size > self._longest:
            self.too_long += 1
        else:
            self._on_line(b"".join(self._parts).rstrip(b"\r"))
        self._parts, self._size = [], 0


def folder_archive(folder: Path, *, mode_of: Callable[[Path], int] | None = None) -> bytes:
    """A tar of a folder's plain files, everything owned by root. `.sh` files can be run."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_dir():
                _add(tar, name, None, 0o755, 0, 0)
            elif path.is_file() and not path.is_symlink():
                runnable = path.suffix == ".sh" or path.stat().st_mode & 0o111
                _add(tar, name, path.read_bytes(), 0o755 if runnable else 0o644, 0, 0)
    return buffer.getvalue()


def file_archive(name: str, data: bytes, *, mode: int = 0o644, uid: int = 0, gid: int = 0) -> bytes:
    """A tar of one file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        _add(tar, name, data, mode, uid, gid)
    return buffer.getvalue()


def plain_files(archive: bytes) -> dict[str, bytes]:
    """Regular files of a tar by path below its top folder; links, devices and paths that climb out are left out."""
    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            _, _, name = member.name.partition("/")
            if not member.isreg() or not name or ".." in name.split("/") or name.startswith("/"):
                continue
            handle = tar.extractfile(member)
            if handle is not None:
                files[name] = handle.read()
    return files


def _add(tar: tarfile.TarFile, name: str, data: bytes | None, mode: int, uid: int, gid: int) -> None:
    info = tarfile.TarInfo(name)
    info.mode, info.uid, info.gid, info.mtime = mode, uid, gid, int(time.time())
    if data is None:
        info.type = tarfile.DIRTYPE
        tar.addfile(info)
    else:
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
