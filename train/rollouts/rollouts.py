"""Rollouts in folders: a job, the trials of a run, one rollout, or what the stand-alone proxy wrote. Read lazily."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from capture.errors import JournalError
from capture.journal.call import Call
from capture.journal.journal import JournalReader, purpose_of
from capture.journal.layout import EVALUATION, LOCK, RESULT, SOLVER, RolloutDir
from train.errors import BadInput, NoSuchPath

Warn = Callable[[str], None]

#: What only a rollout's folder has, from early on; such a folder is never searched for more rollouts.
ROLLOUT_FILES = frozenset({RESULT, SOLVER, "config.json", "trajectory"})
#: Folders inside a rollout whose names a folder of jobs may have too: two of them make it a rollout.
ROLLOUT_FOLDERS = frozenset({"agent", "verifier", "artifacts", "trainer"})
#: What a job's folder has. `summary.json` alone proves nothing: BenchFlow copies the last one next to the jobs.
JOB_PARTS = frozenset({LOCK, EVALUATION})
#: Levels of folders that are searched below the given one: `jobs/<suite>/<agent>/trial-01/<job>/<rollout>` and more.
DEPTH = 8


def find_rollouts(path: Path, on_warning: Warn | None = None) -> Iterator[Rollout]:
    """Every rollout at or below `path`, in the order of their paths, one at a time.

    `path` is a job folder, a folder of trials or of jobs, one rollout, its `result.json`, or a journal. A rollout
    without `result.json` (it is still running, or a stand-alone proxy wrote it) has `finished` False and no reward.
    Reviewers' rollouts, and everything inside a rollout, are skipped, as BenchFlow does. What cannot be read is left
    out, with a warning per file. Raises `NoSuchPath`.
    """
    warn = on_warning or (lambda _: None)
    if path.is_file():
        yield _from_file(path, warn)
        return
    if not path.is_dir():
        raise NoSuchPath(f"No such path: {path}")
    yield from _walk(path, path, warn, DEPTH)


def _from_file(path: Path, warn: Warn) -> Rollout:
    if path.name == RESULT:
        rollout = read_rollout(path.parent, path.parent, warn)
        if rollout is None:
            raise BadInput(f"{path} is not a readable JSON object")
        return rollout
    if path.suffix != ".jsonl":
        raise BadInput(f"{path} is not a rollout; give a job folder, a rollout's folder, or a journal (.jsonl)")
    folder = path.parent.parent if path.parent.name == "trajectory" else path.parent
    return Rollout(
        path=folder, rollout_path=path.name, name=folder.resolve().name, job=folder.resolve().parent.name, journal=path,
        purpose=_purpose_of(path), warn=warn,
    )  # fmt: skip


def _walk(folder: Path, root: Path, warn: Warn, depth: int) -> Iterator[Rollout]:
    names, links = _children(folder, warn)
    if is_rollout(set(names)):
        rollout = read_rollout(folder, root, warn) if RESULT in names else _unfinished(folder, root, warn)
        if rollout is not None:
            yield rollout
        return
    for link in links:
        warn(f"skipping {link}: it is a link to a folder; give that folder itself")
    if depth == 0:
        return
    for name, is_folder in names.items():
        if is_folder:
            yield from _walk(folder / name, root, warn, depth - 1)


def _children(folder: Path, warn: Warn) -> tuple[dict[str, bool], list[Path]]:
    """The sorted names in a folder, each with whether it is a folder; and links to folders, which may be loops."""
    names: dict[str, bool] = {}
    links: list[Path] = []
    try:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_symlink() and entry.is_dir():
                    links.append(folder / entry.name)
                    continue
                names[entry.name] = entry.is_dir()
    except OSError as error:
        warn(f"skipping {folder}: {error.strerror}")
    return names, links


def is_rollout(names: set[str]) -> bool:
    """Whether a folder with these children is a rollout's, finished or not."""
    if JOB_PARTS & names:
        return False
    return bool(ROLLOUT_FILES & names) or len(ROLLOUT_FOLDERS & names) > 1


def _unfinished(folder: Path, root: Path, warn: Warn) -> Rollout | None:
    journal = RolloutDir(folder).journal
    if not journal.is_file():
        return None
    resolved = folder.resolve()
    return Rollout(
        path=folder, rollout_path=relative(folder, root), name=resolved.name, job=resolved.parent.name,
        journal=journal, task=_task_of(resolved.name), purpose=_purpose_of(journal), warn=warn,
    )  # fmt: skip


