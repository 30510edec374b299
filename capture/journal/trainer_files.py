"""The rows that trainers read beside the journal: `trainer/verifiers.jsonl` and `results.jsonl`, one row per rollout.

Both are made from the agent's own events (`trajectory/acp_trajectory.jsonl`), in the format BenchFlow writes. Neither
contains token ids; those are in the journal. Read the files with `capture.journal.read_jsonl`, and the rewards with
`reward_of_row`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from capture.journal.files import write_jsonl

Events = list[dict[str, Any]]
Message = dict[str, Any]

#: `training_ready_reason` of a rollout that is no training data because it was run to evaluate the policy.
EVALUATION_REASON = "evaluation"


def verifiers_row(result: dict[str, Any], events: Events) -> dict[str, Any]:
    """One verifiers-style row. An unscored rollout has reward 0.0 and `info.reward_valid` false: check the latter."""
    prompt, completion = messages(events)
    reward = reward_of(result)
    return {
        "example_id": 0,
        "prompt": prompt,
        "completion": completion,
        "reward": reward if reward is not None else 0.0,
        "metrics": metrics(result),
        "is_completed": result.get("error") is None,
        "is_truncated": bool(result.get("partial_trajectory")),
        "info": _purpose(result)
        | {
            "task_id": result.get("task_name"),
            "environment": result.get("sandbox"),
            "model": result.get("model"),
            "reward_valid": reward is not None,
            "reward_metadata": {
                "items": [],
                "events": [],
                "error": result.get("verifier_error") or result.get("error"),
                "space": "output",
                "granularity": "terminal",
            },
        },
    }


def results_row(
    result: dict[str, Any], events: Events, *, training_ready_reason: str | None = None, example_id: int = 0
) -> dict[str, Any]:
    """One `results.jsonl` row, schema version 2: the reward of an unscored rollout is null."""
    prompt, completion = messages(events)
    reason = training_ready_reason or not_ready(result)
    usage = result.get("agent_result") or {}
    error = result.get("error") or result.get("verifier_error")
    return {
        "example_id": example_id,
        "prompt": prompt,
        "completion": completion,
        "info": _purpose(result)
        | {
            "task_id": result.get("task_name"),
            "task_name": result.get("task_name"),
            "rollout_name": result.get("rollout_name"),
            "environment": result.get("sandbox"),
            "agent": result.get("agent"),
            "agent_name": result.get("agent_name"),
            "model": result.get("model"),
            "source": "benchflow",
            "rollout_dir": result.get("rollout_name"),
            "training_ready": reason is None,
            "training_ready_reason": reason,
            "schema_version": 2,
        },
        "reward": reward_of(result),
        "error": None if error is None else {"error": error, "error_chain_str": error, "error_chain_repr": repr(error)},
        "timing": result.get("timing") or {},
        "is_completed": result.get("error") is None,
        "is_truncated": bool(result.get("partial_trajectory")),
        "stop_condition": "agent_completed" if result.get("error") is None else result.get("error_category"),
        "metrics": metrics(result),
        "tool_defs": [],
        "token_usage": {
            "input_tokens": usage.get("n_input_tokens"),
            "output_tokens": usage.get("n_output_tokens"),
            "final_input_tokens": None,
            "final_output_tokens": None,
            "total_tokens": usage.get("total_tokens"),
        },
        "score": reward_of(result),
        "total_tool_calls": result.get("n_tool_calls", 0),
        "trajectory": [],
    }


def not_ready(result: dict[str, Any]) -> str | None:
    """Why a rollout's text cannot be trained on, in BenchFlow's words; None when it can."""
    if result.get("export_error"):
        return "export_error"
    if result.get("partial_trajectory"):
        return "partial_trajectory"
    if result.get("error"):
        return "agent_error"
    if result.get("verifier_error"):
        return "verifier_error"
    if not (result.get("agent_result") or {}).get("n_calls"):
        return "missing_healthy_structured_llm_trajectory"
    return EVALUATION_REASON if result.get("purpose") == "eval" else None


def _purpose(result: dict[str, Any]) -> dict[str, Any]:
    """What marks a row of an evaluation, for readers that know `training_ready` alone too."""
    if result.get("purpose") != "eval":
        return {}
    return {"purpose": "eval", "training_ready": False, "training_ready_reason": EVALUATION_REASON}


def write_verifiers(path: Path, row: dict[str, Any]) -> None:
    """Writes `trainer/verifiers.jsonl`, one row."""
    write_jsonl(path, [row])


def messages(events: Events) -> tuple[list[Message], list[Message]]:
    """The agent's events as chat messages: those before its first word, and the rest."""
    found = [message for event in events if (message := _message(event)) is not None]
    first = next((n for n, message in enumerate(found) if message["role"] == "assistant"), len(found))
    return found[:first], found[first:]


def _message(event: dict[str, Any]) -> Message | None:
    kind = event.get("type")
    if kind == "user_message":
        return {"role": "user", "content": event.get("text", "")}
    if kind in ("agent_message", "agent_thought"):
        return {"role": "assistant", "content": event.get("text", "")}
    if kind == "tool_call":
        text = "\n".join(filter(None, (_text(part) for part in event.get("content") or [])))
        return {"role": "assistant", "content": f"[tool_call: {event.get('title', '')}]\n{text}".rstrip()}
    if kind == "oracle":
        return {
            "role": "assistant",
            "content": f"[oracle: {event.get('command', '')}]\n{event.get('stdout', '')}".rstrip(),
        }
    return None


def _text(part: object) -> str:
    inner = part.get("content") if isinstance(part, dict) else None
    text = inner.get("text") if isinstance(inner, dict) else None
    return text if isinstance(text, str) else ""


def reward_of(result: dict[str, Any]) -> float | None:
    """`rewards.reward`; None, never 0, if the rollout was not scored."""
    value = (result.get("rewards") or {}).get("reward")
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)


def reward_of_row(row: dict[str, Any]) -> float | None:
    """The reward of a row of either file; None if its rollout was not scored.

    Rows without `schema_version` 2 (BenchFlow 0.7) have 0.0 for an unscored rollout: if such a row ended in an error
    and does not say that its reward is valid, its 0.0 is not a reward.
    """
    info = row["info"] if isinstance(row.get("info"), dict) else {}
    value = row.get("reward")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    if info.get("reward_valid") is False:
        return None
    old = info.get("schema_version") != 2 and info.get("reward_valid") is not True
    return None if old and value == 0 and row.get("error") is not None else float(value)


def metrics(result: dict[str, Any]) -> dict[str, float]:
    """The rewards that are finite numbers, by name."""
    found = result.get("rewards") or {}
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
