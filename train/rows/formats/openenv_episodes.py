"""`openenv-episodes`: OpenEnv's EpisodeRecord (openenv-core 0.3, openenv 0.10), a folder with results.jsonl.

`reward` is a number there, so an unscored rollout is no episode: it is left out, never written as 0.
"""

from __future__ import annotations

import math
from typing import Any

from train.rollouts.messages import Message, arguments_of
from train.rows.formats import SOURCE, Exchange, Format, Row
from train.rows.formats.trl_sft import with_objects


def row(example: Exchange) -> Row:
    """The fields of `EpisodeRecord`; what it has no field for stands in `extra`."""
    origin = example.origin
    messages = [with_objects(message) for message in (*example.messages, example.reply)]
    rewards = origin.result.get("rewards")
    return {
        "episode_id": origin.rollout,
        "messages": messages,
        "reward": origin.reward,
        "done": origin.result.get("error") is None,
        "tool_trace": tool_trace(messages),
        "metrics": _numbers(origin.result.get("final_metrics")),
        "verify_metrics": _numbers(rewards),
        "artifacts": {},
        "task": origin.task,
        "extra": {
            "agent": origin.agent,
            "model": origin.model,
            "tools": example.tools,
            "source": SOURCE,
            "source_path": origin.journal,
            "source_rollout_dir": origin.rollout_dir,
            "exchange_index": example.line,
            **(origin.signal or {}),
        },
    }


def tool_trace(messages: list[Message]) -> list[dict[str, Any]]:
    """One entry a tool call, with what the tool answered; a call without an answer is not done."""
    answers = {message["tool_call_id"]: message["content"] for message in messages if message["role"] == "tool"}
    return [
        {
            "tool_name": call["function"]["name"],
            "arguments": arguments_of(call),
            "result": {
                "data": answers.get(call["id"]),
                "done": call["id"] in answers,
                "metadata": {"tool_call_id": call["id"]},
                "error": None,
            },
        }
        for message in messages
        for call in message.get("tool_calls", ())
    ]


def _numbers(value: object) -> dict[str, float]:
    items = value.items() if isinstance(value, dict) else ()
    return {
        str(name): float(number)
        for name, number in items
        if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
    }


_TYPES: dict[str, type | tuple[type, ...]] = {
    "episode_id": str,
    "messages": list,
    "reward": (int, float),
    "done": bool,
    "tool_trace": list,
    "metrics": dict,
    "verify_metrics": dict,
    "artifacts": dict,
    "extra": dict,
}


def check(row: Row) -> list[str]:
    """What EpisodeRecord would refuse."""
    problems = [f"{name} is missing" for name in _TYPES if name not in row]
    for name, kind in _TYPES.items():
        if name in row and (not isinstance(row[name], kind) or (name == "reward" and isinstance(row[name], bool))):
            problems.append(f"{name} must be {_said(kind)}")
    unknown = set(row) - set(_TYPES) - {"task"}
    problems += [f"{name} is no field of an episode" for name in sorted(unknown)]
    return problems


def _said(kind: type | tuple[type, ...]) -> str:
    if isinstance(kind, tuple):
        return "a number"
    return {str: "a string", list: "a list", bool: "true or false", dict: "an object"}[kind]


FORMAT = Format(
    name="openenv-episodes",
    says="OpenEnv episode records, one a rollout",
    reads="messages",
    trains="last",
    row=row,
    check=check,
    container="folder",
    file="results.jsonl",
    needs_reward=True,
)
