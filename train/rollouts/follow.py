"""Finds rollouts as they finish, in a tree that grows, without reading the whole tree again.

`result.json` is written last and atomically, so a rollout that has it is finished. A folder is listed again only when
it changed, and of known rollouts only the unfinished ones are checked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from capture.journal.layout import RESULT, SUMMARY, TRIAL_PREFIX, JobDir
from train.rollouts.job_state import JobState, combined_state, job_state
from train.rollouts.rollouts import DEPTH, JOB_PARTS, Warn, is_rollout, read_result

#: A folder that changed less than this (seconds) before it was listed is listed again: file times are coarse.
COARSE = 2.0
#: Every folder is listed again after this time (seconds), for disks that do not update the times of folders.
DISTRUST = 30.0


@dataclass(frozen=True, slots=True, order=True)
class Finished:
    """A finished rollout: when (`result.json`'s time, ns), where it is, and the job's folder."""

    at: int
    path: str
    job: str


@dataclass(slots=True)
class _Level:
    """A folder above rollouts."""

    depth: int
    changed: int = -1
    listed: float = 0.0
    known: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Job:
    had_lock: bool = False
    state: JobState | None = None
    doubt: bool = False


class Tree:
    """The rollouts and jobs at or below `root`, which need not exist yet."""

    def __init__(self, root: Path, warn: Warn) -> None:
        self.root = root
        self._warn = warn
        self._levels: dict[str, _Level] = {str(root): _Level(DEPTH)}
        self._unfinished: dict[str, str] = {}  # rollout -> the folder above it
        self._jobs: dict[str, _Job] = {}
        self._found: list[Finished] = []

    def poll(self) -> tuple[JobState, list[Finished]]:
        """The state of all jobs, and the rollouts that finished since the last poll, in the order they finished.

        When the state is over, the list is complete.
        """
        state = self._state()
        known = len(self._jobs)
        self._scan()
        if len(self._jobs) > known:  # the state was taken without them, and the list must be complete for it
            state = self._state()
            self._scan()
        found, self._found = sorted(self._found), []
        return state, found

    @property
    def jobs(self) -> list[Path]:
        return [Path(path) for path in self._jobs]

    def missing_trials(self) -> Iterator[str]:
        """A sentence for each run of which not every trial, a job of its own, is below the root."""
        here: dict[Path, list[Path]] = {}
        for job in self.jobs:
            if job.parent.name.startswith(TRIAL_PREFIX) and job.parent != self.root:
                here.setdefault(job.parent.parent / job.name, []).append(job)
        for jobs in here.values():
            trials = (read_result(JobDir(jobs[0]).evaluation) or {}).get("trials")
            if isinstance(trials, int) and trials > len(jobs):
                yield f"{jobs[0].name} was run in {trials} trials, and {len(jobs)} of them are in {self.root}"

    def _state(self) -> JobState:
        if not self._jobs:
            what = "no rollout and no job in" if self.root.is_dir() else "no such folder yet:"
            return JobState("waiting", f"waiting for the job: {what} {self.root}")
        return combined_state(self._job_state(Path(path), job) for path, job in self._jobs.items())

    def _job_state(self, path: Path, job: _Job) -> JobState:
        if job.state is not None:
            return job.state
        state = job_state(path, had_lock=job.had_lock)
        job.had_lock = job.had_lock or state.lock is not None
        if state.kind == "stopped" and state.lock is None and not job.doubt and not (path / SUMMARY).exists():
            job.doubt = True  # another process may be taking over the lock: check once more
            return JobState("running", state.detail)
        job.doubt = False
        if state.over:
            job.state = state
        return state

    def _scan(self) -> None:
        waiting = list(self._levels)
        while waiting:
            path = waiting.pop()
            level = self._levels.get(path)
            if level is None:  # it is inside a folder that turned out to be a rollout
                continue
            children = self._changed_children(path, level)
            if children is not None:
                waiting += self._take(path, level, children)
        for path in list(self._unfinished):
            at = _finished_at(path)
            if at is not None:
                above = self._unfinished.pop(path)
                self._jobs.setdefault(above, _Job())
                self._found.append(Finished(at, path, above))

    def _changed_children(self, path: str, level: _Level) -> dict[str, bool] | None:
        """The new names, each with whether it is a folder; None when nothing was added since the last listing."""
        now, changed = time.time(), level.changed
        try:
            changed = os.stat(path).st_mtime_ns  # noqa: PTH116 - no object a stat
            settled = level.listed - changed / 1e9 > COARSE
            if changed == level.changed and settled and now - level.listed < DISTRUST:
                return None
            names: dict[str, bool] = {}
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.name not in level.known:
                        names[entry.name] = entry.is_dir(follow_symlinks=False)
                        if not names[entry.name] and entry.is_symlink() and entry.is_dir():
                            self._warn(f"skipping {entry.path}: it is a link to a folder; give that folder itself")
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"skipping {path}: {error.strerror}")
            level.listed = now
            return None
        level.changed, level.listed = changed, now
        return names

    def _take(self, path: str, level: _Level, children: dict[str, bool]) -> list[str]:
        """Sorts the new children of a folder into rollouts and further levels; returns the levels."""
        level.known.update(children)
        if is_rollout(level.known):
            self._is_rollout(path, alone=level.known == {"trajectory"})
            return []
        if JOB_PARTS & children.keys() or (path == str(self.root) and SUMMARY in children and len(children) == 1):
            self._jobs.setdefault(path, _Job())
        further = []
        for name, is_folder in children.items():
            if not is_folder:
                continue
            child = os.path.join(path, name)  # noqa: PTH118 - a hundred thousand of them
            at = _finished_at(child)
            if at is not None:
                self._jobs.setdefault(path, _Job())
                self._found.append(Finished(at, child, path))
            elif level.depth > 0:
                self._levels[child] = _Level(level.depth - 1)
                further.append(child)
        return further

    def _is_rollout(self, path: str, alone: bool) -> None:
        """`alone`: it has only a log, as the stand-alone proxy writes it, so there is no job to wait for."""
        for inside in [level for level in self._levels if level == path or level.startswith(f"{path}/")]:
            del self._levels[inside]
        above = str(Path(path).resolve().parent) if path == str(self.root) else os.path.dirname(path)  # noqa: PTH120
        self._unfinished[path] = above
        if not alone:
            self._jobs.setdefault(above, _Job())


def _finished_at(folder: str) -> int | None:
    try:
        return os.stat(f"{folder}/{RESULT}").st_mtime_ns  # noqa: PTH116
    except OSError:
        return None
