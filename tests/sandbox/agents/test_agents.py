"""The agents of other people: what each is told, what is read from it, and that none of them can hang or hide.

Three of them run here for real, one a dialect, in containers against the scripted engine; the others, and all of them
with a real model, in `tests/live/test_agents.py`.
"""

from __future__ import annotations

import io
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sandbox.agents import (
    AGENTS,
    Agent,
    AgentRun,
    Model,
    claude,
    codex,
    find_agent,
    gemini,
    install_npm,
    mini_swe,
    opencode,
    pi,
    qwen,
)
from sandbox.agents.trajectory import Trajectory
from sandbox.containers import images
from sandbox.containers.archives import file_archive
from sandbox.containers.base import Sandbox, run
from sandbox.containers.docker import Container, Limits, connect
from sandbox.errors import InstallError
from sandbox.rollouts.job import JobOptions, run_job
from sandbox.rollouts.model_endpoint import Provider
from sandbox.rollouts.plan import RolloutPlan
from sandbox.rollouts.progress import Progress
from sandbox.scoring.hardening import SAFE_PATH, Prepared, Scan
from tests.sandbox.agent_runs import check_whole, scripted
from tests.sandbox.scripted_engine import Body, Said, ScriptedEngine
from tests.sandbox.support import Seen, make_task

RECORDED = Path(__file__).parents[1] / "data"
#: The program that each agent is started by: in its place the tests put one that misbehaves.
PROGRAMS = {
    "pi-acp": f"{pi.ROOT}/node_modules/.bin/pi-acp",
    "claude-agent-acp": claude.PROGRAM,
    "codex-acp": codex.PROGRAM,
    "opencode": opencode.PROGRAM,
    "qwen-code": qwen.PROGRAM,
    "mini-swe-agent": f"{mini_swe.ROOT}/bin/mini",
    "gemini": gemini.PROGRAM,
}


def agent_run_of(tmp_path: Path, **env: str) -> AgentRun:
    prepared = Prepared("agent", "/home/agent", "/app", SAFE_PATH, Scan(), {})
    model = Model("http://172.17.0.1:9/v1", 'key-with-"quotes"', "my-policy")
    trajectory = Trajectory(tmp_path / "acp_trajectory.jsonl")
    sandbox: Any = None
    return AgentRun(sandbox, make_task(tmp_path), prepared, "write", model, env, trajectory, tmp_path / "agent", 9.0)


@pytest.mark.parametrize(("options", "window"), [({}, 128_000), ({"BENCHFLOW_CONTEXT_WINDOW": "32768"}, 32_768)])
def test_each_agent_gets_its_context_window(tmp_path: Path, options: dict[str, str], window: int) -> None:
    agent_run = agent_run_of(tmp_path, **options)
    provider: Any = pi.models(agent_run)["providers"]
    assert provider["benchflow"]["models"][0]["contextWindow"] == window
    assert opencode.config(agent_run)["provider"]["benchflow"]["models"]["my-policy"]["limit"]["context"] == window
    assert qwen.settings(agent_run)["model"]["generationConfig"]["contextWindowSize"] == window
    result = tomllib.loads(codex.config(agent_run))
    assert result["model_context_window"] == window < result["model_auto_compact_token_limit"]


def test_a_context_window_that_is_not_a_number_is_not_passed_on(tmp_path: Path) -> None:
    assert agent_run_of(tmp_path, BENCHFLOW_CONTEXT_WINDOW="much").context_window == 128_000


def test_codex_settings_are_toml_whatever_the_names_contain(tmp_path: Path) -> None:
    agent_run = agent_run_of(tmp_path)
    agent_run.model = Model("http://h:9/v1", "k", 'a "quoted" \\ name')
    result = tomllib.loads(codex.config(agent_run))
    assert result["model"] == 'a "quoted" \\ name'
    assert result["model_providers"]["benchflow"]["wire_api"] == "responses"


def test_every_agent_that_is_installed_says_its_version() -> None:
    pinned = {agent.name: agent.version for agent in AGENTS if agent.version}
    assert set(pinned) == set(PROGRAMS)
    assert all(any(character.isdigit() for character in version) for version in pinned.values())


@pytest.mark.parametrize(("alias", "name"), [("claude", "claude-agent-acp"), ("codex", "codex-acp"), ("pi", "pi-acp")])
def test_short_names_are_known(alias: str, name: str) -> None:
    assert find_agent(alias).name == find_agent(name).name == name


