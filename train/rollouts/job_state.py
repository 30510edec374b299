"""The state of a job: running, finished, stopped or not started, from its lock and its summary alone."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from capture.journal.layout import JobDir
from capture.lock import Holder, holder
from train.rollouts.rollouts import read_result

Kind = Literal["running", "finished", "stopped", "waiting"]

#: A job without lock and summary that started longer ago than this (seconds) ended without writing either.
SETTLED = 10.0


@dataclass(frozen=True, slots=True)
class JobState:
    """`kind`, and a sentence about it for people. `pid` and `lock` are set where a lock names its process."""

    kind: Kind
    detail: str
    pid: int | None = None
    lock: Path | None = None

    @property
    def over(self) -> bool:
        return self.kind in ("finished", "stopped")


def job_state(folder: Path, *, had_lock: bool = False) -> JobState:
    """The state of the job in `folder`, by BenchFlow's rule.

    With a lock it is running, or stopped where the lock names a process of this host that is gone. Without a lock it is
    finished if it has a summary, otherwise it has not started. A lock from another host always counts as running.
    Beyond that rule, a summary with `"stopped": true` (the user stopped the job) means stopped, and so does a lock that
    was there (`had_lock`) and is gone without a summary.
    """
    job = JobDir(folder)
    lock_holder = holder(job.lock)
    if lock_holder is not None:
        return _locked(job.lock, lock_holder)
    summary = read_result(job.summary)
    if summary is not None:
        if summary.get("stopped") is True:
            return JobState("stopped", "the job was stopped by its user")
        return JobState("finished", "finished")
    if had_lock or _abandoned(job):
        return JobState("stopped", "the job ended without a summary")
    return JobState("waiting", f"waiting for the job: no {job.lock.name} and no {job.summary.name} in {folder}")


def _locked(lock: Path, by: Holder) -> JobState:
    if not by.alive and by.pid is None:
        return JobState("stopped", f"{lock} is old and names no process", lock=lock)
    if not by.alive:
        return JobState("stopped", f"the job's {by} is gone (lock {lock})", by.pid, lock)
    if by.pid is None:
        return JobState("running", f"{lock} is held by {by}", lock=lock)
    return JobState("running", f"running as {by}", by.pid, lock)


def _abandoned(job: JobDir) -> bool:
    try:
        return time.time() - job.evaluation.stat().st_mtime > SETTLED
    except OSError:
        return False


def combined_state(states: Iterable[JobState]) -> JobState:
    """The state of several jobs as one: running if any runs, else waiting if any has not started, else stopped if any
    was stopped.
    """
    found = list(states)
    for kind in ("running", "waiting", "stopped"):
        for state in found:
            if state.kind == kind:
                return state
    return found[0] if found else JobState("waiting", "waiting for the job: there is none yet")
