"""`openenv-episodes`: OpenEnv's EpisodeRecord (openenv-core 0.3, openenv 0.10), a folder with results.jsonl.

`reward` is a number there, so an unscored rollout is left out, never written as 0.
"""

from __future__ import annotations

import math
from typing import Any

from train.rollouts.messages import Message, arguments_of
from train.rows.formats.base import SOURCE, ConversationExample, Format, Row
from train.rows.formats.trl_sft import with_objects


def row(example: ConversationExample) -> Row:
    """The fields of `EpisodeRecord`; whatever it has no field for is in `extra`."""
    origin = example.origin
    messages = [with_objects(message) for message in (*example.messages, example.reply)]
    rewards = origin.result.get("rewards")
    return {
        "episode_id": origin.id,
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
            **({"tools": example.tools} if example.tools else {}),
            "source": SOURCE,
            "source_path": origin.journal,
            "source_rollout_dir": origin.rollout_dir,
            "exchange_index": example.line,
            **(origin.signal or {}),
        },
    }


def tool_trace(messages: list[Message]) -> list[dict[str, Any]]:
    """One entry per tool call, with what the tool answered; a call without an answer is not done."""
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
            problems.append(f"{name} must be {_type_name(kind)}")
    unknown = set(row) - set(_TYPES) - {"task"}
    problems += [f"{name} is not a field of an episode" for name in sorted(unknown)]
    return problems


def conversation(row: Row) -> tuple[list[Message], list[Any]]:
    return row["messages"], row["extra"].get("tools") or []


def _type_name(kind: type | tuple[type, ...]) -> str:
    if isinstance(kind, tuple):
        return "a number"
    return {str: "a string", list: "a list", bool: "true or false", dict: "an object"}[kind]


FORMAT = Format(
    name="openenv-episodes",
    summary="OpenEnv episode records, one per rollout",
    reads="messages",
    trains="last",
    row=row,
    check=check,
    conversation=conversation,
    container="folder",
    file="results.jsonl",
    needs_reward=True,
)
