"""Pi for real: installed in a container, over ACP, against a real model, through the proxy. About two minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from capture.journal.journal import JournalReader
from sandbox.agents import find_agent
from sandbox.embedded_engine import EmbeddedEngine
from sandbox.rollouts.model_endpoint import Provider
from sandbox.tasks.task import load_task
from tests.sandbox.support import attempt

TASK = Path(__file__).parents[1] / "sandbox" / "tasks" / "write-number"


@pytest.mark.docker
@pytest.mark.timeout(900)
def test_pi_takes_its_turn_and_every_call_is_captured(
    tmp_path: Path, engine: EmbeddedEngine, docker_client: object
) -> None:
    """What the model makes of the task is its own affair; that the turn ends and its calls are whole is ours."""
    provider = Provider(f"llamacpp/{engine.model}", "llamacpp", engine.model, engine.base_url, None, True)
    seen = attempt(tmp_path, load_task(TASK), find_agent("pi"), provider=provider)
    result = seen.result
    assert result["error"] is None and result["stop_reason"] == "end_turn"
    assert result["agent"] == "pi-acp" and result["agent_name"] == "pi-acp" and result["trajectory_source"] == "acp"
    assert result["rewards"]["reward"] in (0.0, 1.0)
    calls = list(JournalReader(seen.folder / "trajectory" / "llm_trajectory.jsonl"))
    assert calls and all(call.outcome == "ok" for call in calls)
    assert all(call.request_body["stream"] is True for call in calls)
    assert all(call.capture is not None and call.capture.complete for call in calls)
