"""The demo's rollouts for real, where there is no Docker: a model, an agent, a verifier, and the trainer's commands."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from sandbox.agents.mini import Mini
from sandbox.containers.base import run
from sandbox.containers.local import LocalPool, LocalSandbox
from sandbox.demo import rollouts
from sandbox.embedded_engine import EmbeddedEngine


def test_without_docker_the_loop_runs_in_plain_folders_and_says_so(
    tmp_path: Path, engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    console = Console(file=io.StringIO(), width=200)
    assert rollouts.loop_demo(console, engine, tmp_path, group_size=4) == []
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "in a plain folder, which is not a sandbox (no Docker engine answers at" in shown
    assert "4 of 4 rollouts are training-grade" in shown
    assert "4 training-grade rollouts sampled with llama.cpp's tool grammar" in capfd.readouterr().err
    assert shown.count("tokens exact") == 4
    results = [json.loads(path.read_text()) for path in (tmp_path / "jobs").glob("*/*/*/result.json")]
    assert len(results) == 4 and all(r["sandbox"] == "local" and r["rewards"] is not None for r in results)
    passed = sum(r["rewards"]["reward"] == 1.0 for r in results)
    assert f"{passed} of 4 right" in shown
    rows = [json.loads(line) for line in (tmp_path / "rows" / "trl-sft.jsonl").read_text().splitlines()]
    assert rows and all({"prompt", "completion", "tools"} <= row.keys() for row in rows)


def test_a_plain_folder_maps_a_tasks_paths_and_no_others() -> None:
    sandbox = LocalSandbox()
    try:
        root = str(sandbox.root)
        assert sandbox.mapped(b"cat /app/a /app, `/app/b` /applet /usr/app /logs/verifier") == (
            f"cat {root}/app/a {root}/app, `{root}/app/b` /applet /usr/app {root}/logs/verifier".encode()
        )
        done = run(sandbox, ["sh", "-c", "cat > /app/x; echo done; pwd"], stdin=b"/app/y", cwd="/app")
        assert done.output == f"done\n{root}/app\n"
        assert (sandbox.root / "app" / "x").read_text() == f"{root}/app/y"
        assert run(sandbox, ["sh", "-c", "sleep 60"], timeout=0.2).timed_out
    finally:
        sandbox.remove()
    assert not sandbox.root.exists()


def test_a_plain_folders_house_cleans_up() -> None:
    pool = LocalPool("job", [], print)
    task = rollouts.load_task(rollouts.TASK)
    sandbox = pool.sandbox(task, Mini(), "r")
    assert isinstance(sandbox, LocalSandbox) and (sandbox.root / "opt" / "benchflow" / "mini_program.py").exists()
    pool.close()
    assert not sandbox.root.exists()