def test_mini_swe_agents_transcript_becomes_a_trajectory(tmp_path: Path) -> None:
    trajectory = Trajectory(tmp_path / "acp_trajectory.jsonl")
    mini_swe.add_transcript(trajectory, json.loads((RECORDED / "mini-swe-agent.json").read_text()))
    calls = trajectory.events
    assert [event["type"] for event in calls] == ["tool_call"] * 3
    assert [event["raw_input"]["command"] for event in calls] == [
        "printf 42 > /app/answer.txt", "cat /app/answer.txt", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    ]  # fmt: skip
    assert {event["status"] for event in calls} == {"completed"}
    assert '"output": "42"' in calls[1]["raw_output"]


@pytest.mark.parametrize("broken", [{}, {"messages": None}, {"messages": ["x", {"role": "tool"}, {"role": "exit"}]}])
def test_a_broken_transcript_gives_what_it_can(tmp_path: Path, broken: dict[str, Any]) -> None:
    mini_swe.add_transcript(Trajectory(tmp_path / "t.jsonl"), broken)


MISBEHAVES = """#!/usr/bin/env python3
import json, os, sys, time
def say(**message): print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)
mode = os.environ["MODE"]
if mode == "exits 1":
    print("I give up", file=sys.stderr)
    sys.exit(1)
if mode == "hangs":
    time.sleep(600)
if "-o" in sys.argv:  # mini-swe-agent speaks no protocol: its flood is what it prints
    for _ in range(10): print("x" * 1_000_000)
    sys.exit(0)
for line in sys.stdin:
    message = json.loads(line)
    if message.get("method") == "initialize":
        for _ in range(20_000): print("no protocol")
        say(id=message["id"], result={"protocolVersion": 1})
    elif message.get("method") == "session/prompt":
        text = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": "z" * 100_000}}
        while True: say(method="session/update", params={"sessionId": "s", "update": text})
    elif "id" in message:
        say(id=message["id"], result={"sessionId": "s"})
"""


def expected(name: str) -> dict[str, tuple[str, str]]:
    """By mode, the category and how the sentence begins."""
    if name == "mini-swe-agent":
        return {
            "exits 1": ("agent_error", "mini-swe-agent exited with code 1: I give up"),
            "hangs": ("timeout", "Agent prompt exceeded wall-clock budget 1s"),
            "floods": ("agent_error", "mini-swe-agent left no transcript"),
        }
    return {
        "exits 1": ("pipe_closed", f"{name} exited with code 1: I give up"),
        "hangs": ("acp_error", f"{name} did not answer initialize within 1 s; "),
        "floods": ("acp_error", "the agent reported more than 4 MB about itself"),
    }


class Misbehaving(Agent):
    """A double: each agent's own file, settings and launch, with a program that misbehaves in place of its own.

    The task's name says which agent, so that all of them run in one job.
    """

    name = "misbehaving"

    def __init__(self, handshake_seconds: float) -> None:
        self.handshake_seconds = handshake_seconds

    def install(self, sandbox: Sandbox) -> None:
        for path in PROGRAMS.values():
            folder, _, program = path.rpartition("/")
            run(sandbox, ["mkdir", "-p", folder])
            sandbox.put(file_archive(program, MISBEHAVES.encode(), mode=0o755), folder)

    def act(self, agent_run: AgentRun) -> str:
        agent_run.handshake_seconds, agent_run.trajectory.max_bytes = self.handshake_seconds, 4 << 20
        return find_agent(agent_run.task.name.partition("--")[0]).act(agent_run)


def misbehave(folder: Path, modes: list[str], *, seconds: int, handshake: float = 240) -> dict[tuple[str, str], Seen]:
    """Every agent in every mode, in one job; `seconds` for each."""
    tasks = {
        (name, mode): make_task(
            folder, name=f"{name}--{mode.replace(' ', '-')}", sandbox=f"env: {{MODE: {mode}}}",
            agent=f"timeout_sec: {seconds}",
        )
        for name in PROGRAMS for mode in modes
    }  # fmt: skip
    out = io.StringIO()
    with ScriptedEngine() as engine:
        provider = Provider(f"vllm/{engine.model}", "vllm", engine.model, engine.base_url, None, True)
        plan = RolloutPlan(job="bad", agent=Misbehaving(handshake), provider=provider)
        ended = run_job(plan, list(tasks.values()), JobOptions(folder / "jobs"), Progress(out, live=False))
    jobs = folder / "jobs" / "bad"
    return {key: Seen(ended, next(jobs.glob(f"{task.name}__*")), "", out.getvalue()) for key, task in tasks.items()}


