"""The formats that `bench train convert` writes: one file a format, all of the same shape.

Each module has `FORMAT`, a `Format` with two functions: `row`, from an example to the row that the trainer loads, and
`check`, from a row to what is wrong with it. Message formats are given an `Exchange`, exact formats a `Tokens`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Literal

import orjson

from capture.sequences.sequences import TokenSequence
from train.errors import BadInput
from train.rollouts.messages import Message

Row = dict[str, Any]

SOURCE = "benchflow-llm-trajectory"

#: In the order they are offered; each has a file of its name, with _ for -.
NAMES = ("prime-sft", "trl-sft", "verl-sft", "skyrl-sft", "openenv-episodes", "trl-sft-ids", "trl-grpo")


class LeftOut(Exception):
    """An example that a format cannot hold; the text is the name of the reason (`train.reasons`)."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a row comes from: the columns that every row carries beside the trainer's own."""

    reward: float | None
    task: str | None
    agent: str | None
    model: str | None
    rollout: str
    rollout_dir: str
    journal: str
    #: What the group says of the rollout (`advantage`, `group`, ...); None without --group-advantage.
    signal: dict[str, Any] | None = None
    result: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A conversation that ends in a reply, as plain chat. `line` is the call's line in the journal, from 0."""

    origin: Origin
    line: int
    purpose: str
    messages: list[Message]
    reply: Message
    tools: list[dict[str, Any]]
    usage: dict[str, Any] | None = None
    sampling: Any = None
    finish_reason: str | None = None
    template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """A token sequence of one rollout: exactly what was sampled, in its context. `sampling` has one entry a call."""

    origin: Origin
    sequence: TokenSequence
    segment: int
    sampling: list[Any]


@dataclass(frozen=True, slots=True)
class Format:
    """How one format is written and checked.

    `reads` says what an example is: `messages` (`Exchange`) or `ids` (`Tokens`). `trains` says which replies of a row
    a trainer learns from with the settings the format is made for: with `all`, the row mode `rollout` makes one row a
    branch of the conversation, otherwise one row a rollout. `file` is the file's name where a folder is given.
    """

    name: str
    says: str
    reads: Literal["messages", "ids"]
    trains: Literal["last", "all", "sampled"]
    row: Callable[[Any], Row]
    check: Callable[[Row], list[str]]
    container: Literal["jsonl", "parquet", "folder"] = "jsonl"
    file: str = "train.jsonl"
    #: In row mode `rollout` a rollout that would be several rows is left out.
    one_row_a_rollout: bool = False
    needs_reward: bool = False
    #: Whether what was not plainly sampled is told once a rollout: where importance ratios are built on the logprobs.
    tells_sampling: bool = False


@cache
def find_format(name: str) -> Format:
    """The format of that name. Raises `BadInput`."""
    if name not in NAMES:
        listed = ", ".join(f"'{one}'" for one in NAMES[:-1])
        raise BadInput(f"--format must be {listed} or '{NAMES[-1]}', not '{name}'")
    found: Format = import_module(f"train.rows.formats.{name.replace('-', '_')}").FORMAT
    return found


def provenance(origin: Origin) -> Row:
    """The columns of every row that say where it comes from and what it earned."""
    row: Row = {
        "reward": origin.reward,
        "task_id": origin.task,
        "agent": origin.agent,
        "model": origin.model,
        "source": SOURCE,
        "source_path": origin.journal,
        "source_rollout_dir": origin.rollout_dir,
        "rollout": origin.rollout,
    }
    if origin.signal is not None:
        row |= origin.signal
    return row


def provenance_of_exchange(example: Exchange) -> Row:
    row = provenance(example.origin) | {"exchange_index": example.line, "call_purpose": example.purpose}
    if example.usage:
        row["token_usage"] = example.usage
    if example.sampling is not None:
        row["sampling"] = as_text(example.sampling)
    return row


def as_text(value: Any) -> str:
    """A value as a JSON string: a column of one type, whatever the rows hold, that no loader fills with nulls."""
    return orjson.dumps(value).decode()
