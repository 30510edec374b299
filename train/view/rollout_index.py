"""A folder's rollouts as rows: at once from their `result.json`; their logs are read in the background."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from capture.errors import CaptureError
from capture.sequences.sequences import TRAINABLE_KINDS
from train.errors import TrainError
from train.groups.groups import GroupOptions
from train.groups.withhold import MemberLog, member_log
from train.rollouts.job_state import JobState, combined_state, job_state
from train.rollouts.rollouts import Rollout, find_rollouts
from train.view.groups import group_rows
from train.view.rollout_cache import Reading, Readings, stamp

#: Seconds between looks at the folder, and how many times as long as a look takes to wait at least.
PAUSE, SHARE = 1.5, 20
#: A page that asked this long ago (seconds) is closed: nobody waits for news.
ASKED = 15.0
#: Logs are read when the first page has its rows, and had this long (seconds) to draw them.
DRAWN, NOBODY = 0.4, 3.0
NOTES = 100
#: Calls of which a row tells how many tokens they sampled.
CALLS = 400


@dataclass(slots=True)
class Entry:
    """A rollout, and the summary of its log when it was last read."""

    rollout: Rollout
    seen: tuple[int, int, bool]
    read: tuple[int, int, bool] | None = None
    log: MemberLog | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    #: What its row says of its group.
    group: dict[str, Any] = field(default_factory=dict)
    gone: bool = False
    version: int = 0

    @property
    def fresh(self) -> bool:
        return self.read == self.seen


class Index:
    """The rows of everything at `root`. `start` begins the looking and reading, on a thread that ends with us."""

    def __init__(self, root: Path, readings: Readings, grouping: GroupOptions) -> None:
        self.root, self.readings, self.grouping = root, readings, grouping
        self.version = 0
        self.notes: list[str] = []
        self.state = JobState("waiting", "looking for rollouts")
        self.scanned = threading.Event()
        self._entries: dict[str, Entry] = {}
        self._unread: deque[Entry] = deque()
        self._had_lock: set[Path] = set()
        self._lock = threading.Lock()
        self._asked = time.monotonic()
        self._answered = threading.Event()
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="view-index", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def entry(self, path: str) -> Entry | None:
        with self._lock:
            return self._entries.get(path)

    def entries(self) -> list[Entry]:
        with self._lock:
            return list(self._entries.values())

    def job(self, since: int = 0) -> dict[str, Any]:
        """What the first view shows; only the rows that changed after version `since`."""
        self._asked = time.monotonic()
        entries = self.entries()
        grouped = group_rows(
            [(entry.rollout, entry.log if entry.fresh else None) for entry in entries if not entry.gone],
            self.grouping,
            self.state,
        )
        with self._lock:
            for entry in entries:
                group = grouped.of.get(entry.rollout.rollout_path, {})
                if group != entry.group:
                    entry.group = group
                    self._changed(entry)
            version, notes, state = self.version, list(self.notes), self.state
            rows = [row_of(entry) for entry in entries if entry.version > since]
        if self.scanned.is_set():
            self._answered.set()
        return {
            "version": version,
            "since": since,
            "root": str(self.root),
            "name": self.root.resolve().name,
            "state": {"kind": state.kind, "detail": state.detail},
            "scanned": self.scanned.is_set(),
            "total": len(entries),
            "read": sum(entry.fresh for entry in entries),
            "rows": rows,
            "groups": grouped.groups,
            "group_by": list(self.grouping.by),
            "notes": notes,
            "tokenizer": self.readings.has_tokenizer,
        }

    def scan(self) -> None:
        """One look at the folder."""
        found: dict[str, Rollout] = {}
        try:
            for rollout in find_rollouts(self.root, self._note):
                found[rollout.rollout_path] = rollout
                if not self.scanned.is_set():
                    self._take(rollout)
        except TrainError as error:
            self._note(str(error))
        for rollout in found.values():
            self._take(rollout)
        with self._lock:
            for path, entry in self._entries.items():
                if path not in found and not entry.gone:
                    entry.gone = True
                    self._changed(entry)
        state = self._state(found.values())
        with self._lock:
            if state != self.state:
                self.state = state
                self.version += 1
        self.scanned.set()

    def read_next(self) -> bool:
        """Reads the next log that was not read as it is now; False when there is none."""
        while True:
            with self._lock:
                entry = self._unread.popleft() if self._unread else None
            if entry is None:
                return False
            if not entry.gone and not entry.fresh:
                self.read_one(entry)
                return True

    def read_one(self, entry: Entry) -> Reading | None:
        now, reading = entry.seen, None
        try:
            reading = self.readings.once(entry.rollout)
            log, summary = member_log(entry.rollout, reading.tokens), summary_of(reading)
        except Exception as error:  # a bug of ours must not end the thread that reads all logs
            problem = (
                str(error) if isinstance(error, CaptureError) else f"{type(error).__name__}: {error}; please report it"
            )
            log = MemberLog(False, False, problem)
            summary = {**UNREAD, "unreadable": problem, "reason": problem}
        with self._lock:
            entry.read, entry.log, entry.summary = now, log, summary
            self._changed(entry)
        return reading

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            self.scan()
            took = time.monotonic() - began
            if self._answered.wait(NOBODY):
                self._stop.wait(max(0.0, DRAWN - (time.monotonic() - self._asked)))
            until = time.monotonic() + max(PAUSE, SHARE * took)
            while not self._stop.is_set() and self.read_next():
                time.sleep(0.001)  # requests go first
                if time.monotonic() > until and self.state.kind == "running":
                    break
            while not self._stop.is_set() and (time.monotonic() < until or time.monotonic() - self._asked > ASKED):
                self._stop.wait(0.2)

    def _take(self, rollout: Rollout) -> None:
        now = stamp(rollout)
        with self._lock:
            entry = self._entries.get(rollout.rollout_path)
            if entry is None:
                entry = self._entries[rollout.rollout_path] = Entry(rollout, now)
                self._unread.append(entry)
                self._changed(entry)
            elif entry.seen != now or entry.rollout != rollout or entry.gone:
                entry.rollout, entry.seen, entry.gone = rollout, now, False
                self._unread.append(entry)
                self._changed(entry)

    def _changed(self, entry: Entry) -> None:
        self.version += 1
        entry.version = self.version

    def _note(self, text: str) -> None:
        with self._lock:
            if text not in self.notes and len(self.notes) < NOTES:
                self.notes.append(text)
                self.version += 1

    def _state(self, rollouts: Iterable[Rollout]) -> JobState:
        folders = {rollout.path.resolve().parent for rollout in rollouts}
        if not self.root.exists():
            return JobState("stopped", f"{self.root} is gone: what was read of it is still shown")
        if self.root.is_file():
            return JobState("finished", "one file")
        if not folders:
            return JobState("waiting", f"no rollout and no journal in {self.root} yet")
        states = []
        for folder in folders:
            state = job_state(folder, had_lock=folder in self._had_lock)
            if state.lock is not None:
                self._had_lock.add(folder)
            states.append(state)
        known = [state for state in states if state.kind != "waiting"]
        return combined_state(known) if known else JobState("finished", "no job's lock or summary: read as it is")


def row_of(entry: Entry) -> dict[str, Any]:
    """One row of the table, as far as it is known."""
    rollout = entry.rollout
    return {
        "path": rollout.rollout_path,
        "name": rollout.name,
        "task": rollout.task,
        "agent": rollout.agent,
        "model": rollout.model,
        "job": rollout.job_path,
        "reward": rollout.reward,
        "outcome": rollout.outcome,
        "error": rollout.error or rollout.verifier_error,
        "finished": rollout.finished,
        "seconds": seconds_between(rollout.started_at, rollout.finished_at),
        "finished_at": rollout.finished_at,
        "gone": entry.gone,
        "fresh": entry.fresh,
        **entry.summary,
        **entry.group,
    }


def summary_of(reading: Reading) -> dict[str, Any]:
    """What a row says of a log."""
    tokens, coverage = reading.tokens, reading.tokens.coverage
    counts = [sum(len(completion.token_ids or ()) for completion in call.capture.completions) if call.capture else 0
              for call in tokens.calls[:CALLS]]  # fmt: skip
    return {
        "status": coverage["status"],
        "grade": tokens.training_grade,
        "reason": tokens.reason,
        "calls": coverage["calls"],
        "all_calls": len(tokens.calls),
        "complete": coverage["complete_calls"],
        "threads": len(tokens.segments),
        "breaks": len(tokens.breaks),
        "tokens": coverage["sampled_tokens"],
        "longest": max(
            (len(segment.prompt_ids) + len(segment.completion_ids) for segment in tokens.segments), default=0
        ),
        "per_call": counts,
        "trainable": sum(segment.kind in TRAINABLE_KINDS for segment in tokens.segments),
        "policies": sorted({version for call in tokens.calls for version in call.policy_versions}),
        "problems": len(coverage["problems"]),
    }


#: Of a log that cannot be read.
UNREAD: dict[str, Any] = {
    "status": "unreadable", "grade": False, "calls": 0, "all_calls": 0, "complete": 0, "threads": 0, "breaks": 0,
    "tokens": 0, "longest": 0, "per_call": [], "trainable": 0, "policies": [], "problems": 0,
}  # fmt: skip


def seconds_between(began: str | None, ended: str | None) -> float | None:
    """Of two ISO 8601 times; None where one is missing or they are of different kinds."""
    try:
        return (datetime.fromisoformat(ended or "") - datetime.fromisoformat(began or "")).total_seconds()
    except (ValueError, TypeError):
        return None
