"""The agents, one small file each. A new one is a new file with a class derived from `Agent`, and its name in `AGENTS`.

An agent defines how it is installed, how it is pointed at a model, how it is started and how its work is recorded.
"""

from __future__ import annotations

import difflib

from sandbox.agents.agent_run import AgentRun, Model
from sandbox.agents.base import Agent
from sandbox.agents.claude import Claude
from sandbox.agents.codex import Codex
from sandbox.agents.gemini import Gemini
from sandbox.agents.mini import Mini
from sandbox.agents.mini_swe import MiniSweAgent
from sandbox.agents.nop import Nop
from sandbox.agents.opencode import OpenCode
from sandbox.agents.oracle import Oracle
from sandbox.agents.pi import Pi
from sandbox.agents.qwen import QwenCode
from sandbox.errors import JobError

AGENTS: tuple[Agent, ...] = (
    Oracle(),
    Nop(),
    Mini(),
    Pi(),
    Claude(),
    Codex(),
    OpenCode(),
    QwenCode(),
    MiniSweAgent(),
    Gemini(),
)

__all__ = ["AGENTS", "Agent", "AgentRun", "Model", "find_agent"]


def find_agent(name: str) -> Agent:
    """The agent with that name or alias. Raises `JobError` with the closest known name."""
    known = {word: agent for agent in AGENTS for word in (agent.name, *agent.aliases)}
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known))}"
    raise JobError(f"unknown agent {name!r}; {hint}")
