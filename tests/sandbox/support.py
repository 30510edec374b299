"""What the sandbox tests share: tasks made on the spot, an agent that does what a test tells it, and a run of both."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandbox.agents import Agent, AgentRun
from sandbox.containers.base import run
from sandbox.containers.pool import DockerPool, PoolFactory
from sandbox.rollouts.job import JobOptions, JobOutcome, run_job
from sandbox.rollouts.model_endpoint import Provider
from sandbox.rollouts.plan import RolloutPlan
from sandbox.rollouts.progress import Progress
from sandbox.tasks.task import Task, load_task

#: Seconds after which a test gives up waiting: only something that hangs takes so long, also on a loaded machine.
WAIT = 900.0
#: Passes when answer.txt holds 42; says nothing about how it came there.
TEST_SH = """#!/bin/bash
if [ "$(tr -d '[:space:]' < "$PWD/answer.txt" 2>/dev/null)" = "42" ]; then
  echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def make_task(
    folder: Path, *, name: str = "job-task", test: str = TEST_SH, sandbox: str = "", agent: str = "",
    verifier: str = "", **files: str,
) -> Task:  # fmt: skip
    """A task in python:3.12-slim whose sections get the given YAML lines."""
    head = ["---", "sandbox:", "  docker_image: python:3.12-slim" if "docker_image" not in sandbox else ""]
    head += [f"  {line}" for line in sandbox.splitlines()]
    for section, lines in (("agent", agent), ("verifier", verifier)):
        if lines:
            head += [f"{section}:", *(f"  {line}" for line in lines.splitlines())]
    text = "\n".join([line for line in head if line] + ["---", "## prompt", "", "Write 42 to answer.txt."]) + "\n"
    write_files(folder / name, {"task.md": text, "verifier/test.sh": test, **files})
    return load_task(folder / name)


class ShellAgent(Agent):
    """A double: an agent that runs one shell script as its own user."""

    name = "shell"

    def __init__(self, script: str, *, needs_model: bool = False, user: str | None = None) -> None:
        self.script, self.needs_model, self.user = script, needs_model, user
        self.said = ""

    def act(self, agent_run: AgentRun) -> str:
        agent_run.begin()
        done = run(
            agent_run.sandbox,
            ["bash", "-c", self.script],
            user=self.user or agent_run.prepared.user,
            env=agent_run.env,
            cwd=agent_run.prepared.workdir,
            timeout=agent_run.seconds_left(),
        )
        self.said = done.output
        if done.timed_out:
            raise agent_run.out_of_time()
        if done.exit_code != 0:
            raise agent_run.died(self.name, done)
        return "end_turn"


class ByTask(ShellAgent):
    """A double: many shell agents in one, a script for each task's name."""

    def __init__(self, scripts: dict[str, str]) -> None:
        super().__init__("")
        self.scripts, self.heard = scripts, dict[str, str]()

    def act(self, agent_run: AgentRun) -> str:
        agent = ShellAgent(self.scripts[agent_run.task.name])
        try:
            return agent.act(agent_run)
        finally:
            self.heard[agent_run.task.name] = agent.said


class Seen:
    """One rollout that was run: its result and its folder."""

    def __init__(self, outcome: JobOutcome, folder: Path, text: str, lines: str) -> None:
        self.outcome, self.folder, self.said, self.lines = outcome, folder, text, lines
        self.result: dict[str, Any] = json.loads((folder / "result.json").read_text())

    @property
    def reward(self) -> float | None:
        rewards = self.result["rewards"]
        return None if rewards is None else float(rewards["reward"])


def attempt(
    tmp_path: Path, task: Task, agent: Agent | str, *, provider: Provider | None = None, job: str = "job",
    options: Callable[[Path], JobOptions] = lambda jobs: JobOptions(jobs_dir=jobs),
    make_pool: PoolFactory = DockerPool, **plan: Any,
) -> Seen:  # fmt: skip
    """Runs one task once in Docker and returns what came of it."""
    who = ShellAgent(agent) if isinstance(agent, str) else agent
    out = io.StringIO()
    outcome = run_job(
        RolloutPlan(job=job, agent=who, provider=provider, **plan), [task], options(tmp_path / "jobs"),
        Progress(out, live=False), make_pool=make_pool,
    )  # fmt: skip
    folders = sorted((tmp_path / "jobs" / job).glob("*/result.json"), key=lambda p: p.stat().st_mtime)
    return Seen(outcome, folders[-1].parent, getattr(who, "said", ""), out.getvalue())


def attempt_all(tmp_path: Path, scripts: dict[str, str], tasks: list[Task]) -> dict[str, Seen]:
    """Runs every task once, four at a time in one job, each with the script of its name."""
    agent, out = ByTask(scripts), io.StringIO()
    plan = RolloutPlan(job="all", agent=agent, provider=None)
    outcome = run_job(plan, tasks, JobOptions(jobs_dir=tmp_path / "jobs"), Progress(out, live=False))
    folders = {
        path.parent.name.rpartition("__")[0]: path.parent for path in (tmp_path / "jobs").glob("all/*/result.json")
    }
    return {name: Seen(outcome, folder, agent.heard.get(name, ""), out.getvalue()) for name, folder in folders.items()}


def bridge_address() -> str:
    command = ["ip", "-4", "-o", "addr", "show", "docker0"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[3].partition("/")[0]
