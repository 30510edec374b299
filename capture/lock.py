"""The lock of a job folder: a file that names the process that holds it, `{"pid", "host", "started"}`.

The file is written beside its place and linked into it, so a lock of ours is never seen half written. BenchFlow writes
its lock, `{"pid", "host"}`, in two steps: an empty or torn one is held as well, until it is old.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from capture import json
from capture.errors import LockError

#: Seconds after which an empty or torn lock counts as left behind by a crash.
TORN_IS_STALE_AFTER = 60.0
#: What `link` fails with on file systems without hard links.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock. `pid` is None where the lock names no process.

    `alive` is False only where the process is known to be gone: one of another host counts as alive.
    """

    pid: int | None
    host: str | None
    alive: bool

    def __str__(self) -> str:
        if self.pid is None:
            return "a process that it does not name"
        return f"process {self.pid}" if self.host == hostname() else f"process {self.pid} on host {self.host}"


class LockHeld(LockError):
    """The lock at `path` is held by `holder`, which is alive as far as can be told from here."""

    def __init__(self, path: Path, holder: Holder) -> None:
        super().__init__(f"{path} is held by {holder}; wait for it, or delete the file if that process is gone")
        self.path = path
        self.holder = holder


def holder(path: Path) -> Holder | None:
    """Who holds the lock at `path`; None where there is no lock."""
    try:
        data, modified = path.read_bytes(), path.stat().st_mtime
    except OSError:
        return None
    lock = json.loads_or_none(data)
    if not isinstance(lock, dict):
        return Holder(None, None, alive=time.time() - modified < TORN_IS_STALE_AFTER)
    pid, host, started = lock.get("pid"), lock.get("host"), lock.get("started")
    host = host if isinstance(host, str) else None
    if type(pid) is not int or pid <= 0:
        return Holder(None, host, alive=True)
    if host != hostname():
        return Holder(pid, host, alive=True)
    return Holder(pid, host, alive=is_running(pid, str(started) if type(started) in (str, int) else None))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock at `path` for the block. Raises `LockHeld`, or `LockError` where the file cannot be written.

    The lock of a process that is gone is replaced.
    """
    mine = _write_beside(path)
    try:
        _take(path, mine)
    finally:
        mine.unlink(missing_ok=True)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _take(path: Path, mine: Path) -> None:
    for _ in range(2):
        if _link(mine, path):
            return
        with _alone(path.parent):  # else two processes replace the same stale lock, one of them the other's new one
            found = holder(path)
            if found is not None and found.alive:
                raise LockHeld(path, found)
            path.unlink(missing_ok=True)
            if _link(mine, path):
                return
    raise LockHeld(path, holder(path) or Holder(None, None, alive=True))


def _write_beside(path: Path) -> Path:
    pid = os.getpid()
    lock = json.dumps({"pid": pid, "host": hostname(), "started": process_start(pid) or ""})
    try:
        fd, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
        with os.fdopen(fd, "wb") as file:
            file.write(lock)
            os.fchmod(fd, 0o644)
            os.fsync(fd)
    except OSError as error:
        raise LockError(f"the folder {path.parent} cannot be written: {error.strerror}") from error
    return Path(name)


def _link(mine: Path, path: Path) -> bool:
    """Puts `mine` in the lock's place; False where there is a lock."""
    try:
        try:
            path.hardlink_to(mine)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with path.open("xb") as file:  # seen empty for a moment, which counts as held
                file.write(mine.read_bytes())
    except FileExistsError:
        return False
    except OSError as error:
        raise LockError(f"the folder {path.parent} cannot be written: {error.strerror}") from error
    return True


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps other processes of this host from replacing a stale lock in `folder` at the same time."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # NFS locks no folder
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def hostname() -> str:
    return os.uname().nodename


def is_running(pid: int, started: str | None) -> bool:
    """Whether the process that began at `started` (of `process_start`) still runs; any of that number where that is
    not known.
    """
    now = process_start(pid)
    if now is None:
        return False
    return not now or started in (None, "", "0", now)  # "0": written where the system did not tell


def process_start(pid: int) -> str | None:
    """When a process began, in clock ticks since boot, "" where the system does not tell; None when it is gone.

    A process that ended and was not collected yet (a zombie) is gone.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "" if _answers_signals(pid) else None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]


def _answers_signals(pid: int) -> bool:
    """Without /proc, or where it hides the processes of others."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
