"""`groups.jsonl` of a job: a line when a group is accepted, cancelled or ended, when a rollout ended, and per policy.

A line is on disk before anything follows from it: no rollout starts before its group's line. So a service that was
killed knows which groups are open. Only a verdict that cannot be written, on a full disk, reaches the trainer all the
same; a restart then decides about the group again.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from capture import json
from capture.errors import JournalError
from capture.journal.layout import JobDir


class Ledger:
    """The open ledger of a job, and what its earlier lines say.

    `accepted`, `tasks` and `ended` are by the groups' keys. `policy` is the last one, `{"version", "model",
    "weights"}`; `accepted_since` are the keys of the groups that were accepted after it.
    """

    def __init__(self, job: JobDir) -> None:
        """Raises `JournalError` where it cannot be read or written."""
        self.path = job.groups
        self.accepted: dict[str, dict[str, Any]] = {}
        #: The task of each accepted group, also of one that a seed picked among the tasks of that run.
        self.tasks: dict[str, str] = {}
        self.ended: dict[str, dict[str, Any]] = {}
        self.cancelled: set[str] = set()
        #: Rollouts in the order in which trainers got their lines.
        self.finished: list[str] = []
        self.policy: dict[str, str | None] | None = None
        self.accepted_since: set[str] = set()
        self._lock = threading.Lock()
        try:
            self._file = self.path.open("a+b", buffering=0)
            self._read()
        except OSError as error:
            raise self._failed(error) from error

    def _read(self) -> None:
        self._file.seek(0)
        data = self._file.read() or b""
        for line in data.split(b"\n"):
            row = json.loads_or_none(line) if line else None
            if isinstance(row, dict) and isinstance(row.get("request"), dict):
                key = str(row["request"].get("key"))
                self.accepted[key] = row["request"]
                if isinstance(row.get("task"), str):
                    self.tasks[key] = row["task"]
                self.accepted_since.add(key)
            elif isinstance(row, dict) and _has_text(row.get("verdict"), "key", "state"):
                self.ended[row["verdict"]["key"]] = row["verdict"]
            elif isinstance(row, dict) and isinstance(row.get("finished"), str):
                self.finished.append(row["finished"])
            elif isinstance(row, dict) and isinstance(row.get("cancel"), str):
                self.cancelled.add(row["cancel"])
            elif isinstance(row, dict) and _has_text(row.get("policy"), "version"):
                self.policy, self.accepted_since = row["policy"], set()
        if data and not data.endswith(b"\n"):  # a line that a kill cut off
            self._file.write(b"\n")

    def accept(self, request: dict[str, Any], task: str) -> None:
        """Raises `JournalError`; the group is not accepted then."""
        self._append({"request": request, "task": task})

    def finish(self, rollout: str) -> None:
        """The next line of its group is this rollout's. Raises `JournalError`; a restart may change the order then."""
        self._append({"finished": rollout})

    def cancel(self, key: str) -> None:
        """Raises `JournalError`; the group is not cancelled then."""
        self._append({"cancel": key})

    def end(self, verdict: dict[str, Any]) -> None:
        """Raises `JournalError`; a restart decides about the group again then."""
        self._append({"verdict": verdict})

    def change_policy(self, version: str, model: str | None, weights: str | None) -> None:
        """`weights`: the file that the service's own engine serves. Raises `JournalError`."""
        self._append({"policy": {"version": version, "model": model, "weights": weights}})

    def close(self) -> None:
        self._file.close()

    def _append(self, row: dict[str, Any]) -> None:
        line = json.dumps(row) + b"\n"
        with self._lock:
            try:
                at = self._file.seek(0, os.SEEK_END)
                try:
                    if self._file.write(line) != len(line):
                        raise OSError("only a part of it could be written")
                    os.fsync(self._file.fileno())
                except OSError:
                    self._file.truncate(at)
                    raise
            except OSError as error:
                raise self._failed(error) from error

    def _failed(self, error: OSError) -> JournalError:
        return JournalError(f"cannot write {self.path}: {error.strerror or error}")


def _has_text(row: object, *names: str) -> bool:
    return isinstance(row, dict) and all(isinstance(row.get(name), str) for name in names)
