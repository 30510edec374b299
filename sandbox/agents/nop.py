"""`nop`: does nothing. A task that passes with it is broken."""

from __future__ import annotations

from sandbox.agents.agent_run import AgentRun
from sandbox.agents.base import Agent


class Nop(Agent):
    name = "nop"
    about = "does nothing: a task that passes with it is broken"
    needs_model = False

    def act(self, agent_run: AgentRun) -> str:
        agent_run.begin()
        return "end_turn"
