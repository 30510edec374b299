"""What a person is told, and what stands in result.json, for each way a rollout can go wrong: in real containers."""

from __future__ import annotations

import dataclasses
import io
import json
import threading
import time
from pathlib import Path
from typing import Any

import docker
import pytest

from capture.journal.journal import JournalReader
from sandbox.agents import find_agent
from sandbox.agents.mini import Mini
from sandbox.agents.nop import Nop
from sandbox.agents.oracle import Oracle
from sandbox.containers.docker import connect
from sandbox.containers.pool import DockerPool
from sandbox.embedded_engine import EmbeddedEngine
from sandbox.errors import DockerError, JobError
from sandbox.rollouts.job import JobOptions, run_job
from sandbox.rollouts.model_endpoint import Provider, check_reachable, read_provider, without_tokens
from sandbox.rollouts.options import session_options
from sandbox.rollouts.plan import RolloutPlan
from sandbox.rollouts.progress import Progress
from sandbox.rollouts.result_files import outcome
from sandbox.tasks.task import load_task
from tests.sandbox.support import WAIT, Seen, ShellAgent, attempt, attempt_all, make_task

pytestmark = [pytest.mark.usefixtures("docker_client"), pytest.mark.docker]


def category_and_error(seen: Seen) -> tuple[str, str]:
    return seen.result["error_category"], seen.result["error"]


def test_no_docker_says_how_to_start_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(DockerError, match=r"no Docker engine answers at .*none\.sock; install Docker and start it"):
        connect()


def test_no_permission_says_which_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("socket.socket.connect", denied)
    with pytest.raises(DockerError, match="add it to the group docker"):
        connect()


def test_a_missing_image_is_tried_and_named(tmp_path: Path) -> None:
    task = make_task(tmp_path, sandbox="docker_image: localhost:1/no/such-image:1")
    category, error = category_and_error(attempt(tmp_path, task, "exit 0"))
    assert category == "sandbox_setup"
    assert "localhost:1/no/such-image:1 is not on this machine and cannot be pulled" in error


def test_a_build_that_fails_shows_its_last_lines(tmp_path: Path) -> None:
    dockerfile = "FROM python:3.12-slim\nRUN echo before && false\n"
    folder = tmp_path / "job-task"
    task = make_task(tmp_path, sandbox="docker_image: x", **{"environment/Dockerfile": dockerfile})
    text = (folder / "task.md").read_text().replace("  docker_image: x\n", "  cpus: 1\n")
    (folder / "task.md").write_text(text)
    category, error = category_and_error(attempt(tmp_path, load_task(task.path), "exit 0"))
    assert category == "sandbox_setup"
    assert "the image of task job-task cannot be built" in error and "returned a non-zero code: 1" in error


def test_an_agent_that_cannot_be_installed_says_what_is_missing(tmp_path: Path) -> None:
    """`mini` needs Python: an image without it is made here by taking Python away."""
    dockerfile = "FROM python:3.12-slim\nRUN rm -f /usr/local/bin/python3 /usr/bin/python3\n"
    task = make_task(tmp_path, sandbox="docker_image: x", **{"environment/Dockerfile": dockerfile})
    text = (task.path / "task.md").read_text().replace("  docker_image: x\n", "  cpus: 1\n")
    (task.path / "task.md").write_text(text)
    category, error = category_and_error(attempt(tmp_path, load_task(task.path), Mini(), provider=unreachable()))
    assert category == "install_failure"
    assert "mini needs Python 3.8 or newer" in error


#: What an agent does, and its task: all of these run in one job.
AGENTS: dict[str, tuple[str, dict[str, str]]] = {
    "exits-1": ("echo 42 > answer.txt; echo boom >&2; exit 1", {}),
    "too-slow": ("echo 42 > answer.txt; sleep 60", {"agent": "timeout_sec: 2"}),
    "flood": ("yes flood | head -c 200M; echo 42 > answer.txt; echo LAST", {}),
    "memory": ("exec python3 -c 'x = bytearray(600 << 20); print(len(x))'", {"sandbox": "memory_mb: 128"}),
    "processes": (
        "exec python3 -c 'import threading, time\n"
        "for _ in range(500): threading.Thread(target=time.sleep, args=(2,)).start()'",
        {"sandbox": "pids: 40"},
    ),
    "partial": (
        "exit 0",
        {"test": '#!/bin/bash\necho \'{"reward": 0.25, "speed": 3}\' > /logs/verifier/reward.json; exit 1\n'},
    ),
}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory, docker_client: object) -> dict[str, Seen]:
    folder = tmp_path_factory.mktemp("judged")
    tasks = [make_task(folder, name=name, **task) for name, (_, task) in AGENTS.items()]
    return attempt_all(folder, {name: script for name, (script, _) in AGENTS.items()}, tasks)


