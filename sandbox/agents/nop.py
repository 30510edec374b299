"""`nop`: does nothing. A task that passes with it is broken."""

from __future__ import annotations

from sandbox.agents.base import AgentRun
from sandbox.containers.base import Sandbox


class Nop:
    name = "nop"
    aliases: tuple[str, ...] = ()
    about = "does nothing: a task that passes with it is broken"
    needs_model = False
    version = None

    def install(self, sandbox: Sandbox) -> None:
        pass

    def act(self, agent_run: AgentRun) -> str:
        agent_run.begin()
        return "end_turn"
