"""How a job stands: running, finished, stopped, or not begun; told from its lock and its summary alone."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from capture.journal.layout import JobDir
from train.rollouts.rollouts import read_result

Kind = Literal["running", "finished", "stopped", "waiting"]

#: A job without lock and summary that was begun longer ago than this (seconds) ended without a word.
SETTLED = 10.0


@dataclass(frozen=True, slots=True)
class JobState:
    """`kind`, and a few words on it for people. `pid` and `lock` are set where a lock names its process."""

    kind: Kind
    detail: str
    pid: int | None = None
    lock: Path | None = None

    @property
    def over(self) -> bool:
        return self.kind in ("finished", "stopped")


def job_state(folder: Path, *, had_lock: bool = False) -> JobState:
    """BenchFlow's rule: a lock means running, or stopped when its process was one of this host and is gone; no lock and
    a summary mean finished; else it has not begun. A lock from another host counts as running for ever.

    Beyond it: a summary that says `"stopped": true` (the user stopped the job) means stopped, and so does a job whose
    lock was here (`had_lock`) and is gone without a summary.
    """
    job = JobDir(folder)
    held = read_result(job.lock)
    if held is None and job.lock.exists():
        return JobState("running", f"{job.lock} is held; it does not say by whom", lock=job.lock)
    if held is not None:
        return _held(job, held)
    summary = read_result(job.summary)
    if summary is not None:
        if summary.get("stopped") is True:
            return JobState("stopped", "the job was stopped by its user")
        return JobState("finished", "finished")
    if had_lock or _abandoned(job):
        return JobState("stopped", "the job ended without a summary")
    return JobState("waiting", f"waiting for the job: no {job.lock.name} and no {job.summary.name} in {folder}")


def _held(job: JobDir, held: Mapping[str, Any]) -> JobState:
    host, pid = held.get("host"), held.get("pid")
    if not isinstance(pid, int) or isinstance(pid, bool) or pid <= 0:
        return JobState("running", f"{job.lock} is held; it names no process", lock=job.lock)
    if host != socket.gethostname():
        return JobState("running", f"running as process {pid} on host {host}", pid, job.lock)
    if _alive(pid, held.get("started")):
        return JobState("running", f"running as process {pid}", pid, job.lock)
    return JobState("stopped", f"the job's process {pid} is gone (lock {job.lock})", pid, job.lock)


def _alive(pid: int, started: object) -> bool:
    """Whether the process lives. `started`, its start in clock ticks, tells it from a later one of the same number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True  # no /proc here, or it is hidden: the signal reached somebody
    after_name = stat.rpartition(")")[2].split()
    if after_name[0] == "Z":
        return False
    return not isinstance(started, str | int) or isinstance(started, bool) or str(started) in ("0", after_name[19])


def _abandoned(job: JobDir) -> bool:
    try:
        return time.time() - job.evaluation.stat().st_mtime > SETTLED
    except OSError:
        return False


def together(states: Iterable[JobState]) -> JobState:
    """How several jobs stand as one: running while one runs, waiting while one is to begin, else stopped if one was."""
    found = list(states)
    for kind in ("running", "waiting", "stopped"):
        for state in found:
            if state.kind == kind:
                return state
    return found[0] if found else JobState("waiting", "waiting for the job: there is none yet")