def test_an_agent_that_exits_1_is_still_judged(judged: dict[str, Seen]) -> None:
    seen = judged["exits-1"]
    assert category_and_error(seen) == ("agent_error", "shell exited with code 1: boom")
    assert seen.reward == 1.0 and outcome(seen.result) == "passed"
    assert "[PASS] exits-1 (reward=1.00, tools=0); shell exited with code 1: boom" in seen.lines


def test_a_prompt_that_outruns_its_budget_is_still_judged(judged: dict[str, Seen]) -> None:
    seen = judged["too-slow"]
    assert category_and_error(seen) == ("timeout", "Agent prompt exceeded wall-clock budget 2s")
    assert seen.reward == 1.0 and seen.result["partial_trajectory"] is True
    events = [json.loads(line) for line in (seen.folder / "trajectory/acp_trajectory.jsonl").read_text().splitlines()]
    assert events[-1]["type"] == "agent_timeout" and events[-1]["timeout_sec"] == 2.0


def test_the_message_of_the_default_budget_is_the_seeds(tmp_path: Path) -> None:
    from sandbox.agents import AgentRun
    from sandbox.agents.trajectory import Trajectory

    plan = RolloutPlan(job="j", agent=Nop(), provider=None)
    agent_run = AgentRun.__new__(AgentRun)
    agent_run.budget, agent_run.trajectory = plan.budget(make_task(tmp_path)), Trajectory(tmp_path / "t.jsonl")
    assert str(agent_run.out_of_time()) == "Agent prompt exceeded wall-clock budget 900s"


def test_too_much_output_is_cut_and_the_rollout_continues(judged: dict[str, Seen]) -> None:
    seen = judged["flood"]
    assert seen.reward == 1.0 and seen.result["error"] is None
    assert len(seen.said) < 2 << 20 and seen.said.rstrip().endswith("LAST")


def test_memory_that_runs_out_is_distinguished_from_a_crash(judged: dict[str, Seen]) -> None:
    seen = judged["memory"]
    assert category_and_error(seen) == (
        "out_of_memory",
        "shell needed more than the sandbox's 128 MB of memory (exit 137)",
    )
    assert seen.reward == 0.0


def test_processes_that_run_out_are_distinguished_from_a_crash(judged: dict[str, Seen]) -> None:
    category, error = category_and_error(judged["processes"])
    assert category == "pids_exhausted" and "more than the sandbox's 40 processes" in error


def test_a_verifier_that_exits_1_after_its_reward_counts(judged: dict[str, Seen]) -> None:
    seen = judged["partial"]
    assert seen.result["rewards"] == {"reward": 0.25, "speed": 3} and outcome(seen.result) == "failed"


BROKEN_VERIFIERS = {
    "crashes": ("#!/bin/bash\nexit 3\n", "verifier_failure", "verifier exited with rc=3; no reward file found"),
    "silent": ("#!/bin/bash\nexit 0\n", "verifier_failure", "No reward file found at /logs/verifier/reward.txt"),
    "hangs": ("#!/bin/bash\nsleep 60\n", "verifier_timeout", "verifier timed out after 3s"),
    "no-shell": ("#!/no/such/shell\n", "verifier_failure", "verifier exited with rc="),
    "windows": ("#!/bin/bash\r\nexit 0\r\n", "verifier_failure", "has Windows line ends"),
    "empty": ("#!/bin/bash\n: > /logs/verifier/reward.txt\n", "verifier_failure", "Reward file is empty"),
    "words": ("#!/bin/bash\necho good > /logs/verifier/reward.txt\n", "verifier_failure", "Failed to parse rewards"),
    "nan": (
        "#!/bin/bash\necho nan > /logs/verifier/reward.txt\n",
        "verifier_failure",
        "must contain a finite numeric reward",
    ),
    "too-high": ("#!/bin/bash\necho 1.5 > /logs/verifier/reward.txt\n", "verifier_failure", "between 0.0 and 1.0"),
    "memory": (
        "#!/bin/bash\npython3 -c 'x=bytearray(600<<20)'; exit $?\n",
        "verifier_failure",
        "needed more than the sandbox's",
    ),
}


@pytest.fixture(scope="module")
def unscored(tmp_path_factory: pytest.TempPathFactory, docker_client: object) -> dict[str, Seen]:
    folder = tmp_path_factory.mktemp("unscored")
    tasks = [
        make_task(folder, name=name, test=script, verifier="timeout_sec: 3", sandbox="memory_mb: 128")
        for name, (script, _, _) in BROKEN_VERIFIERS.items()
    ]
    return attempt_all(folder, dict.fromkeys(BROKEN_VERIFIERS, "exit 0"), tasks)