def read_rollout(folder: Path, root: Path, warn: Warn) -> Rollout | None:
    """The finished rollout in `folder`; None for a reviewer's, and with a warning for one that cannot be read."""
    files = RolloutDir(folder)
    result = read_result(files.result)
    if result is None:
        warn(f"skipping {files.result}: not a readable JSON object")
        return None
    if result.get("purpose") == "reviewer":
        return None
    resolved = folder if folder.is_absolute() else folder.resolve()
    where = relative(folder, root)
    reward, why = reward_of(result)
    if why is not None:
        warn(f"{files.result}: {why}; the rollout counts as unscored")
    if odd := range_warning(reward):
        warn(f"{files.result}: {odd}")
    usage, group = result.get("usage_tracking"), result.get("group")
    group = group if isinstance(group, dict) else {}
    return Rollout(
        path=folder,
        rollout_path=where,
        name=_text(result.get("rollout_name")) or sendable(resolved.name),
        job=sendable(resolved.parent.name),
        finished=True,
        task=_text(result.get("task_name")) or _task_of(resolved.name),
        agent=_text(result.get("agent")),
        model=_text(result.get("model")),
        task_digest=_text(result.get("task_digest")),
        reward=reward,
        outcome=outcome_of(result, reward),
        error=_text(result.get("error")),
        error_category=_text(result.get("error_category")),
        verifier_error=_text(result.get("verifier_error")),
        verifier_error_category=_text(result.get("verifier_error_category")),
        started_at=_text(result.get("started_at")),
        written_at=_written_at(files.result),
        finished_at=_text(result.get("finished_at")),
        retry_of=_text(result.get("retry_of")),
        says_retry_of="retry_of" in result,
        purpose="eval" if result.get("purpose") == "eval" else "train",
        group=_text(group.get("key")),
        group_index=index if type(index := group.get("index")) is int else None,
        endpoint_kind=_text(usage.get("endpoint_kind")) if isinstance(usage, dict) else None,
        journal=files.journal if files.journal.is_file() else None,
        warn=warn,
    )


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout: the essential fields of its `result.json`, and where its calls are.

    `rollout_path` is relative to the given folder. `reward` is None, never 0, where the rollout was not scored.
    `outcome` is `passed`, `failed`, `errored`, `verifier_errored`, or `unfinished` without a `result.json`. `result`
    reads the whole file again, so that 100,000 rollouts fit into memory.
    """

    path: Path
    rollout_path: str
    name: str
    job: str
    journal: Path | None
    finished: bool = False
    task: str | None = None
    agent: str | None = None
    model: str | None = None
    task_digest: str | None = None
    reward: float | None = None
    outcome: str = "unfinished"
    error: str | None = None
    error_category: str | None = None
    verifier_error: str | None = None
    verifier_error_category: str | None = None
    started_at: str | None = None
    finished_at: str | None = None
    #: When `result.json` was written (ns), which orders rollouts that say no time, or the same.
    written_at: int = 0
    #: The attempt that this one replaces, where the runner says so.
    retry_of: str | None = None
    says_retry_of: bool = False
    #: `train`, or `eval`: it was run to evaluate the policy, and is no training data.
    purpose: str = "train"
    #: The key of the group that a trainer asked `bench serve` for, and the rollout's place in it.
    group: str | None = None
    group_index: int | None = None
    #: `usage_tracking.endpoint_kind`: `sandbox` when calls went through the proxy, `agent_native` when elsewhere.
    endpoint_kind: str | None = None
    warn: Warn = field(default=lambda _: None, repr=False, compare=False)

    @property
    def scored(self) -> bool:
        return self.reward is not None

    @property
    def job_path(self) -> str:
        """The job's folder relative to the folder given, where that holds several; else the job's name."""
        return self.rollout_path.rpartition("/")[0] or self.job

    @property
    def result(self) -> dict[str, Any]:
        """The whole `result.json`, read now; empty for a rollout without one."""
        return (read_result(RolloutDir(self.path).result) or {}) if self.finished else {}

    def calls(self) -> Iterator[Call]:
        """The calls in file order, one in memory at a time. Lines that are not a call go to `warn`.

        Raises `capture.errors.JournalError` when the journal is there and cannot be read.
        """
        if self.journal is None:
            return
        reader = JournalReader(self.journal)
        yield from reader
        for problem in reader.problems:
            self.warn(f"{self.journal}: {problem.what}")


def _purpose_of(journal: Path) -> str:
    """What a journal without a result is for."""
    with suppress(JournalError):
        return purpose_of(journal)
    return "train"


def _written_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def read_result(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file, None when it is none. NaN, which Python writes and JSON has not, is read."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def reward_of(result: dict[str, Any]) -> tuple[float | None, str | None]:
    """`rewards.reward`, and a sentence where that is not a reward: a bool, NaN, a text.

    With a `scoring` block (BenchFlow's rubric review) the reward counts only when scoring is complete.
    """
    rewards = result.get("rewards")
    value = rewards.get("reward") if isinstance(rewards, dict) else None
    if value is None:
        return None, None
    scoring = result.get("scoring")
    if isinstance(scoring, dict) and scoring.get("status") != "complete":
        return None, None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None, f"the reward is {json.dumps(value)}, not a number"
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        return None, f"the reward is {number}, not a finite number"
    return number, None


def range_warning(reward: float | None) -> str | None:
    """A sentence for a reward outside of 0 to 1, the range of verifiers; it is used as it is."""
    if reward is None or 0.0 <= reward <= 1.0:
        return None
    return f"the reward {reward:g} is outside of 0 to 1, the range of a verifier; it is used as it is"


def outcome_of(result: dict[str, Any], reward: float | None) -> str:
    """BenchFlow's `classify_score_outcome`: a reward decides even where there was an error."""
    if reward is not None:
        scoring = result.get("scoring")
        verdict = scoring.get("passed") if isinstance(scoring, dict) else None
        return "passed" if (verdict if isinstance(verdict, bool) else reward == 1.0) else "failed"
    return "verifier_errored" if result.get("verifier_error") and not result.get("error") else "errored"


def relative(folder: Path, root: Path) -> str:
    """The path below the folder that was given, with `/`; the folder's own name when it is that folder."""
    return sendable(folder.resolve().name if folder == root else folder.relative_to(root).as_posix())


def _task_of(name: str) -> str | None:
    return name.rpartition("__")[0] or None


def _text(value: object) -> str | None:
    return sendable(value) if isinstance(value, str) and value else None


def sendable(text: str) -> str:
    """Text that can be written as UTF-8: half a surrogate pair, as file names and Python's JSON may hold, becomes ?."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
