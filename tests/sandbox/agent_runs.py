"""What the tests of real agents share: a run of one against the scripted engine, and what it must leave behind."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capture.journal.call import Call
from capture.journal.journal import JournalReader
from proxy import SessionOptions
from sandbox.agents import find_agent
from sandbox.rollouts.model_endpoint import Provider
from sandbox.tasks.task import load_task
from tests.sandbox.scripted_engine import MODEL, Rewrite, Script, ScriptedEngine, write_the_number
from tests.sandbox.support import Seen, attempt
from train.tokens.coverage import Coverage, coverage

TASK = Path(__file__).parent / "tasks" / "write-number"


@dataclass
class AgentRun:
    """One rollout of a real agent, read back the way `bench train` reads it."""

    seen: Seen
    calls: list[Call]
    covered: Coverage
    #: Bodies that the engine was sent, in order.
    sent: list[dict[str, Any]]

    def explained(self) -> str:
        return "\n".join([self.covered.line, *self.covered.explained])


def scripted(
    tmp_path: Path,
    name: str,
    script: Script = write_the_number,
    *,
    network: str = "public",
    refuses: bool = False,
    model: str = MODEL,
    rewrite: Rewrite | None = None,
    session: SessionOptions | None = None,
    **env: str,
) -> AgentRun:
    """Installs the agent where that was not done yet, and lets it write the number in a container.

    `refuses`: the script raises, which the engine answers with 400; any other run must not have that happen.
    """
    folder = shutil.copytree(TASK, tmp_path / TASK.name)
    text = (folder / "task.md").read_text().replace("sandbox:\n", f"sandbox:\n  network_mode: {network}\n")
    (folder / "task.md").write_text(text)
    with ScriptedEngine(script, model=model, rewrite=rewrite) as engine:
        provider = Provider(f"vllm/{engine.model}", "vllm", engine.model, engine.base_url, None, True)
        seen = attempt(
            tmp_path, load_task(folder), find_agent(name), provider=provider, agent_env=env,
            session=session or SessionOptions(),
        )  # fmt: skip
        assert bool(engine.failed) is refuses, engine.failed
        return read_back(seen, engine.seen)


def read_back(seen: Seen, sent: list[dict[str, Any]]) -> AgentRun:
    calls = list(JournalReader(seen.folder / "trajectory" / "llm_trajectory.jsonl"))
    return AgentRun(seen, calls, next(coverage(seen.folder)), sent)


def check_whole(run: AgentRun, *, side_calls: int = 0, tool_calls: int = 2) -> None:
    """The number is written, every call is exact, and the agent's own calls are one sequence of tokens."""
    result = run.seen.result
    assert result["error"] is None and run.seen.reward == 1.0, result
    assert result["stop_reason"] == "end_turn" and result["n_tool_calls"] == tool_calls
    assert all(call.outcome == "ok" and call.capture is not None and call.capture.complete for call in run.calls)
    assert run.covered.training_grade, run.explained()
    assert len(run.calls) == 3 + side_calls and "2/2 prompts extend" in run.covered.line, run.explained()
