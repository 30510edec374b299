"""The names of the files in a job folder, defined once for writers and readers.

They are BenchFlow's names, so that each reads the folders of the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RESULT = "result.json"
SOLVER = "solver.json"
SUMMARY = "summary.json"
EVALUATION = "evaluation.json"
LOCK = ".evaluation.lock"
JOURNAL = "trajectory/llm_trajectory.jsonl"
TRIAL_PREFIX = "trial-"


@dataclass(frozen=True, slots=True)
class RolloutDir:
    """One rollout's folder, `<task>__<8 hex digits>`. `result.json` is written last: once it exists, it is finished."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def result(self) -> Path:
        return self.path / RESULT

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def results(self) -> Path:
        return self.path / "results.jsonl"

    @property
    def rewards(self) -> Path:
        return self.path / "rewards.jsonl"

    @property
    def timing(self) -> Path:
        return self.path / "timing.json"

    @property
    def prompts(self) -> Path:
        return self.path / "prompts.json"

    @property
    def agent(self) -> Path:
        return self.path / "agent"

    @property
    def verifier(self) -> Path:
        return self.path / "verifier"

    @property
    def artifacts(self) -> Path:
        return self.path / "artifacts"

    @property
    def trajectory(self) -> Path:
        return self.path / "trajectory"

    @property
    def journal(self) -> Path:
        """`llm_trajectory.jsonl`: one JSON line per call."""
        return self.path / JOURNAL

    @property
    def acp_trajectory(self) -> Path:
        return self.trajectory / "acp_trajectory.jsonl"

    @property
    def trainer(self) -> Path:
        return self.path / "trainer"

    @property
    def verifiers(self) -> Path:
        return self.trainer / "verifiers.jsonl"


@dataclass(frozen=True, slots=True)
class JobDir:
    """One job's folder: rollouts beside the files that describe the job."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def lock(self) -> Path:
        """`{"pid", "host"}`; exists while the job runs."""
        return self.path / LOCK

    @property
    def evaluation(self) -> Path:
        """Written at the start: the job's configuration, key names only, and its retry policy."""
        return self.path / EVALUATION

    @property
    def groups(self) -> Path:
        """What `bench serve` accepted and how it ended, one line each."""
        return self.path / "groups.jsonl"

    @property
    def summary(self) -> Path:
        """Written at the end."""
        return self.path / SUMMARY

    @property
    def results(self) -> Path:
        return self.path / "results.jsonl"

    @property
    def results_errors(self) -> Path:
        return self.path / "results.errors.json"

    @property
    def verifiers(self) -> Path:
        return self.path / "verifiers.jsonl"

    def rollout(self, name: str) -> RolloutDir:
        return RolloutDir(self.path / name)


def trial_name(number: int) -> str:
    """`trial-01` for 1: the folder above the job where a run has several trials."""
    return f"{TRIAL_PREFIX}{number:02d}"
