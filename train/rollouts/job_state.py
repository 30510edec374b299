"""How a job stands: running, finished, stopped, or not begun; told from its lock and its summary alone."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from capture.journal.layout import JobDir
from train.rollouts.rollouts import Rollout, read_result

Kind = Literal["running", "finished", "stopped", "waiting"]

#: Failures that BenchFlow does not try again, where `evaluation.json` lists none.
NOT_RETRIED = frozenset({"timeout", "provider_auth", "provider_rate_limit", "provider_rejected"})
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


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`config.retry` of a job's `evaluation.json`: which failed rollouts its runner starts again."""

    max_retries: int = 0
    excluded: frozenset[str] = NOT_RETRIED
    #: None: every category that is not excluded.
    included: frozenset[str] | None = None

    @classmethod
    def read(cls, folder: Path) -> RetryPolicy:
        """The job's policy; one that retries nothing where the job does not say."""
        config = (read_result(JobDir(folder).evaluation) or {}).get("config")
        retry = config.get("retry") if isinstance(config, dict) else None
        if not isinstance(retry, dict):
            return cls()
        most = retry.get("max_retries")
        excluded, included = _words(retry.get("exclude_categories")), _words(retry.get("retry_categories"))
        return cls(
            max_retries=most if isinstance(most, int) and not isinstance(most, bool) else 0,
            excluded=NOT_RETRIED if excluded is None else excluded,
            included=included,
        )

    def would_retry(self, rollout: Rollout, attempt: int) -> bool:
        """Whether a rollout that was attempt number `attempt` (the first is 0) is tried again."""
        if rollout.scored or attempt >= self.max_retries:
            return False
        told = {rollout.error_category, rollout.verifier_error_category} - {None}
        if rollout.error is None and rollout.verifier_error is None:
            return False
        if told & self.excluded:
            return False
        return self.included is None or bool(told & self.included)


def _words(value: object) -> frozenset[str] | None:
    return frozenset(str(one) for one in value) if isinstance(value, list) else None


@dataclass(slots=True)
class Attempts:
    """Which rollout of a job stands in for which failed one, as they finish."""

    policy: RetryPolicy
    _failed: dict[str, Rollout] = field(default_factory=dict)  # by folder name: unscored, not replaced so far
    _awaiting: dict[tuple[str | None, ...], list[Rollout]] = field(default_factory=dict)  # by trial, oldest first
    _number: dict[str, int] = field(default_factory=dict)  # by folder name; the first attempt is 0

    def add(self, rollout: Rollout) -> Rollout | None:
        """Takes a rollout that finished; returns the failed one that it replaces, if it does.

        The runner's own word (`retry_of`) decides where it gives one; else the oldest failed rollout of the same task,
        agent and model that its policy tries again and that had ended before this one began.
        """
        before = self._replaced(rollout)
        number = 0
        if before is not None:
            del self._failed[before.path.name]
            number = self._number.pop(before.path.name) + 1
            waiting = self._awaiting.get(_trial(before), [])
            if before in waiting:
                waiting.remove(before)
        if not rollout.scored:
            self._failed[rollout.path.name] = rollout
            self._number[rollout.path.name] = number
            if self.policy.would_retry(rollout, number):
                self._awaiting.setdefault(_trial(rollout), []).append(rollout)
        return before

    def awaits_retry(self, rollout: Rollout) -> bool:
        """Whether a further attempt is to come for this failed rollout, as long as its job goes on."""
        return rollout in self._awaiting.get(_trial(rollout), ())

    def _replaced(self, rollout: Rollout) -> Rollout | None:
        if rollout.says_retry_of:
            return self._failed.get(rollout.retry_of or "")
        for before in self._awaiting.get(_trial(rollout), ()):
            if before.finished_at is None or rollout.started_at is None or rollout.started_at >= before.finished_at:
                return before
        return None


def _trial(rollout: Rollout) -> tuple[str | None, ...]:
    """What the attempts of one trial share; in BenchFlow's RL groups, `<task>__<group>-rNN-aK`, all but `-aK`."""
    place = _ATTEMPT.match(rollout.path.name)
    return (rollout.task, rollout.agent, rollout.model, place[1] if place else None)


_ATTEMPT = re.compile(r"(.*-r\d+)-a\d+$")


def together(states: Iterable[JobState]) -> JobState:
    """How several jobs stand as one: running while one runs, waiting while one is to begin, else stopped if one was."""
    found = list(states)
    for kind in ("running", "waiting", "stopped"):
        for state in found:
            if state.kind == kind:
                return state
    return found[0] if found else JobState("waiting", "waiting for the job: there is none yet")