@pytest.mark.parametrize("name", BROKEN_VERIFIERS)
def test_a_verifier_without_a_reward_leaves_the_rollout_unscored(unscored: dict[str, Seen], name: str) -> None:
    seen, (_, category, words) = unscored[name], BROKEN_VERIFIERS[name]
    assert seen.result["verifier_error_category"] == category
    assert words in seen.result["verifier_error"], seen.result["verifier_error"]
    assert seen.result["rewards"] is None and outcome(seen.result) == "verifier_errored"
    row = json.loads((seen.folder / "trainer" / "verifiers.jsonl").read_text())
    assert row["info"]["reward_valid"] is False
    assert json.loads((seen.folder / "results.jsonl").read_text())["reward"] is None
    assert not (seen.folder / "rewards.jsonl").exists()


def test_a_separate_verifier_gets_the_workspace_and_nothing_else(tmp_path: Path) -> None:
    test = """#!/bin/bash
[ "$(cat sub/answer.txt)" = 42 ] && [ ! -e /tmp/else ] && [ ! -e /home/agent/mine ] && r=1
echo ${r:-0} > /logs/verifier/reward.txt
"""
    script = "mkdir sub; echo 42 > sub/answer.txt; touch /tmp/else ~/mine"
    task = make_task(tmp_path, test=test)
    assert attempt(tmp_path, task, script, job="own", verifier_sandbox="separate").reward == 1.0
    assert attempt(tmp_path, task, script, job="shared").reward == 0.0


def unreachable() -> Provider:
    return Provider("vllm/m", "vllm", "m", "http://127.0.0.1:9/v1", None, True)


def test_an_engine_that_is_not_there_ends_the_job_before_it_starts() -> None:
    with pytest.raises(JobError, match=r"no engine answers at http://127\.0\.0\.1:9/v1"):
        check_reachable(unreachable())


def test_a_job_that_captures_no_tokens_says_so_before_it_starts() -> None:
    provider = dataclasses.replace(unreachable(), capture=False)
    assert "BENCHFLOW_CAPTURE_TOKEN_LOGPROBS=1 captures them" in (without_tokens(provider) or "")
    assert without_tokens(unreachable()) is None  # it captures


@pytest.mark.parametrize("variable", ["1", "", "auto", "0"])
def test_a_hosted_api_is_reported_to_return_no_tokens(variable: str) -> None:
    provider = read_provider("openai/gpt-5", {"BENCHFLOW_CAPTURE_TOKEN_LOGPROBS": variable})
    assert "openai/gpt-5 is called as a hosted API, which returns no token ids" in (without_tokens(provider) or "")
    assert provider.capture is (variable != "0")  # the record of each call says why it has none
    with pytest.raises(JobError, match="--token-in needs token ids, which openai/gpt-5 does not return"):
        session_options(None, [], "auto", provider)


def test_a_model_the_engine_does_not_serve_is_reported(engine: EmbeddedEngine) -> None:
    provider = Provider("llamacpp/other", "llamacpp", "other", engine.base_url, None, True)
    with pytest.raises(JobError, match=f"serves {engine.model}, not other; correct -m"):
        check_reachable(provider)


def test_an_engine_under_another_engines_name_is_reported(engine: EmbeddedEngine) -> None:
    """Asked as vLLM is asked, llama.cpp gives no token ids: the whole job would be without."""
    provider = Provider(f"vllm/{engine.model}", "vllm", engine.model, engine.base_url, None, True)
    with pytest.raises(JobError, match=f"is llamacpp, not vllm; give -m llamacpp/{engine.model}"):
        check_reachable(provider)
    check_reachable(dataclasses.replace(provider, capture=False))


def test_an_engine_that_dies_mid_run_is_the_infrastructures_fault_and_others_continue(tmp_path: Path) -> None:
    """The engine is gone before the agent's call: mini gives up, the rollout says why, and --retries tries again."""
    seen = attempt(
        tmp_path, make_task(tmp_path), find_agent("mini"), provider=unreachable(),
        options=lambda jobs: JobOptions(jobs_dir=jobs, retries=1),
    )  # fmt: skip
    assert seen.result["error_category"] == "api_error"
    assert "mini got no answer from the model: HTTP 502" in seen.result["error"]
    assert "127.0.0.1:9" not in seen.result["error"]
    results = [json.loads(p.read_text()) for p in (tmp_path / "jobs" / "job").glob("*/result.json")]
    assert sorted(r["retry_of"] or "" for r in results) == [
        "",
        next(r["rollout_name"] for r in results if not r["retry_of"]),
    ]
    assert seen.outcome.summaries[0]["total"] == 1
    assert seen.lines.count("; trying again") == 1
    assert [call.outcome for call in JournalReader(seen.folder / "trajectory" / "llm_trajectory.jsonl")] == [
        "error"
    ] * 3


