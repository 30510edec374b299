"""A job's folders and files, its lock, resuming, stopping, and that nothing is left behind."""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import docker
import pytest

from capture.journal.layout import JobDir
from proxy import SettingsError, read_sampling
from sandbox.agents.nop import Nop
from sandbox.containers import reaper
from sandbox.containers.network import Network, bridge_of, iptables
from sandbox.errors import JobError
from sandbox.rollouts.job import JobOptions, JobOutcome, run_job
from sandbox.rollouts.job_folder import open_job
from sandbox.rollouts.plan import RolloutPlan
from sandbox.rollouts.progress import Progress
from sandbox.tasks.task import Task, load_task
from tests.forked import run_command
from tests.sandbox.support import WAIT, ShellAgent, attempt, make_task

TASKS = Path(__file__).parents[1] / "tasks"
ROOT = Path(__file__).parents[3]
docker_test = pytest.mark.docker


def go(tmp_path: Path, tasks: list[Task], agent: Any, **options: Any) -> tuple[JobOutcome, str]:
    out = io.StringIO()
    plan = RolloutPlan(job="job", agent=agent, provider=None)
    ended = run_job(plan, tasks, JobOptions(jobs_dir=tmp_path / "jobs", **options), Progress(out, live=False))
    return ended, out.getvalue()


