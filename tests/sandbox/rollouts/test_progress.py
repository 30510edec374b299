"""The lines of a run, and the bar on a terminal."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sandbox.rollouts.progress import Progress, verdict

ROOT = Path(__file__).parents[3]


def result(**more: object) -> dict[str, object]:
    base = {
        "rollout_name": "w__5cfd1b6d", "task_name": "write-number", "rewards": {"reward": 1.0},
        "n_tool_calls": 1, "error": None, "error_category": None, "verifier_error": None,
        "verifier_error_category": None,
        "agent_result": {"total_tokens": 2890}, "token_capture": {"calls": 2, "complete_calls": 2},
    }  # fmt: skip
    return {**base, **more}


def test_the_seeds_line() -> None:
    assert verdict(result()) == "[PASS] write-number (reward=1.00, tools=1)"
    assert verdict(result(rewards={"reward": 0.5})) == "[FAIL] write-number (reward=0.50, tools=1)"


def test_an_error_is_one_line_however_long() -> None:
    error = result(rewards=None, error="a\nb " * 400, error_category="api_error")
    assert verdict(error).startswith("[ERROR] write-number (api_error: a b a b")
    assert len(verdict(error)) < 400 and "\n" not in verdict(error)


def test_without_a_terminal_there_are_plain_lines_only() -> None:
    out = io.StringIO()
    progress = Progress(out, live=False)
    progress.begin(2, None)
    progress.done(result(), final=True)
    progress.done(result(rewards=None, error="x", error_category="infra_failure"), final=False)
    progress.end()
    assert out.getvalue() == (
        "[PASS] write-number (reward=1.00, tools=1)\n[ERROR] write-number (infra_failure: x); trying again\n"
    )


def test_a_log_without_output_for_long_shows_progress(capfd: pytest.CaptureFixture[str]) -> None:
    progress = Progress(io.StringIO(), live=False, quiet_seconds=0.05)
    progress.begin(2, None)
    progress.phase("w", "agent")
    progress.done(result(rollout_name="v"), final=True)
    text = ""
    until = time.monotonic() + 240
    while "rollouts ended" not in text and time.monotonic() < until:
        time.sleep(0.02)
        text += capfd.readouterr().err
    progress.end()
    assert text.startswith(
        "bench run: 1 of 2 rollouts ended: 1 passed, 0 failed, 0 errors · 2,890 tokens, 2/2 calls complete · 1 agent\n"
    )


@pytest.mark.docker
def test_on_a_terminal_a_bar_counts(tmp_path: Path, docker_client: object) -> None:
    """A pseudo-terminal, as a person has one; the rollout sleeps so that the bar is drawn."""
    from tests.sandbox.support import make_task

    task = make_task(tmp_path, **{"oracle/solve.sh": "#!/bin/bash\nsleep 3; echo 42 > answer.txt\n"})
    main, other = pty.openpty()
    run = subprocess.Popen(
        [sys.executable, "-m", "sandbox", "run", str(task.path), "-a", "oracle"], cwd=tmp_path, stdout=other,
        stderr=other,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "160"}, start_new_session=True,
    )  # fmt: skip
    os.close(other)
    seen = b""
    while True:
        try:
            piece = os.read(main, 4096)
        except OSError:
            break
        if not piece:
            break
        seen += piece
    assert run.wait(120) == 0
    text = seen.decode(errors="replace")
    assert "0/1" in text and "1 agent" in text and "0 passed, 0 failed, 0 errors" in text
    assert "[PASS] job-task (reward=1.00, tools=0)" in text
