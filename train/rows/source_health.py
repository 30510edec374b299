"""The logs of the jobs that rows came from: how many are there, and how many are missing or malformed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from capture.errors import CaptureError
from capture.journal.journal import JournalReader
from train.rollouts.rollouts import find_rollouts


@dataclass(slots=True)
class SourceHealth:
    """Finished rollouts of a folder of jobs, and their `llm_trajectory.jsonl`."""

    rollouts: int = 0
    missing_llm_trajectory: int = 0
    malformed_llm_trajectory: int = 0

    @property
    def ok(self) -> bool:
        return not self.missing_llm_trajectory and not self.malformed_llm_trajectory

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def source_health(jobs: Path) -> SourceHealth:
    """Reads every log in `jobs`. Raises `NoSuchPath`, `BadInput`."""
    health = SourceHealth()
    for rollout in find_rollouts(jobs):
        if not rollout.finished and rollout.journal is None:
            continue
        health.rollouts += 1
        if rollout.journal is None:
            health.missing_llm_trajectory += 1
        elif not _readable(rollout.journal):
            health.malformed_llm_trajectory += 1
    return health


def _readable(journal: Path) -> bool:
    """Whether every line is a call, and there is one at least."""
    reader = JournalReader(journal)
    try:
        calls = sum(1 for _ in reader)
    except CaptureError:
        return False
    return bool(calls) and not reader.problems
