"""Runs a task's verifier and reads the reward it wrote, without following links."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from capture import json
from capture.errors import JsonError
from sandbox.containers.archives import folder_archive, regular_files
from sandbox.containers.base import Sandbox, run
from sandbox.errors import NoReward, VerifierError
from sandbox.scoring.hardening import Prepared, verifier_env
from sandbox.tasks.task import Task

LOGS = "/logs/verifier"
TEXT, JSON = f"{LOGS}/reward.txt", f"{LOGS}/reward.json"
LOG_LIMIT = 64 << 20
#: Files that are copied out of a folder of logs.
MAX_FILES = 5_000
OWN_LOGS = ("test-stdout.txt", "test-stderr.txt")


def verify(sandbox: Sandbox, task: Task, prepared: Prepared, out: Path) -> dict[str, Any]:
    """Uploads the verifier, runs it, copies its files to `out` and returns the rewards, `{"reward": float, ...}`.

    Raises `VerifierError`: it crashed, hung, or wrote no valid reward. `NoReward`: it wrote none.
    """
    folder = "/verifier" if task.layout == "native" else "/tests"
    run(sandbox, ["sh", "-c", 'mkdir -p "$1"; if [ ! -e /tests ]; then ln -s "$1" /tests; fi', "sh", folder])
    sandbox.put(folder_archive(task.verifier_dir), folder)
    env = verifier_env(prepared, fill_env(task.verifier.env, f"{task.name}: verifier.env"), folder, plugins(task))
    timeout = task.verifier.timeout_sec
    done = run(
        sandbox,
        ["/bin/sh", "-c", 'exec "$0"', f"{folder}/test.sh"],
        user=task.verifier.user,
        env=env,
        cwd=prepared.workdir,
        timeout=timeout,
        limit=8 << 20,
    )
    _write(out, "test-stdout.txt", done.stdout)
    _write(out, "test-stderr.txt", done.stderr)
    if done.timed_out:
        raise VerifierError(f"verifier timed out after {timeout:g}s", "verifier_timeout")
    archive = sandbox.get(LOGS, LOG_LIMIT)
    files = dict(regular_files(archive)) if archive is not None else {}
    copy_files(((name, data) for name, data in files.items() if name not in OWN_LOGS), out)
    rewards = read_reward(files, task.verifier.reward_range)
    if rewards is None:
        raise _no_reward(sandbox, task, done.exit_code, done.tail())
    return rewards


def copy_files(files: Iterable[tuple[str, bytes]], to: Path, most: int = MAX_FILES) -> int:
    """Writes up to `most` files from a sandbox below `to` and returns how many were left out.

    Names are the agent's: one that this machine cannot have is left out too. Nothing is synced to the disk: they are
    logs, and there may be thousands.
    """
    left_out = 0
    for number, (name, data) in enumerate(files):
        path = to / name
        try:
            if number >= most:
                raise OSError
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except (OSError, ValueError):
            left_out += 1
    return left_out


def _no_reward(sandbox: Sandbox, task: Task, code: int | None, tail: str) -> VerifierError:
    cause = sandbox.cause_of_death(code)
    if cause:
        return VerifierError(f"the verifier {cause[1]}")
    script = task.verifier_dir / "test.sh"
    if b"\r\n" in script.read_bytes()[:4096]:
        tail = f"{script} has Windows line ends; save it with Unix ones"
    more = f" ({tail})" if tail else ""
    if code:
        return VerifierError(f"verifier exited with rc={code}; no reward file found at {TEXT} or {JSON}{more}")
    return NoReward(f"No reward file found at {TEXT} or {JSON}{more}")


def read_reward(files: Mapping[str, bytes], low_high: list[float]) -> dict[str, Any] | None:
    """Rewards from the regular files of `/logs/verifier`; None when there are neither. Raises `VerifierError`."""
    text = _from_text(files["reward.txt"], low_high) if "reward.txt" in files else None
    rewards = _from_json(files["reward.json"], low_high) if "reward.json" in files else None
    if text is not None and rewards is not None and not math.isclose(text, rewards["reward"], abs_tol=1e-9):
        raise VerifierError(
            f"{TEXT} says {text} and {JSON} says {rewards['reward']}; write one of them, or the same number"
        )
    if rewards is not None:
        return rewards
    return None if text is None else {"reward": text}


def _from_text(data: bytes, low_high: list[float]) -> float:
    words = data.decode(errors="replace").strip()
    if not words:
        raise VerifierError(f"Reward file is empty at {TEXT}")
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf(inity)?)", words, re.IGNORECASE):
        raise VerifierError(f"Failed to parse rewards from text file {TEXT}: {words[:80]!r} is no number")
    return _in_range(float(words), TEXT, low_high)


def _from_json(data: bytes, low_high: list[float]) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except JsonError as error:
        raise VerifierError(f"Failed to parse rewards from {JSON}: {error}") from error
    if not isinstance(value, dict) or not _is_number(value.get("reward")):
        raise VerifierError(f"{JSON} must be an object with a number `reward`")
    rewards: dict[str, Any] = {"reward": _in_range(value["reward"], JSON, low_high)}
    for name, extra in value.items():
        if name in ("rubric", "metrics", "details", "aggregate") or _is_finite(extra):
            rewards.setdefault(name, extra)
        elif name != "reward":
            raise VerifierError(f"{JSON}: {name} must be a finite number, not {str(extra)[:80]!r}")
    return rewards


def _in_range(value: float, where: str, low_high: list[float]) -> float:
    if not _is_finite(value) or not low_high[0] <= value <= low_high[1]:
        raise VerifierError(f"{where} must contain a finite numeric reward between {low_high[0]} and {low_high[1]}")
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    """Of a number that a float can hold: JSON's integers have no bound."""
    try:
        return _is_number(value) and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:
        return False


def plugins(task: Task) -> list[str]:
    """pytest plugins that the task names, and the one that provides Harbor's usual option `--ctrf`."""
    named = list(task.verifier.pytest_plugins)
    if "--ctrf" in (task.verifier_dir / "test.sh").read_text(encoding="utf-8", errors="replace"):
        named.append("ctrf.main")  # the module of pytest-json-ctrf
    return named


def fill_env(env: Mapping[str, str], where: str) -> dict[str, str]:
    """Replaces `${NAME}` in values from the environment of this process. Raises `VerifierError` for unset names."""

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match.group(1))
        if found is None:
            raise VerifierError(f"{where} needs the environment variable {match.group(1)}; set it for bench run")
        return found

    return {name: re.sub(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}", value, text) for name, text in env.items()}


def _write(folder: Path, name: str, data: bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
