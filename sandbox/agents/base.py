"""The shape of an agent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sandbox.agents.acp import converse
from sandbox.agents.trajectory import Trajectory
from sandbox.containers.base import Ran, Sandbox, run
from sandbox.errors import AgentError
from sandbox.scoring.hardening import Prepared
from sandbox.tasks.task import Task

HOME = "/opt/benchflow"
#: Tokens of context that an agent is told where --agent-env BENCHFLOW_CONTEXT_WINDOW says nothing.
WINDOW = 128_000
PUT_HOME = 'umask 077; mkdir -p "$HOME/${1%/*}" && cat > "$HOME/$1"'


@dataclass(frozen=True)
class Model:
    """How an agent reaches its model: through the proxy, with a key that opens its own session only."""

    base_url: str
    api_key: str
    name: str

    def env(self) -> dict[str, str]:
        return {
            "BENCHFLOW_PROVIDER_BASE_URL": self.base_url,
            "BENCHFLOW_PROVIDER_API_KEY": self.api_key,
            "BENCHFLOW_PROVIDER_MODEL": self.name,
        }


@dataclass
class AgentRun:
    """One agent at work: where, on what, for how long, and where to write what it does."""

    sandbox: Sandbox
    task: Task
    prepared: Prepared
    prompt: str
    model: Model | None
    #: Of the agent's processes: the model, and what the user passed with --agent-env.
    env: dict[str, str]
    trajectory: Trajectory
    #: `agent/` of the rollout's folder.
    logs: Path
    #: Seconds of wall clock for the prompt.
    budget: float
    #: Called when the agent is up and its clock starts.
    on_begin: Callable[[], None] = lambda: None
    #: The agent's own name for itself, when it says one.
    said_name: str | None = None
    _deadline: float = field(default=0.0)

    def begin(self) -> None:
        """Starts the clock."""
        self._deadline = time.monotonic() + self.budget
        self.on_begin()

    def left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    @property
    def window(self) -> int:
        """Tokens of context that the agent is told its model has: what it shortens its history by."""
        given = self.env.get("BENCHFLOW_CONTEXT_WINDOW", "")
        return int(given) if given.isdecimal() and int(given) else WINDOW

    @property
    def longest_reply(self) -> int:
        """Tokens that an agent is told a reply may have."""
        return min(4096, self.window // 4)

    def put_home(self, files: Mapping[str, str]) -> None:
        """Writes files below the agent's home, as its user and for its eyes only. Raises `AgentError`."""
        for name, text in files.items():
            command = ["sh", "-c", PUT_HOME, "sh", name]
            home = {"HOME": self.prepared.home}
            done = run(self.sandbox, command, user=self.prepared.user, env=home, stdin=text.encode())
            if done.exit_code != 0:
                raise AgentError(f"the agent's settings {name} cannot be written: {done.tail()}", "install_failure")

    def talk(
        self, argv: Sequence[str], env: Mapping[str, str], *, name: str, hint: str = "", model_id: str | None = None,
        meta: dict[str, Any] | None = None,
    ) -> str:  # fmt: skip
        """Starts an agent that speaks ACP, gives it the prompt, and returns its stop reason. Raises `AgentError`."""
        everything = {**env, **self.env, "HOME": self.prepared.home}
        pipe = self.sandbox.open(argv, user=self.prepared.user, env=everything, cwd=self.prepared.workdir)
        try:
            return converse(self, pipe, name=name, hint=hint, model_id=model_id, meta=meta)
        finally:
            pipe.close()

    def out_of_time(self) -> AgentError:
        """The error of a prompt that outran its budget, in BenchFlow's words; the trajectory says it too."""
        self.trajectory.add(
            "agent_timeout", reason="wall_clock", timeout_sec=self.budget,
            pending_tool_call_ids=self.trajectory.pending(), terminal_trajectory_complete=False,
        )  # fmt: skip
        return AgentError(f"Agent prompt exceeded wall-clock budget {self.budget:g}s", "timeout")

    def died(self, name: str, done: Ran) -> AgentError:
        """The error of an agent that ended with another code than 0."""
        cause = self.sandbox.cause_of_death(done.exit_code)
        if cause:
            return AgentError(f"{name} {cause[1]}", cause[0])
        tail = done.tail() or "it said nothing"
        if "Resource temporarily unavailable" in tail or "Cannot fork" in tail or "can't start new thread" in tail:
            limit = self.task.sandbox.pids
            return AgentError(f"{name} needed more than the sandbox's {limit} processes: {tail}", "pids_exhausted")
        return AgentError(f"{name} exited with code {done.exit_code}: {tail}")


class Agent(Protocol):
    """Where `version` is not None, `install` is run once an image and the result is kept under that version."""

    @property
    def name(self) -> str: ...
    @property
    def aliases(self) -> tuple[str, ...]: ...
    @property
    def about(self) -> str: ...  # one line for `bench agents list`
    @property
    def needs_model(self) -> bool: ...
    @property
    def version(self) -> str | None: ...

    def install(self, sandbox: Sandbox) -> None:
        """As root, before the clock, with the internet. Raises `InstallError`."""

    def act(self, agent_run: AgentRun) -> str:
        """Does the task and returns why it stopped, `end_turn` usually. Raises `AgentError`."""