def test_a_proxy_that_dies_mid_run_fails_that_rollout_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from proxy import ProxyError, ProxyThread

    def dead(*_: object, **__: object) -> None:
        raise ProxyError("the proxy is not running")

    monkeypatch.setattr(ProxyThread, "open_session", dead)
    seen = attempt(tmp_path, make_task(tmp_path), ShellAgent("exit 0", needs_model=True), provider=unreachable())
    assert category_and_error(seen) == ("infra_failure", "the proxy opened no session: the proxy is not running")
    assert seen.result["rewards"] is None


@pytest.mark.parametrize("stays", [False, True])
def test_the_engines_starter_is_waited_for_and_a_stranger_in_the_sandbox_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    """On a busy machine a container that was started again lists its starter for a moment, as if somebody were left."""
    starter, listed, top = ["root", "17", "runc init"], [0], docker.APIClient.top

    def slow(api: docker.APIClient, container: str, *rest: Any) -> dict[str, Any]:
        listed[0] += 1
        return {"Processes": [starter]} if stays or listed[0] < 3 else top(api, container, *rest)

    monkeypatch.setattr(docker.APIClient, "top", slow)

    class Pool(DockerPool):
        settle_seconds = 0.3 if stays else 120.0

    seen = attempt(tmp_path, make_task(tmp_path), "echo 42 > answer.txt", make_pool=Pool)
    if stays:
        text = "processes of the agent are still in the sandbox (root 17 runc init); nothing it did can be trusted"
        assert category_and_error(seen) == ("infra_failure", text)
    assert seen.reward == (None if stays else 1.0)


def test_one_broken_rollout_does_not_hurt_the_others(tmp_path: Path) -> None:
    good = [make_task(tmp_path, name=f"good-{n}") for n in range(3)]
    bad = make_task(tmp_path, name="bad", sandbox="docker_image: localhost:1/none")
    out = io.StringIO()
    agent = ShellAgent("echo 42 > answer.txt")
    ended = run_job(
        RolloutPlan(job="j", agent=agent, provider=None),
        [bad, *good],
        JobOptions(tmp_path / "jobs"),
        Progress(out, live=False),
    )
    summary = ended.summaries[0]
    assert (summary["passed"], summary["errored"], summary["total"]) == (3, 1, 4)
    assert "[ERROR] bad (sandbox_setup: " in out.getvalue()


def test_two_jobs_of_one_name(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    attempt(tmp_path, task, Nop())
    with pytest.raises(JobError, match=r"there is a job job in .* already; continue it with --resume"):
        attempt(tmp_path, task, Nop())
    started = threading.Event()

    class Slow(Nop):
        def act(self, agent_run: object) -> str:  # type: ignore[override]
            started.set()
            time.sleep(1.5)
            return "end_turn"

    running = threading.Thread(target=lambda: attempt(tmp_path, task, Slow(), job="slow"))
    running.start()
    assert started.wait(WAIT)
    with pytest.raises(JobError, match=r"the job slow is running \(process \d+\)"):
        attempt(tmp_path, task, Nop(), job="slow")
    running.join()


def test_oracle_without_a_solution_is_reported_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"Oracle requires oracle/solve\.sh"):
        attempt(tmp_path, make_task(tmp_path), Oracle())


@pytest.mark.parametrize("name", ["TOKEN_LOGPROBS", "TOP_LOGPROBS"])
@pytest.mark.parametrize("value", ["flase", "2.5", "-1", "yes please", "1" * 5000, "²"])
def test_an_invalid_capture_variable_is_an_error(name: str, value: str) -> None:
    env = {"BENCHFLOW_PROVIDER_BASE_URL": "http://127.0.0.1:9/v1", f"BENCHFLOW_CAPTURE_{name}": value}
    with pytest.raises(JobError, match=f"BENCHFLOW_CAPTURE_{name} must be"):
        read_provider("vllm/m", env)


@pytest.mark.parametrize(
    ("value", "capture"), [("1", True), (" ON ", True), ("", False), ("auto", False), ("0", False)]
)
def test_the_capture_variables_of_a_job(value: str, capture: bool) -> None:
    env = {"BENCHFLOW_PROVIDER_BASE_URL": "http://127.0.0.1:9/v1", "BENCHFLOW_CAPTURE_TOP_LOGPROBS": "3"}
    provider = read_provider("vllm/m", {**env, "BENCHFLOW_CAPTURE_TOKEN_LOGPROBS": value})
    assert (provider.capture, provider.top_logprobs) == (capture, 3)
