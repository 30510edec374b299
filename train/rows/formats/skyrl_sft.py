"""`skyrl-sft`: SkyRL's SFT trainer, which loads a folder with this file by its name.

One row per branch suits `train_on_what: all_assistant_messages`; `--row-mode exchange` suits SkyRL's default,
`last_assistant_message`. A row ends with the assistant: SkyRL 0.3 drops it otherwise.
"""

from __future__ import annotations

from train.rows.formats import prime_sft
from train.rows.formats.base import ConversationExample, Format, Row, conversation_provenance, tools_text


def row(example: ConversationExample) -> Row:
    """`messages`, `tools` (a JSON string, or null), then the origin."""
    return {
        "messages": prime_sft.messages_of(example),
        "tools": tools_text(example),
    } | conversation_provenance(example)


def check(row: Row) -> list[str]:
    """What is wrong with a row: BenchFlow's checks, and the last message must be the assistant's."""
    problems = prime_sft.check(row)
    if not problems and row["messages"][-1].get("role") != "assistant":
        problems.append("the last message must be the assistant's; SkyRL drops the row otherwise")
    return problems


FORMAT = Format(
    name="skyrl-sft",
    summary="SkyRL sft, one row per branch",
    reads="messages",
    trains="all",
    row=row,
    check=check,
    conversation=prime_sft.conversation,
)
