"""The files of a job: its lock, `evaluation.json` at the start, `summary.json` and `results.jsonl` at the end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from capture import json
from capture.errors import CaptureError, LockError
from capture.journal.files import read_json, write_json, write_jsonl
from capture.journal.layout import EVALUATION, LOCK, JobDir
from capture.journal.trainer_files import reward_of
from capture.lock import LockHeld, locked
from sandbox.errors import INFRASTRUCTURE, JobError, SandboxError, Stopped
from sandbox.rollouts.plan import RolloutPlan
from sandbox.rollouts.result_files import outcome, to_be_retried
from sandbox.tasks.task import Task

#: All of BenchFlow's categories of failures: `evaluation.json` lists those that are not retried.
CATEGORIES = frozenset(
    {"install_failure", "pipe_closed", "acp_error", "idle_timeout", "infra_failure", "sandbox_setup", "provider_auth",
     "provider_rate_limit", "provider_rejected", "timeout", "api_error", "suspected_api_error", "agent_integration",
     "usage_limit", "other", "agent_error", "out_of_memory", "disk_full", "pids_exhausted", "verifier_failure",
     "verifier_infra", "verifier_timeout", "verifier_dep_install", "verifier_other"}
)  # fmt: skip


class Job:
    """An open job folder."""

    def __init__(self, folder: JobDir) -> None:
        self.dir = folder
        self.results: list[dict[str, Any]] = finished_rollouts(folder)
        self._started = time.monotonic()
        self._lock = threading.Lock()

    def add(self, result: dict[str, Any]) -> None:
        with self._lock:
            self.results.append(result)

    def is_finished(self, task: str) -> bool:
        """Whether the task has a rollout that needs no further attempt."""
        return any(r["task_name"] == task and not to_be_retried(r) for r in self.results)

    def to_replace(self, task: str) -> str | None:
        """The failed rollout of an earlier run that the next one of this task replaces."""
        failed = [r["rollout_name"] for r in self.results if r["task_name"] == task and to_be_retried(r)]
        return failed[-1] if failed else None

    def finish(self, plan: RolloutPlan, *, stopped: bool) -> dict[str, Any]:
        """Writes `results.jsonl`, `verifiers.jsonl` and `summary.json`, and returns the summary."""
        rows = _collect(self.dir, "results.jsonl")
        for number, row in enumerate(rows):
            row["example_id"] = number
        write_jsonl(self.dir.results, rows)
        write_jsonl(self.dir.verifiers, _collect(self.dir, "trainer/verifiers.jsonl"))
        names = [result["rollout_name"] for result in self.results]
        skipped = [name for name in names if not self.dir.rollout(name).results.exists()]
        if skipped:
            write_json(
                self.dir.results_errors,
                {"schema_version": 1, "error": "skipped_results_artifact_rows", "skipped_count": len(skipped),
                 "skipped": [{"path": name} for name in skipped]},
            )  # fmt: skip
        summary = summary_json(
            self.dir.name, plan, last_attempts(self.results), time.monotonic() - self._started, stopped
        )
        write_json(self.dir.summary, summary)
        return {**summary, "path": str(self.dir.path)}


@contextlib.contextmanager
def open_job(folder: JobDir, evaluation: dict[str, Any], resume: bool) -> Iterator[Job]:
    """Takes the job's lock, writes `evaluation.json`, releases the lock at the end. Raises `JobError`."""
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(
            f"the job folder {folder.path} cannot be created: {error.strerror}; choose another --jobs-dir"
        ) from error
    remove = False
    try:
        with contextlib.ExitStack() as lock:
            _take_lock(lock, folder)
            if not resume and (folder.evaluation.exists() or folder.summary.exists()):
                raise JobError(
                    f"there is a job {folder.name} in {folder.path.parent} already; continue it with --resume, or give "
                    "another --job"
                )
            if resume and folder.evaluation.exists():
                _same_job(folder, evaluation)
            folder.summary.unlink(missing_ok=True)
            fresh = not folder.evaluation.exists()
            write_json(folder.evaluation, evaluation)
            try:
                yield Job(folder)
            except Stopped:
                raise
            except SandboxError:  # nothing could start, as without Docker: the name stays free
                if fresh and {path.name for path in folder.path.iterdir()} == {EVALUATION, LOCK}:
                    folder.evaluation.unlink()
                    remove = True
                raise
    finally:
        if remove:
            with contextlib.suppress(OSError):  # another run may be taking the name
                folder.path.rmdir()


def _take_lock(lock: contextlib.ExitStack, folder: JobDir) -> None:
    try:
        lock.enter_context(locked(folder.lock))
    except LockHeld as error:
        raise JobError(
            f"the job {folder.name} is running ({error.holder}); wait for it, give another --job, or delete "
            f"{folder.lock} if that process is gone"
        ) from None
    except LockError as error:
        raise JobError(f"the job {folder.name} cannot be started: {error}") from error


