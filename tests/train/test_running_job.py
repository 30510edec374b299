"""A job of our own runner, followed while it runs: real containers, a real engine, the runner's own files."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import docker

from sandbox.embedded_engine import EmbeddedEngine
from sandbox.rollouts.job import JobOptions, run_job
from sandbox.rollouts.model_endpoint import Provider
from sandbox.rollouts.plan import RolloutPlan
from sandbox.rollouts.progress import Progress
from tests.sandbox.support import ShellAgent, make_task
from tests.schemas import validator
from train import RolloutRecord, stream_rollouts
from train.groups.advantage import advantages

#: Two calls of one conversation, then an answer that is right in half of the rollouts.
TALKS = r"""python3 - <<'PY'
import json, os, random, urllib.request
settings = {name: os.environ["BENCHFLOW_PROVIDER_" + name] for name in ("MODEL", "BASE_URL", "API_KEY")}
history = [{"role": "user", "content": "What is the capital of France?"}]
for _ in range(2):
    body = {"model": settings["MODEL"], "messages": history, "max_tokens": 40, "temperature": 1.0}
    request = urllib.request.Request(settings["BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + settings["API_KEY"]})
    reply = json.load(urllib.request.urlopen(request, timeout=100))["choices"][0]["message"]
    history += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "And of Spain?"}]
open("answer.txt", "w").write(random.choice(["42", "41"]))
PY"""


def test_three_trials_come_as_one_group_with_the_ids_the_engine_sampled(
    tmp_path: Path, engine: EmbeddedEngine, docker_client: docker.DockerClient
) -> None:
    provider = Provider(f"llamacpp/{engine.model}", "llamacpp", engine.model, engine.base_url, None, True)
    plan = RolloutPlan(job="own", agent=ShellAgent(TALKS, needs_model=True), provider=provider)
    out = io.StringIO()
    runner = threading.Thread(
        target=run_job,
        args=(plan, [make_task(tmp_path)], JobOptions(tmp_path / "jobs", trials=3), Progress(out, live=False)),
    )
    withheld: list[list[RolloutRecord]] = []
    runner.start()  # the stream is there before the job's folder is
    records = list(
        stream_rollouts(
            tmp_path / "jobs", poll_interval=0.1, timeout=240, group_size=3, group_by="task,agent,model",
            on_withheld=withheld.append,
        )
    )  # fmt: skip
    runner.join()
    result = records or (withheld[0] if withheld else [])
    assert len(result) == 3, out.getvalue()
    for row in result:
        validator("rollout_stream.v1").validate(row)
        capture = row["token_capture"]
        assert (capture["calls"], capture["complete_calls"], capture["path"]) == (2, 2, "llamacpp"), out.getvalue()
        assert row["rollout_path"].split("/")[1] == "own" and row["outcome"] in ("passed", "failed")
        for segment in row["segments"]:
            sampled = sum(segment["action_mask"])
            assert sampled == segment["sampled_tokens"] > 0  # type: ignore[typeddict-item]
            assert all(value < 0 for value, bit in zip(segment["logprobs"], segment["action_mask"], strict=True) if bit)
    assert {row["rollout_path"].split("/")[0] for row in result} == {"trial-01", "trial-02", "trial-03"}
    if records:
        rewards = [row["reward"] for row in records if row["reward"] is not None]
        assert [row["advantage"] for row in records] == advantages(rewards)
    else:  # a sampled reply that llama.cpp re-tokenized in one of the trials: reported, and withheld as a whole
        assert {row.get("withheld") for row in result} == {"mixed_sequences"}