def bench(*words: str, cwd: Path, env: dict[str, str] | None = None, **more: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    return subprocess.Popen(
        [sys.executable, "-m", "sandbox", *words], cwd=cwd, env=env, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, **more,
    )  # fmt: skip


def of_job(client: docker.DockerClient, job: str) -> list[str]:
    """Ids of the containers and networks of a job; others may be at work on this machine."""
    label = {"label": f"benchflow.job={job}"}
    found = client.api.containers(all=True, filters=label) + client.api.networks(filters=label)
    return [resource["Id"] for resource in found]


@pytest.fixture
def job() -> str:
    return f"test-{secrets.token_hex(4)}"


@docker_test
def test_the_seeds_lines_and_files(tmp_path: Path, job: str, docker_client: docker.DockerClient) -> None:
    """`bench run` on the seed's task with the reference solution, as a person types it."""
    words = f"-a oracle --sandbox docker --jobs-dir jobs --job {job}".split()
    run = bench("run", str(TASKS / "write-number"), *words, cwd=tmp_path)
    out, err = run.communicate(timeout=WAIT)
    assert run.returncode == 0, err
    assert out == (
        "[write-number]   → end_turn, 0 total tool calls\n"
        "[write-number] Rewards: {'reward': 1.0}\n"
        "[PASS] write-number (reward=1.00, tools=0)\n"
    )
    (folder,) = (tmp_path / "jobs" / job).glob("write-number__*")
    assert re.fullmatch(r"write-number__[0-9a-f]{8}", folder.name)
    files = {str(p.relative_to(tmp_path / "jobs" / job)) for p in (tmp_path / "jobs").rglob("*") if p.is_file()}
    assert files == {
        "evaluation.json", "summary.json", "results.jsonl", "verifiers.jsonl",
        *(f"{folder.name}/{name}" for name in (
            "config.json", "result.json", "results.jsonl", "rewards.jsonl", "timing.json", "prompts.json",
            "agent/oracle.txt", "trajectory/acp_trajectory.jsonl", "trainer/verifiers.jsonl", "verifier/reward.txt",
            "verifier/test-stdout.txt", "verifier/test-stderr.txt")),
    }  # fmt: skip
    mtimes = {p.name: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    assert max(mtimes, key=lambda name: mtimes[name]) == "result.json"
    assert of_job(docker_client, job) == []


@docker_test
@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_every_example_passes_with_oracle_and_fails_with_nop(
    tmp_path: Path, agent: str, reward: float, job: str, docker_client: docker.DockerClient
) -> None:
    run = bench("run", str(TASKS), "-a", agent, "--job", job, "--json", cwd=tmp_path)
    out, err = run.communicate(timeout=WAIT)
    summary = json.loads(out)
    assert run.returncode == 0, err
    assert (summary["total"], summary["passed"], summary["mean_reward"]) == (4, 4 if reward else 0, reward)
    assert summary["score"] == summary["score_excl_errors"] == ("100.0%" if reward else "0.0%")
    assert "[PASS] write-number" in err or "[FAIL] write-number" in err
    assert of_job(docker_client, job) == []


@docker_test
def test_trials_are_jobs_of_their_own(tmp_path: Path, docker_client: docker.DockerClient) -> None:
    ended, _ = go(tmp_path, [make_task(tmp_path)], Nop(), trials=3)
    assert [s["path"] for s in ended.summaries] == [str(tmp_path / "jobs" / f"trial-0{n}" / "job") for n in (1, 2, 3)]
    for n in (1, 2, 3):
        folder = tmp_path / "jobs" / f"trial-0{n}" / "job"
        assert len(list(folder.glob("job-task__*/result.json"))) == 1
        evaluation = json.loads((folder / "evaluation.json").read_text())
        assert (evaluation["trial"], evaluation["trials"]) == (n, 3)
        assert not (folder / ".evaluation.lock").exists()


@docker_test
def test_resume_keeps_what_is_finished_and_tries_again_what_the_infrastructure_broke(
    tmp_path: Path, docker_client: docker.DockerClient
) -> None:
    good, bad = (
        make_task(tmp_path, name="good"),
        make_task(tmp_path, name="bad", sandbox="docker_image: localhost:1/no"),
    )
    ended, _ = go(tmp_path, [good, bad], Nop())
    assert (ended.summaries[0]["failed"], ended.summaries[0]["errored"]) == (1, 1)
    repaired = (bad.path / "task.md").read_text().replace("localhost:1/no", "python:3.12-slim")
    (bad.path / "task.md").write_text(repaired)
    again, lines = go(tmp_path, [good, load_task(bad.path)], Nop(), resume=True)
    assert "good" not in lines and "[FAIL] bad" in lines
    summary = again.summaries[0]
    assert (summary["total"], summary["failed"], summary["errored"]) == (2, 2, 0)
    results = {p.parent.name: json.loads(p.read_text()) for p in (tmp_path / "jobs" / "job").glob("*/result.json")}
    second = [r for r in results.values() if r["retry_of"]]
    assert len(results) == 3 and results[second[0]["retry_of"]]["error_category"] == "sandbox_setup"
    with pytest.raises(JobError, match="was run with agent nop, not shell"):
        go(tmp_path, [good], ShellAgent("exit 0"), resume=True)


@docker_test
def test_fail_fast_stops_at_the_first_rollout_without_a_reward(
    tmp_path: Path, docker_client: docker.DockerClient
) -> None:
    tasks = [make_task(tmp_path, name="a-bad", sandbox="docker_image: localhost:1/no")]
    tasks += [make_task(tmp_path, name=f"b-{n}") for n in range(4)]
    ended, lines = go(tmp_path, tasks, Nop(), fail_fast=True, concurrency=1)
    assert ended.stopped and ended.summaries[0]["stopped"] is True
    assert ended.summaries[0]["total"] == 1 and "b-3" not in lines


@docker_test
@pytest.mark.parametrize(
    ("number", "code", "wait"),
    [(signal.SIGINT, 130, 0.0), (signal.SIGINT, 130, 1.5), (signal.SIGTERM, 143, 1.0)],
)
def test_stopping_removes_containers_and_keeps_what_is_finished(
    tmp_path: Path, number: signal.Signals, code: int, wait: float, job: str, docker_client: docker.DockerClient
) -> None:
    quick = make_task(tmp_path, name="a-quick", **{"oracle/solve.sh": "#!/bin/bash\necho 42 > answer.txt\n"})
    slow = make_task(tmp_path, name="b-slow", **{"oracle/solve.sh": "#!/bin/bash\nsleep 300\n"})
    run = bench(
        "run", str(quick.path), str(slow.path), "-a", "oracle", "--job", job, "--concurrency", "1", cwd=tmp_path
    )
    assert run.stdout is not None
    while "[PASS] a-quick" not in (line := run.stdout.readline()):
        assert line, run.communicate()
    time.sleep(wait)
    run.send_signal(number)
    try:
        out, err = run.communicate(timeout=WAIT)
    finally:
        run.kill()
    assert run.returncode == code, (out, err)
    folder = tmp_path / "jobs" / job
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["stopped"], summary["total"], summary["passed"]) == (True, 1, 1)
    assert [p.parent.name[:7] for p in folder.glob("*/result.json")] == ["a-quick"]
    assert not (folder / ".evaluation.lock").exists()
    assert of_job(docker_client, job) == []
    assert "Traceback" not in err
    stream = subprocess.run(
        [sys.executable, "-m", "train", "stream", str(folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert stream.returncode == 1 and len(stream.stdout.splitlines()) == 1, stream.stderr


@docker_test
def test_what_a_killed_run_left_is_removed_by_the_next(
    tmp_path: Path, job: str, docker_client: docker.DockerClient
) -> None:
    task = make_task(tmp_path, **{"oracle/solve.sh": "#!/bin/bash\nsleep 300\n"})
    run = bench("run", str(task.path), "-a", "oracle", "--job", job, cwd=tmp_path)
    until = time.monotonic() + WAIT
    while not (len(of_job(docker_client, job)) == 2 and bridge_of(network_of(docker_client, job)) in rules()):
        assert time.monotonic() < until, "no container and network appeared"
        time.sleep(0.1)
    network = network_of(docker_client, job)
    run.kill()
    run.communicate()
    assert len(of_job(docker_client, job)) == 2
    assert bridge_of(network) in rules()
    lock = json.loads((tmp_path / "jobs" / job / ".evaluation.lock").read_text())
    assert lock["pid"] == run.pid and lock["host"] == socket.gethostname()
    assert attempt(tmp_path, make_task(tmp_path, name="next"), Nop(), job="next").reward == 0.0
    assert of_job(docker_client, job) == []
    assert bridge_of(network) not in rules()


def network_of(client: docker.DockerClient, job: str) -> str:
    return str(client.api.networks(filters={"label": f"benchflow.job={job}"})[0]["Id"])


def rules() -> str:
    listed = iptables(["-S", "INPUT"])
    assert listed is not None
    return listed.stdout


@docker_test
def test_the_reaper_touches_nothing_of_a_living_owner_or_another_host(docker_client: docker.DockerClient) -> None:
    api = docker_client.api
    mine = Network.create(api, reaper.labels(job="t"), closed=True)
    foreign = Network.create(api, {reaper.OWNER: f"elsewhere:{'0' * 8}:1:1"}, closed=True)
    dead = Network.create(api, {reaper.OWNER: reaper.owner().rsplit(":", 2)[0] + ":999999999:1"}, closed=True)
    try:
        assert reaper.reap(api) >= 1
        names = [n["Name"] for n in api.networks()]
        assert mine.name in names and foreign.name in names and dead.name not in names
    finally:
        mine.remove()
        foreign.remove()


def test_owners_are_distinguished() -> None:
    me = reaper.owner()
    assert not reaper.is_dead(me)
    host, boot, pid, ticks = me.rsplit(":", 3)
    assert reaper.is_dead(f"{host}:{boot}:{pid}:1")  # the number was given to another process
    assert reaper.is_dead(f"{host}:another-boot:{pid}:{ticks}")
    assert not reaper.is_dead(f"elsewhere:{boot}:999999999:1")
    assert not reaper.is_dead("nonsense")


def evaluation(agent: str = "nop") -> dict[str, Any]:
    return {"agent": agent, "model": None}


def test_a_lock_names_its_process_and_a_dead_ones_is_taken(tmp_path: Path) -> None:
    folder = JobDir(tmp_path / "j")
    with open_job(folder, evaluation(), resume=False):
        lock = json.loads(folder.lock.read_text())
        assert (lock["pid"], lock["host"]) == (os.getpid(), socket.gethostname())
        with pytest.raises(JobError, match=f"the job j is running .process {os.getpid()}."):
            open_job(folder, evaluation(), resume=True).__enter__()
    assert not folder.lock.exists()
    folder.lock.write_text(json.dumps({"pid": 999999999, "host": socket.gethostname(), "started": "1"}))
    with open_job(folder, evaluation(), resume=True):
        pass
    folder.lock.write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    with pytest.raises(JobError, match="on host elsewhere"):
        open_job(folder, evaluation(), resume=True).__enter__()


@docker_test
def test_config_contains_the_capture_setting_and_no_secret(tmp_path: Path, docker_client: docker.DockerClient) -> None:
    env = {"MY_API_KEY": "hush", "SESSION_ID": "hush", "LEVEL": "3", "BENCHFLOW_CAPTURE_TOKEN_LOGPROBS": "1"}
    seen = attempt(tmp_path, make_task(tmp_path), "exit 0", agent_env=env)
    config = json.loads((seen.folder / "config.json").read_text())
    assert config["agent_env"] == {"LEVEL": "3"} and config["capture"] is False
    for path in (tmp_path / "jobs").rglob("*"):
        assert not path.is_file() or b"hush" not in path.read_bytes(), path
    names = json.loads((tmp_path / "jobs" / "job" / "evaluation.json").read_text())["config"]["agent_env"]
    assert names == sorted(env)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-a", "orcale"], "unknown agent 'orcale'; did you mean oracle?"),
        (["-a", "mini"], "this agent needs a model; give -m vllm/NAME"),
        (["-a", "mini", "-m", "my-policy"], "say which engine serves it, such as -m vllm/my-policy"),
        (["-a", "mini", "-m", "vllm/"], "the name of the model is missing"),
        (["-a", "mini", "-m", "/my-policy"], "the name of the engine is missing"),
        (["-a", "mini", "-m", "vllm/p"], "where does vllm/p run? Give --agent-env BENCHFLOW_PROVIDER_BASE_URL="),
        (["-a", "mini", "-m", "vlm/p"], "such as -m vllm/p ("),
        (
            ["-a", "mini", "-m", "vllm/p", "--agent-env", "BENCHFLOW_PROVIDER_BASE_URL=10.0.0.1:8000"],
            "BENCHFLOW_PROVIDER_BASE_URL=10.0.0.1:8000 is no address; give one such as http://10.0.0.1:8000/v1",
        ),
        (["-a", "nop", "--sandbox", "podman"], "--sandbox podman is not known; docker is"),
        (["-a", "nop", "--agent-env", "NOT_SET_HERE"], "give NAME=VALUE, or the NAME of a variable that is set here"),
        (["-a", "nop", "--sampling", "hot"], "--sampling hot: give NAME=VALUE"),
        (["-a", "nop", "--token-in", "on"], "--token-in must be one of off, auto, require"),
        (["-a", "nop", "--sampling", "{hot}"], "--sampling is not JSON"),
        (["-a", "nop", "--job", "a/b"], "a job's name is one folder's name"),
        (["-a", "nop", "--verifier-sandbox", "own"], "must be shared or separate, not own"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path: Path, words: list[str], text: str) -> None:
    run = run_command(["sandbox", "run", TASKS / "write-number", *words], cwd=tmp_path)
    assert run.returncode == 2 and run.stdout == ""
    assert text in run.stderr and "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("word", "meant"), [("temprature=1", "temperature"), ("top-p=1", "top_p"), ('{"topK": 0}', "top_k")]
)
def test_a_misspelt_sampling_parameter_is_reported_and_an_engines_own_is_forwarded(word: str, meant: str) -> None:
    with pytest.raises(SettingsError, match=f"did you mean {meant}"):
        read_sampling([word])
    own = dict.fromkeys(
        ("dry_base", "xtc_threshold", "mirostat_tau", "dynatemp_exponent", "max_new_tokens", "top_a"), 1
    )
    assert read_sampling([json.dumps(own)]) == own


def test_sampling_is_taken_as_names_and_as_the_proxy_takes_it() -> None:
    assert read_sampling(["temperature=1.0", '{"top_p": 1, "top_k": -1}']) == {
        "temperature": 1.0,
        "top_p": 1,
        "top_k": -1,
    }


def test_a_job_that_could_not_start_leaves_its_name_free(tmp_path: Path) -> None:
    for _ in range(2):
        run = run_command(["sandbox", "run", TASKS / "write-number", "-a", "oracle", "--job", "x"], cwd=tmp_path,
                          env={"DOCKER_HOST": f"unix://{tmp_path}/none.sock"})  # fmt: skip
        assert run.returncode == 2 and "no Docker engine answers" in run.stderr
        assert not (tmp_path / "jobs" / "x").exists()


def test_tasks_check_says_what_is_wrong_with_each(tmp_path: Path) -> None:
    for name, key in (("a", "timout_sec"), ("b", "timeout_sec"), ("c", "usr")):
        shutil.copytree(TASKS / "write-number", tmp_path / "all" / name)
        text = (tmp_path / "all" / name / "task.md").read_text().replace("timeout_sec: 300", f"{key}: 300")
        (tmp_path / "all" / name / "task.md").write_text(text)
    check = run_command(["sandbox", "tasks", "check", "all"], cwd=tmp_path)
    assert "b: good" in check.stdout
    assert "unknown key agent.timout_sec; did you mean timeout_sec?" in check.stderr
    assert "unknown key agent.usr" in check.stderr


def test_tasks_check_and_init(tmp_path: Path) -> None:
    init = run_command(["sandbox", "tasks", "init", "mine"], cwd=tmp_path)
    assert "try it with: bench run mine -a oracle" in init.stdout
    (tmp_path / "broken").mkdir()
    check = run_command(["sandbox", "tasks", "check", "mine", "broken", TASKS], cwd=tmp_path)
    assert check.returncode == 2
    assert "mine: good" in check.stdout and "write-number: good" in check.stdout
    assert "broken holds neither task.md nor task.toml" in check.stderr
