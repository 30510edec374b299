"""TRL's own `HarnessRolloutWorker` and AsyncGRPO train on our OpenEnv sessions: their rows are the journals'."""

from __future__ import annotations

import json
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.live.test_online_grpo import GROUP, TOKENIZER, run_steps, shown
from tests.sandbox.scripted_engine import Body, Said, ScriptedEngine, call_shell
from tests.sandbox.service.local_service import KEY
from tests.sandbox.service.support import ANSWER, Service, write_tasks
from train.rollouts.rollouts import find_rollouts
from train.tokens.rollout_tokens import read_tokens

#: Makes one call of a second conversation, which a file holds, with the agent's own key and tool. `mini` hides the key
#: from commands, and on a test's machine its process can be asked.
SECOND = """
import json, os, urllib.request
process, found = os.getppid(), {}
while "BENCHFLOW_PROVIDER_API_KEY" not in found:
    lines = open(f"/proc/{process}/environ").read().split(chr(0))
    found = dict(line.split("=", 1) for line in lines if "=" in line)
    process = int(open(f"/proc/{process}/stat").read().rsplit(")", 1)[1].split()[1])
path = os.path.expanduser("~/second.json")
said = json.load(open(path)) if os.path.exists(path) else [
    {"role": "system", "content": "You are the second of two."}, {"role": "user", "content": "Look around."}]
tools = [{"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object",
    "properties": {"command": {"type": "string"}}}}} for name in ("bash", "read", "write")]
request = urllib.request.Request(found["BENCHFLOW_PROVIDER_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "x", "messages": said, "tools": tools}).encode(),
    {"Authorization": "Bearer " + found["BENCHFLOW_PROVIDER_API_KEY"], "Content-Type": "application/json"})
reply = json.load(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request))["choices"][0]["message"]
said.append(reply)
said += [{"role": "tool", "tool_call_id": call["id"], "content": "nothing"} for call in reply.get("tool_calls") or []]
json.dump(said, open(path, "w"))
"""


class TwoAgents:
    """The agent's model makes a second agent ask between its own calls; every other rollout writes the wrong number."""

    def __init__(self, program: Path) -> None:
        self._program = program
        self._lock = threading.Lock()
        self._begun = 0

    def __call__(self, body: Body) -> Said:
        tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or []}
        turns = sum(message["role"] == "assistant" for message in body["messages"])
        if "the second of two" in str(body["messages"][0]["content"]):
            return Said(tool="bash", arguments={"command": f"ls /{turns}"})
        path = ANSWER.search(json.dumps(body["messages"]))
        if path is None or turns == 3:
            return Said("Done.")
        if turns < 2:
            return call_shell(tools, f"{sys.executable} {self._program}")
        with self._lock:
            self._begun += 1
            value = 41 + self._begun % 2
        return call_shell(tools, f"printf {value} > {path[0]}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, dict[str, Any]]:
    """What a step of the trainer prints, the job's folder, and the state of the service after the trainer has ended."""
    folder = tmp_path_factory.mktemp("openenv")
    write_tasks(folder / "tasks", "write-42")
    program = folder / "second.py"
    program.write_text(SECOND)
    with ScriptedEngine(TwoAgents(program)) as engine, Service(folder, engine, concurrency=GROUP, queue=64) as service:
        program = (
            shown("train.online.openenv").replace("http://127.0.0.1:8300", service.url).replace('"KEY"', repr(KEY))
        )
        printed = run_steps("harness", "harness_steps.py", service.url, program, TOKENIZER, 1)
        return printed, service.job, service.http.get("/status").json()


def test_two_interleaved_agents_give_two_rows_which_are_the_journals(
    trained: tuple[dict[str, Any], Path, dict[str, Any]],
) -> None:
    printed, job, _ = trained
    expected: dict[tuple[int, ...], tuple[list[int], list[float], set[float | None]]] = {}
    for rollout in find_rollouts(job):
        if rollout.finished and rollout.scored:
            read = read_tokens(rollout)
            assert [call.number for call in read.calls] == list(range(6)) and len(read.sequences) == 2
            assert sorted(sequence.calls for sequence in read.sequences) == [(0, 2, 4, 5), (1, 3)]
            for part in read.sequences:
                ids = (*part.prompt_ids.tolist(), *part.completion_ids.tolist())
                zeros = [0] * len(part.prompt_ids)
                row = (zeros + part.completion_mask, zeros + part.completion_logprobs, set[float | None]())
                expected.setdefault(ids, row)[2].add(rollout.reward)  # the second agent says the same each time
    assert len(printed["samples"]) >= 2 * GROUP
    for sample in printed["samples"]:
        mask, logprobs, rewards = expected[tuple(sample["input_ids"])]
        assert sample["mask"] == mask
        assert sample["logprobs"] == pytest.approx(logprobs, abs=1e-6)  # TRL keeps them in 32 bits
        assert sample["reward"] in rewards
    # Rows of one rollout are next to each other, and have its advantage.
    for one, other in pairwise(printed["samples"][: 2 * GROUP]):
        if one["reward"] == other["reward"] and one["group"] == other["group"]:
            assert one["advantage"] == pytest.approx(other["advantage"])


def test_the_trainer_steps(trained: tuple[dict[str, Any], Path, dict[str, Any]]) -> None:
    printed, _, _ = trained
    [entry] = [entry for entry in printed["logs"] if "loss" in entry]
    assert printed["step"] == 1 and entry["grad_norm"] > 0
    assert entry["rollout/fork_frac"] == pytest.approx(1 / 5)  # six calls, of which one begins the second row
    assert entry["rollout/samples_per_rollout"] == 2


def test_the_trainers_end_leaves_no_group_open(trained: tuple[dict[str, Any], Path, dict[str, Any]]) -> None:
    _, _, status = trained
    assert status["groups"]["open"] == 0, status
