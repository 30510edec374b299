"""The agents, one small file each. A new one is a new file of the same shape and a line here.

An agent says how it is installed, how it is pointed at a model, how it is launched, and how what it did is read.
"""

from __future__ import annotations

import difflib

from sandbox.agents.base import Agent, AgentRun, Model
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
    """The agent of that name or alias. Raises `JobError` with the one that was probably meant."""
    known = {word: agent for agent in AGENTS for word in (agent.name, *agent.aliases)}
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known))}"
    raise JobError(f"unknown agent {name!r}; {hint}")
