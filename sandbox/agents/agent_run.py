"""One agent at work: its sandbox, its task, its clock, and where its logs go."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sandbox.agents.trajectory import Trajectory
from sandbox.containers.base import CommandResult, Sandbox, run
from sandbox.errors import AgentError
from sandbox.scoring.hardening import Prepared
from sandbox.tasks.task import Task

#: Tokens of context that agents are given where --agent-env BENCHFLOW_CONTEXT_WINDOW does not say otherwise.
DEFAULT_CONTEXT_WINDOW = 128_000
WRITE_HOME_FILE = 'umask 077; mkdir -p "$HOME/${1%/*}" && cat > "$HOME/$1"'


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
    #: For the agent's processes: the model, and what the user passed with --agent-env.
    env: dict[str, str]
    trajectory: Trajectory
    #: `agent/` of the rollout's folder.
    logs: Path
    #: Wall clock of the prompt in seconds.
    budget: float
    #: Seconds for each answer before the prompt, when the agent speaks ACP.
    handshake_seconds: float = 60.0
    #: Called when the agent is up and its clock starts.
    on_begin: Callable[[], None] = lambda: None
    #: The name that the agent reports for itself.
    reported_name: str | None = None
    _deadline: float = field(default=0.0)

    def begin(self) -> None:
        """Starts the clock."""
        self._deadline = time.monotonic() + self.budget
        self.on_begin()

    def seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    @property
    def context_window(self) -> int:
        """Tokens of context that the agent takes its model to have; it shortens its history to fit."""
        given = self.env.get("BENCHFLOW_CONTEXT_WINDOW", "")
        return int(given) if given.isdecimal() and int(given) else DEFAULT_CONTEXT_WINDOW

    @property
    def max_reply_tokens(self) -> int:
        return min(4096, self.context_window // 4)

    def put_home(self, files: Mapping[str, str]) -> None:
        """Writes files below the agent's home, owned and readable by its user only. Raises `AgentError`."""
        for name, text in files.items():
            command = ["sh", "-c", WRITE_HOME_FILE, "sh", name]
            home = {"HOME": self.prepared.home}
            done = run(self.sandbox, command, user=self.prepared.user, env=home, stdin=text.encode())
            if done.exit_code != 0:
                raise AgentError(f"the agent's settings {name} cannot be written: {done.tail()}", "install_failure")

    def out_of_time(self) -> AgentError:
        """The error of a prompt that exceeded its budget, in BenchFlow's words; the trajectory records it too."""
        self.trajectory.add(
            "agent_timeout", reason="wall_clock", timeout_sec=self.budget,
            pending_tool_call_ids=self.trajectory.pending(), terminal_trajectory_complete=False,
        )  # fmt: skip
        return AgentError(f"Agent prompt exceeded wall-clock budget {self.budget:g}s", "timeout")

    def died(self, name: str, result: CommandResult) -> AgentError:
        """The error of an agent that exited with a code other than 0."""
        cause = self.sandbox.cause_of_death(result.exit_code)
        if cause:
            return AgentError(f"{name} {cause[1]}", cause[0])
        tail = result.tail() or "it printed nothing"
        if "Resource temporarily unavailable" in tail or "Cannot fork" in tail or "can't start new thread" in tail:
            limit = self.task.sandbox.pids
            return AgentError(f"{name} needed more than the sandbox's {limit} processes: {tail}", "pids_exhausted")
        return AgentError(f"{name} exited with code {result.exit_code}: {tail}")
