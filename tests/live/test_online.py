"""TRL's AsyncGRPO trains the embedded engine's model through `bench serve`, on the CPU, as docs/online.md shows it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandbox.demo.rollouts import SYSTEM, TASK
from sandbox.embedded_engine import find_weights
from tests.live.conftest import end_group, free_port, tail
from tests.live.test_trainers import step

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/online.md").read_text(encoding="utf-8")
KEY = "choose-a-key"
UPDATES, GROUP = 3, 4
#: More is right in part: so that four rollouts of a small model seldom have the same reward.
VERIFIER = """#!/bin/bash
reward=0
[ -n "$(ls /app)" ] && reward=0.25
[ -f /app/answer.txt ] && reward=0.5
[ "$(cat /app/answer.txt 2>/dev/null)" = 42 ] && reward=1
echo $reward > /logs/verifier/reward.txt
"""


def program(word: str) -> str:
    [found] = [text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if word in text]
    return str(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("online")
    shutil.copytree(TASK, made / "tasks" / "write-number")
    (made / "tasks/write-number/verifier/test.sh").write_text(VERIFIER)
    (made / "model.gguf").symlink_to(find_weights())
    return made


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[str]:
    """The address of `bench serve`, started as the page says, with one call of 48 tokens per rollout."""
    [shown] = re.findall(r"\$ (bench serve .* --gguf .*)", PAGE)
    port, log = free_port(), folder / "serve.log"
    more = ["--port", port, "--jobs-dir", "jobs", "--job", "live"]
    for name, value in (("MINI_SYSTEM", SYSTEM), ("MINI_STEPS", 1), ("MINI_MAX_TOKENS", 48)):
        more += ["--agent-env", f"{name}={value}"]
    words = [sys.executable, "-m", "bench", *shlex.split(shown)[1:], *map(str, more)]
    environment = {**os.environ, "BENCHFLOW_SERVE_KEY": KEY, "PYTHONPATH": str(ROOT)}
    with log.open("wb") as output:
        child = subprocess.Popen(words, cwd=folder, stderr=output, env=environment, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 300
        while True:
            assert child.poll() is None and time.monotonic() < deadline, tail(log)
            try:
                httpx.get(f"{url}/health", timeout=5, trust_env=False)
                break
            except httpx.TransportError:
                time.sleep(0.5)
        yield url
        child.send_signal(signal.SIGTERM)
        assert child.wait(120) == 143, tail(log)
    finally:
        end_group(child)


@pytest.fixture(scope="module")
def trained(folder: Path, service: str) -> dict[str, Any]:
    variables = {
        "BENCHFLOW_SERVE_URL": service, "BENCHFLOW_SERVE_KEY": KEY, "PYTHONPATH": str(ROOT),
        "SHOWN": program("AsyncGRPOTrainer"), "FOLDER": str(folder),
    }  # fmt: skip
    return step("trl", "async_grpo_steps.py", **variables)


def calls_by_ids(job: Path) -> dict[tuple[int, ...], list[dict[str, Any]]]:
    """The journals' calls by prompt and sampled ids: the same reply may be sampled more than once."""
    found: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for journal in job.glob("*/trajectory/llm_trajectory.jsonl"):
        for line in journal.read_text().splitlines():
            call = json.loads(line)
            capture = call["metadata"].get("token_capture")
            if capture and capture["prompt_token_ids"]:
                [choice] = capture["completions"]
                ids = (*capture["prompt_token_ids"], *(choice["token_ids"] or ()))
                found.setdefault(ids, []).append(
                    {
                        "sampled": len(choice["token_ids"] or ()),
                        "logprobs": choice["logprobs"],
                        "version": call["metadata"].get("policy_version"),
                    }
                )
    return found


def call_of(reply: slice, row: dict[str, Any], calls: dict[tuple[int, ...], list[dict[str, Any]]]) -> dict[str, Any]:
    """The call that sampled a reply of a row: its ids and its logprobs, of which a row has the float32 values."""
    alike = calls[tuple(row["input_ids"][: reply.stop])]
    given = pytest.approx(row["logprobs"][reply], abs=0, rel=1e-7)
    found = [call for call in alike if call["sampled"] == reply.stop - reply.start and call["logprobs"] == given]
    assert found, (row["logprobs"][reply], [call["logprobs"] for call in alike])
    return found[0]


@pytest.mark.timeout(3600)
def test_async_grpo_trains_three_updates_on_what_the_engine_sampled(folder: Path, trained: dict[str, Any]) -> None:
    """Ids and logprobs are the journal's; ratios begin at 1; and each call has the version of the weights that sampled
    it, which their own logprobs prove, also for rollouts that ran while weights changed.
    """
    rows, calls = trained["rows"], calls_by_ids(folder / "jobs" / "live")
    assert trained["versions"] == 1 + UPDATES and len(trained["losses"]) == UPDATES and trained["moved"]
    assert len(rows) >= UPDATES * GROUP
    versions = set()
    for row in rows:
        replies = list(replies_of(row["mask"]))
        sampled = [call_of(reply, row, calls)["version"] for reply in replies]
        versions.update(sampled)
        assert replies[-1].stop == len(row["input_ids"])
        assert row["version"] == min(map(int, sampled))
        for reply, version in zip(replies, sampled, strict=True):
            if (by_version := row["by_version"].get(version)) is not None:
                assert by_version[str(reply.start)] < 2e-3, (version, row["by_version"])
    first_largest, first_mean, tokens = trained["distances"][0]
    print(f"first update: |ratio - 1| at most {first_largest:.1e}, {first_mean:.1e} on average, of {tokens} tokens")
    print(f"versions {sorted(versions)}, rewards {trained['rewards']}, losses {trained['losses']}")
    assert first_largest < 1e-3
    assert len(versions) > 1


def replies_of(mask: list[int]) -> Iterator[slice]:
    """Where the mask is 1, one part after the other."""
    at = 0
    for sampled, values in groupby(mask):
        length = len(list(values))
        if sampled:
            yield slice(at, at + length)
        at += length


def test_other_weights_would_have_given_other_logprobs(trained: dict[str, Any]) -> None:
    """So that the proof of the versions proves something: the next other weights do not fit what was sampled."""
    contrasts = [
        other[start] / max(distance, 1e-6)
        for row in trained["rows"]
        for version, other in row["by_version"].items()
        if int(version) > row["version"]
        for start, distance in row["by_version"][str(row["version"])].items()
    ]
    assert contrasts and max(contrasts) > 5