@pytest.fixture(scope="module")
def misbehaved(tmp_path_factory: pytest.TempPathFactory, docker_client: object) -> dict[tuple[str, str], Seen]:
    """One that hangs gets no time, the others all they need: a busy machine changes nothing."""
    others = misbehave(tmp_path_factory.mktemp("others"), ["exits 1", "floods"], seconds=240)
    return others | misbehave(tmp_path_factory.mktemp("hangs"), ["hangs"], seconds=1, handshake=1.0)


@pytest.mark.docker
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["exits 1", "floods", "hangs"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_agent_that_misbehaves_is_ended_and_named(
    misbehaved: dict[tuple[str, str], Seen], name: str, mode: str
) -> None:
    seen, (category, words) = misbehaved[name, mode], expected(name)[mode]
    assert seen.result["error_category"] == category, seen.result["error"]
    assert seen.result["error"].startswith(words), seen.result["error"]
    assert sum(path.stat().st_size for path in (seen.folder / "agent").glob("*")) < 4 << 20


@pytest.mark.docker
def test_an_unavailable_or_wrong_package_is_reported(docker_client: object) -> None:
    """From a folder, so that no registry is asked: first one that is not there, then one without the program."""
    sandbox = Container.start(
        connect(), "node:20-slim", name="benchflow-test-npm", limits=Limits(), labels={}, network="none"
    )
    try:
        with pytest.raises(InstallError, match=r"broken cannot be installed in this image: .*/nowhere"):
            install_npm.install_packages(sandbox, "broken", ("/nowhere",), ("broken",))
        run(sandbox, ["mkdir", "-p", "/srv"])
        sandbox.put(file_archive("package.json", b'{"name": "other", "version": "1.0.0"}'), "/srv")
        with pytest.raises(InstallError, match=r"/srv brought no program broken"):
            install_npm.install_packages(sandbox, "broken", ("/srv",), ("broken",))
    finally:
        sandbox.remove()


@pytest.mark.docker
def test_a_baked_image_keeps_its_name_and_starts_as_its_base_did(docker_client: Any) -> None:
    name = "benchflow-test-baked"
    dockerfile = io.BytesIO(b'FROM python:3.12-slim\nENTRYPOINT ["env"]\nCMD ["true"]\n')
    list(docker_client.api.build(fileobj=dockerfile, tag=f"{name}-base", rm=True))
    made = []
    try:
        for base, entry in (("python:3.12-slim", None), (f"{name}-base:latest", ["env"])):
            made.append(
                images.build_agent_image(connect(), base, key="none-1", install=lambda _: None, labels={}, tag=name)
            )
            config = docker_client.api.inspect_image(f"{name}:latest")["Config"]
            before = docker_client.api.inspect_image(base)["Config"]
            assert (config["Entrypoint"] or None) == entry and config["Cmd"] == before["Cmd"]
    finally:
        for image in (name, f"{name}-base"):
            docker_client.api.remove_image(image, force=True)
    assert made == [name, name]


@pytest.mark.docker
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "side_calls"), [("pi", 0), ("claude", 1), ("codex", 0)])
def test_an_agent_of_each_dialect_leaves_a_training_grade_rollout(
    tmp_path: Path, docker_client: object, name: str, side_calls: int
) -> None:
    check_whole(scripted(tmp_path, name), side_calls=side_calls)


def too_long(body: Body) -> Said:
    raise ValueError("This model's maximum context length is 4096 tokens. However, your request has 4218 input tokens.")


@pytest.mark.docker
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "words"), [("claude", "Prompt is too long"), ("codex", "maximum context length is 4096")]
)
def test_a_prompt_that_outgrew_the_engine_ends_the_turn_in_the_agents_dialect(
    tmp_path: Path, docker_client: object, name: str, words: str
) -> None:
    run = scripted(tmp_path, name, too_long, refuses=True)
    result = run.seen.result
    assert result["error_category"] == "provider_rejected" and words in result["error"]
    assert result["rewards"] == {"reward": 0.0}
    # A title of Claude Code may still be on its way when the turn is over.
    assert {call.status_code for call in run.calls if call.outcome != "aborted"} == {400}
    assert len(run.calls) <= 4, "it tried again and again"
