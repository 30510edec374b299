"""Rows beside the journal: BenchFlow's shapes, an unscored rollout that is no zero, and what older rows mean."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from capture.journal.files import read_jsonl
from capture.journal.trainer_files import metrics, results_row, reward_of_row, verifiers_row, write_verifiers

EVENTS: list[dict[str, Any]] = [
    {"type": "user_message", "text": "Write 42."},
    {"type": "agent_thought", "text": "A file."},
    {"type": "tool_call", "title": "write", "status": "completed",
     "content": [{"type": "content", "content": {"type": "text", "text": "ok"}}, {"type": "diff"}, None]},
    {"type": "agent_message", "text": "Done."},
    {"type": "agent_timeout", "reason": "wall-clock"},
]  # fmt: skip


def result(**more: Any) -> dict[str, Any]:
    return {
        "task_name": "write-number", "rollout_name": "write-number__5cfd1b6d", "rewards": {"reward": 1.0},
        "agent": "pi-acp", "model": "vllm/my-policy",
        "agent_result": {"n_calls": 2, "n_input_tokens": 5}, "error": None,
        "verifier_error": None, **more,
    }  # fmt: skip


def test_events_become_a_prompt_and_what_the_agent_did() -> None:
    row = verifiers_row(result(), EVENTS)
    assert row["prompt"] == [{"role": "user", "content": "Write 42."}]
    assert [message["content"] for message in row["completion"]] == ["A file.", "[tool_call: write]\nok", "Done."]
    assert (row["reward"], row["info"]["reward_valid"]) == (1.0, True)


@pytest.mark.parametrize("reward", [None, True, math.nan, math.inf, "1"])
def test_an_unscored_rollout_is_not_zero(reward: Any) -> None:
    report = result(rewards={"reward": reward})
    assert results_row(report, EVENTS)["reward"] is None
    assert verifiers_row(report, EVENTS)["info"]["reward_valid"] is False
    assert reward_of_row(verifiers_row(report, EVENTS)) is None
    assert reward_of_row(results_row(report, EVENTS)) is None
    json.dumps([results_row(report, EVENTS), verifiers_row(report, EVENTS)], allow_nan=False)


def test_a_row_of_benchflow_07_that_ended_in_an_error_has_no_reward() -> None:
    assert reward_of_row({"reward": 0.0, "error": {"error": "x"}, "info": {}}) is None
    assert reward_of_row({"reward": 0.0, "error": None, "info": {}}) == 0.0
    assert reward_of_row({"reward": 0.5, "error": {"error": "x"}}) == 0.5
    assert reward_of_row({"reward": 0.0, "error": {"error": "x"}, "info": {"schema_version": 2}}) == 0.0


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, None),
        ({"error": "timed out"}, "agent_error"),
        ({"verifier_error": "crashed"}, "verifier_error"),
        ({"export_error": "disk full"}, "export_error"),
        ({"partial_trajectory": True}, "partial_trajectory"),
        ({"agent_result": {}}, "missing_healthy_structured_llm_trajectory"),
    ],
)
def test_what_cannot_be_trained_on_says_why(more: dict[str, Any], reason: str | None) -> None:
    info = results_row(result(**more), EVENTS)["info"]
    assert (info["training_ready"], info["training_ready_reason"]) == (reason is None, reason)


def test_metrics_are_finite_numbers() -> None:
    rewards = {"reward": 1, "speed": 0.5, "ok": True, "bad": math.nan, "text": "x"}
    assert metrics(result(rewards=rewards)) == {"reward": 1.0, "speed": 0.5}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trainer/verifiers.jsonl"
    row = verifiers_row(result(), EVENTS)
    write_verifiers(path, row)
    assert list(read_jsonl(path)) == [(0, row)]
