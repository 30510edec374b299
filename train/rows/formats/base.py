"""What a format is: how an example becomes a row, what is wrong with a row, and how its trainer reads one.

Message formats get a `ConversationExample`, exact formats a `TokenExample`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import orjson

from capture.sequences.sequences import TokenSequence
from train.rollouts.messages import Message

Row = dict[str, Any]

SOURCE: Final = "benchflow-llm-trajectory"


class MalformedArguments(Exception):
    """A tool call's arguments are not a JSON object, and the format's trainer parses them."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a row comes from: the columns that every row has besides the trainer's own."""

    #: Unique within one conversion; trials of a run have rollouts, and jobs, of the same name.
    id: str
    reward: float | None
    task: str | None
    agent: str | None
    model: str | None
    rollout: str
    rollout_dir: str
    journal: str
    #: The columns that the rollout's group adds (`advantage`, `group`, ...); None without --group-advantage.
    signal: dict[str, Any] | None = None
    #: The rollout's `result.json`.
    result: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConversationExample:
    """A conversation that ends in a reply, as plain chat. `line` is the call's 0-based line in the journal."""

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
class TokenExample:
    """A token sequence of one rollout: exactly what was sampled, in its context. `sampling` has one entry per call: its
    parameters, and what its logprobs mean."""

    origin: Origin
    sequence: TokenSequence
    segment: int
    sampling: list[Any]


@dataclass(frozen=True, slots=True)
class Format:
    """How one format is written, checked and read.

    `reads` says what an example is: `messages` (`ConversationExample`) or `ids` (`TokenExample`). `trains` says which
    replies of a row a trainer learns from with the settings the format is made for: with `all`, the row mode `rollout`
    makes one row per branch of the conversation, otherwise one row per rollout. `file` is the file's name where a
    folder is given.
    """

    name: str
    summary: str
    reads: Literal["messages", "ids"]
    trains: Literal["last", "all", "sampled"]
    row: Callable[[Any], Row]
    #: What is wrong with a row, in sentences.
    check: Callable[[Row], list[str]]
    #: Messages and tools of a row as the trainer passes them to the chat template; None for rows of ids.
    conversation: Callable[[Row], tuple[list[Message], list[Any]]] | None = None
    container: Literal["jsonl", "parquet", "folder"] = "jsonl"
    file: str = "train.jsonl"
    #: In row mode `rollout`, a rollout that would be several rows is left out.
    one_row_a_rollout: bool = False
    needs_reward: bool = False
    #: Whether convert says, once per rollout, that sampling was not plain: for trainers that use importance ratios.
    notes_sampling: bool = False


def provenance(origin: Origin) -> Row:
    """The columns of every row that say where it comes from and what reward it earned."""
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


def conversation_provenance(example: ConversationExample) -> Row:
    row = provenance(example.origin) | {"exchange_index": example.line, "call_purpose": example.purpose}
    if example.usage:
        row["token_usage"] = example.usage
    if example.sampling is not None:
        row["sampling"] = as_text(example.sampling)
    return row


def tools_text(example: ConversationExample) -> str | None:
    """The tools as a JSON string; None where the call offered none: `"[]"` would make templates announce tools."""
    return as_text(example.tools) if example.tools else None


def as_text(value: Any) -> str:
    """A value as a JSON string: a column of one type, whatever the rows hold, that no loader fills with nulls."""
    return orjson.dumps(value).decode()
