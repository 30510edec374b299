"""`verl-sft`: verl's MultiTurnSFTDataset, a Parquet file with messages and tools as structs; every reply is trained.

verl 0.9 passes tools and messages to the template as it reads them: a JSON string stays a string there. The structs of
a column have the keys of all rows, null where a row has none. So arguments are structs only where that adds no null,
and the writer says when the tools of a file differ; `train.rows.parquet` decides both when it has seen every row.
"""

from __future__ import annotations

from typing import Any

from train.rollouts.messages import Message
from train.rows.formats import prime_sft
from train.rows.formats.base import ConversationExample, Format, Row, conversation_provenance
from train.rows.formats.trl_sft import with_objects


def row(example: ConversationExample) -> Row:
    """`messages` (list of structs), `tools` (list of structs, or null), then the origin."""
    made: Row = {
        "messages": [with_objects(message) for message in prime_sft.messages_of(example)],
        "tools": example.tools or None,
    }
    if isinstance(thinks := (example.template_kwargs or {}).get("enable_thinking"), bool):
        made["enable_thinking"] = thinks
    return made | conversation_provenance(example)


def check(row: Row) -> list[str]:
    """What is wrong with a row, in BenchFlow's words; nulls that Parquet filled in are not keys."""
    if isinstance(row.get("tools"), str):
        return ["tools must be a list of structs; verl does not parse a JSON string"]
    return prime_sft.check(row)


def conversation(row: Row) -> tuple[list[Message], list[Any]]:
    return row["messages"], row["tools"] or []


FORMAT = Format(
    name="verl-sft",
    summary="verl multi-turn sft, Parquet, one row per branch",
    reads="messages",
    trains="all",
    row=row,
    check=check,
    conversation=conversation,
    container="parquet",
    file="train.parquet",
)
