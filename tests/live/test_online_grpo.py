"""TRL's own GRPOTrainer trains on rollouts of `bench serve`: its rows are the journals', its rewards the tasks'."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.scripted_engine import Body, Said, ScriptedEngine, call_shell
from tests.sandbox.service.local_service import KEY
from tests.sandbox.service.support import ANSWER, ROOT, Service, write_tasks
from train.rollouts.rollouts import find_rollouts
from train.tokens.rollout_tokens import read_tokens

STEPS = Path(__file__).parent / "trainer_steps"
ENVIRONMENTS = Path.home() / ".cache/capture-trainers"
TOKENIZER = Path.home() / ".cache/capture-vllm/model"
GROUP = 4


class HalfRight:
    """Writes 42 in every other conversation and 41 in the others, then says so."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = 0

    def __call__(self, body: Body) -> Said:
        path = ANSWER.search(json.dumps(body["messages"]))
        if path is None or any(message["role"] == "tool" for message in body["messages"]):
            return Said("Done.")
        with self._lock:
            self._begun += 1
            value = 41 + self._begun % 2
        tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or []}
        return call_shell(tools, f"printf {value} > {path[0]}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What two steps of the trainer print, and the job's folder."""
    folder = tmp_path_factory.mktemp("grpo")
    write_tasks(folder / "tasks", "write-42")
    with ScriptedEngine(HalfRight()) as engine, Service(folder, engine, concurrency=GROUP, queue=8) as service:
        printed = run_steps("trl", "grpo_steps.py", service.url, shown("train.online.grpo"), TOKENIZER, 2)
        return printed, service.job


def shown(module: str) -> str:
    """The program with that module that the docs show."""
    document = (ROOT / "docs/online-trainers.md").read_text(encoding="utf-8")
    [found] = re.findall(rf"```python\n([^`]*from {re.escape(module)} import[^`]*)```", document)
    return str(found)


def run_steps(environment: str, script: str, url: str, program: str, *words: object) -> dict[str, Any]:
    """What a script of `trainer_steps` prints, in a trainer's environment with this tree's `train`."""
    python = ENVIRONMENTS / environment / "bin" / "python"
    if not python.exists():
        pytest.fail(f"{python} is missing: tests/live/trainers.sh install {environment}")
    done = subprocess.run(
        [str(python), str(STEPS / script), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=800,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TRL_EXPERIMENTAL_SILENCE": "1",
            "BENCHFLOW_SERVE_URL": url,
            "BENCHFLOW_SERVE_KEY": KEY,
            "SHOWN": program,
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_each_row_is_a_sequence_of_the_journal(trained: tuple[dict[str, Any], Path]) -> None:
    printed, job = trained
    rollouts = {rollout.rollout_path: rollout for rollout in find_rollouts(job)}
    assert len(printed["calls"]) == 2 and len(rollouts) == 2 * GROUP
    for rows in printed["calls"]:
        for at, path in enumerate(rows["rollout_path"]):
            rollout = next(found for name, found in rollouts.items() if path.endswith(name))
            [sequence] = read_tokens(rollout).sequences
            assert rows["prompt_ids"][at] == sequence.prompt_ids.tolist()
            assert rows["completion_ids"][at] == sequence.completion_ids.tolist()
            assert rows["env_mask"][at] == sequence.completion_mask
            assert rows["logprobs"][at] == sequence.completion_logprobs
            assert rows["rollout_reward"][at] == rollout.reward


def test_the_trainer_steps_on_the_tasks_rewards(trained: tuple[dict[str, Any], Path]) -> None:
    printed, _ = trained
    steps = [entry for entry in printed["logs"] if "loss" in entry]
    assert printed["step"] == len(steps) == 2
    for rows, entry in zip(printed["calls"], steps, strict=True):
        assert entry["rewards/rollout_reward/mean"] == sum(rows["rollout_reward"]) / GROUP == 0.5
        assert entry["grad_norm"] > 0
        assert entry["completions/mean_length"] == sum(sum(mask) for mask in rows["env_mask"]) / GROUP


def test_weights_go_out_before_each_steps_rollouts(trained: tuple[dict[str, Any], Path]) -> None:
    printed, _ = trained
    (tensors, first), (again, second) = printed["updates"]
    assert tensors == again > 0
    assert first != second
