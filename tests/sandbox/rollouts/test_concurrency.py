"""Rollouts at once on one small machine: nothing leaks, no session is mixed up, every journal is whole."""

from __future__ import annotations

import io
import json
from pathlib import Path

import docker
import pytest

from capture.journal.journal import JournalReader
from proxy import SessionOptions
from sandbox.containers import reaper
from sandbox.embedded_engine import EmbeddedEngine
from sandbox.rollouts.job import JobOptions, run_job
from sandbox.rollouts.model_endpoint import Provider
from sandbox.rollouts.plan import RolloutPlan
from sandbox.rollouts.progress import Progress
from sandbox.tasks.task import load_task
from tests.sandbox.support import ShellAgent, make_task

MARKED = """python3 - <<'END'
import json, os, urllib.request
mark = open("/instruction.md").read().split("MARK-")[1].split()[0]
for turn in range(3):
    body = {"model": os.environ["BENCHFLOW_PROVIDER_MODEL"], "max_tokens": 4,
            "messages": [{"role": "user", "content": f"MARK-{mark} turn {turn}"}]}
    request = urllib.request.Request(os.environ["BENCHFLOW_PROVIDER_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(), {"Content-Type": "application/json",
        "Authorization": "Bearer " + os.environ["BENCHFLOW_PROVIDER_API_KEY"]})
    json.load(urllib.request.urlopen(request, timeout=300))
open("answer.txt", "w").write("42")
END"""


def volumes(client: docker.DockerClient) -> set[str]:
    return {v["Name"] for v in client.api.volumes()["Volumes"] or []}


@pytest.mark.docker
@pytest.mark.timeout(900)
@pytest.mark.parametrize("many", [3, pytest.param(20, marks=pytest.mark.live)])
def test_rollouts_at_once(
    tmp_path: Path, engine: EmbeddedEngine, docker_client: docker.DockerClient, many: int
) -> None:
    client = docker_client
    before = volumes(client)
    tasks = []
    for n in range(many):
        task = make_task(
            tmp_path, name=f"t{n:02d}", sandbox="network_mode: no-network\nmemory_mb: 256", agent="timeout_sec: 600"
        )
        text = (task.path / "task.md").read_text().replace("Write 42", f"MARK-{n:02d} Write 42")
        (task.path / "task.md").write_text(text)
        tasks.append(load_task(task.path))
    provider = Provider(f"llamacpp/{engine.model}", "llamacpp", engine.model, engine.base_url, None, True)
    # At temperature 1 this model now and then says an emoji, of which llama.cpp gives one logprob for four tokens.
    cold: dict[str, object] = {"temperature": 0.0}
    plan = RolloutPlan(
        job="many", agent=ShellAgent(MARKED, needs_model=True), provider=provider, session=SessionOptions(sampling=cold)
    )
    output = io.StringIO()
    ended = run_job(plan, tasks, JobOptions(tmp_path / "jobs", concurrency=many), Progress(output, live=False))
    summary = ended.summaries[0]
    assert (summary["passed"], summary["total"], summary["calls"], summary["complete_calls"]) == (
        many,
        many,
        3 * many,
        3 * many,
    ), output.getvalue()
    for result in (tmp_path / "jobs" / "many").glob("*/result.json"):
        name = json.loads(result.read_text())["task_name"]
        calls = list(JournalReader(result.parent / "trajectory" / "llm_trajectory.jsonl"))
        prompts = [call.request_body["messages"][0]["content"] for call in calls]
        assert prompts == [f"MARK-{name[1:]} turn {turn}" for turn in range(3)]
        assert all(call.capture is not None and call.capture.complete for call in calls)
    label = {"label": f"{reaper.OWNER}={reaper.owner()}"}
    assert client.api.containers(all=True, filters=label) == [] and client.api.networks(filters=label) == []
    assert volumes(client) <= before