def _same_job(folder: JobDir, evaluation: dict[str, Any]) -> None:
    before = read_json(folder.evaluation)
    for key in ("agent", "model"):
        if before.get(key) != evaluation[key]:
            raise JobError(
                f"the job {folder.name} was run with {key} {before.get(key)}, not {evaluation[key]}; "
                "resume it with the same, or give another --job"
            )


def evaluation_json(
    plan: RolloutPlan, tasks: Sequence[Task], environment: str, retries: int, trial: int, trials: int
) -> dict[str, Any]:
    """What is about to run, as number `trial` of `trials`. Of the agent's variables only the names are stored."""
    return {
        "job_name": plan.job,
        "agent": plan.agent.name,
        "model": plan.model,
        "environment": environment,
        "trial": trial,
        "trials": trials,
        "tasks": [{"name": task.name, "task_digest": task.digest} for task in tasks],
        "config": {
            "agent_env": sorted(plan.agent_env),
            "capture": plan.capture,
            "policy_version": plan.session.policy_version,
            "sampling": plan.session.sampling,
            "controls": plan.controls,
            "purpose": plan.session.purpose,
            "token_in": plan.session.token_in,
            "timeout_sec": plan.timeout,
            "retry": {
                "max_retries": retries,
                "wait_multiplier": 2.0,
                "min_wait_sec": 1.0,
                "max_wait_sec": 30.0,
                "retry_categories": sorted(INFRASTRUCTURE),
                "exclude_categories": sorted(CATEGORIES - INFRASTRUCTURE),
            },
        },
        "started_at": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def summary_json(
    name: str, plan: RolloutPlan, results: list[dict[str, Any]], elapsed: float, stopped: bool
) -> dict[str, Any]:
    """The job in numbers: one result per task, passed + failed + errored + verifier_errored == total."""
    kinds = Counter(outcome(result) for result in results)
    rewards = [reward for result in results if (reward := reward_of(result)) is not None]
    usage = [result["agent_result"] for result in results]
    return {
        "job_name": name,
        "agent": plan.agent.name,
        "model": plan.model,
        "environment": results[0]["sandbox"] if results else None,
        "total": len(results),
        "passed": kinds["passed"],
        "failed": kinds["failed"],
        "errored": kinds["errored"],
        "verifier_errored": kinds["verifier_errored"],
        "score": _percent(kinds["passed"], len(results)),
        "score_excl_errors": _percent(kinds["passed"], kinds["passed"] + kinds["failed"]),
        "mean_reward": round(fmean(rewards), 6) if rewards else None,
        "pass_rate": round(kinds["passed"] / len(results), 6) if results else None,
        "error_categories": dict(Counter(r["error_category"] for r in results if r["error_category"])),
        "verifier_error_categories": dict(
            Counter(r["verifier_error_category"] for r in results if r["verifier_error_category"])
        ),
        "calls": sum(u["n_calls"] for u in usage),
        "complete_calls": sum(r["token_capture"]["complete_calls"] for r in results),
        "input_tokens": sum(u["n_input_tokens"] or 0 for u in usage),
        "output_tokens": sum(u["n_output_tokens"] or 0 for u in usage),
        "tool_calls": sum(r["n_tool_calls"] for r in results),
        "elapsed_sec": round(elapsed, 1),
        "stopped": stopped,
    }


def _percent(part: int, total: int) -> str:
    """`66.7%`, as BenchFlow writes scores; 0.0% of nothing."""
    return f"{part / total if total else 0.0:.1%}"


def last_attempts(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without those that a later attempt replaces."""
    replaced = {result["retry_of"] for result in results}
    return [result for result in results if result["rollout_name"] not in replaced]


def finished_rollouts(folder: JobDir) -> list[dict[str, Any]]:
    """The results of a job folder, oldest first."""
    found = []
    for path in folder.path.glob("*/result.json"):
        with contextlib.suppress(CaptureError):
            result = read_json(path)
            if isinstance(result, dict) and "rollout_name" in result and "task_name" in result:
                found.append((path.stat().st_mtime, result))
    return [result for _, result in sorted(found, key=lambda pair: pair[0])]


def _collect(folder: JobDir, name: str) -> list[dict[str, Any]]:
    """The rows of the file `name` of every finished rollout."""
    rows: list[dict[str, Any]] = []
    for result in sorted(folder.path.glob("*/result.json")):
        with contextlib.suppress(OSError, ValueError):
            lines = (result.parent / name).read_text(encoding="utf-8").splitlines()
            rows += [json.loads(line) for line in lines if line.strip()]
    return rows
