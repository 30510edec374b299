"""What all rollouts of a job have in common."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from proxy import SessionOptions
from sandbox.agents import Agent
from sandbox.rollouts.model_endpoint import Provider
from sandbox.tasks.task import Task

DEFAULT_BUDGET = 900.0
#: Options of sessions that the provider gives, once for the job's proxy.
SHARED = frozenset({"upstream", "upstream_key", "engine", "model", "capture", "top_logprobs"})
CONTROLS = ("force_sampling", "max_output_tokens", "grammars", "max_calls", "max_sampled_tokens", "max_seconds")


@dataclass(frozen=True)
class RolloutPlan:
    """Which agent, with which model and settings."""

    job: str
    agent: Agent
    provider: Provider | None
    #: Variables for the agent's processes, without those that say where the model is.
    agent_env: dict[str, str] = field(default_factory=dict)
    #: Seconds for every prompt; None: the task's own, else `DEFAULT_BUDGET`.
    timeout: float | None = None
    #: `shared`, `separate`, or None for the task's own mode.
    verifier_sandbox: str | None = None
    #: Options of each rollout's session; its engine, and whether it captures, are the provider's.
    session: SessionOptions = field(default_factory=SessionOptions)

    @property
    def model(self) -> str | None:
        """As given with `-m`."""
        return self.provider.model if self.provider else None

    @property
    def capture(self) -> bool:
        return bool(self.provider and self.provider.capture)

    @property
    def controls(self) -> dict[str, Any]:
        """The limits and forced values of its sessions, those that are set."""
        values = {name: getattr(self.session, name) for name in CONTROLS}
        return {name: value for name, value in values.items() if value not in (None, {}, "flag")}

    def own_session_options(self) -> dict[str, Any]:
        """The options of a rollout's session that the engine does not settle for the whole job."""
        names = {option.name for option in fields(SessionOptions)} - SHARED
        return {name: value for name in names if (value := getattr(self.session, name)) is not None}

    def budget(self, task: Task) -> float:
        """Seconds for the task's prompt."""
        return self.timeout or task.agent.timeout_sec or DEFAULT_BUDGET

    def verifier_mode(self, task: Task) -> str:
        return self.verifier_sandbox or task.verifier.sandbox_mode or "shared"
