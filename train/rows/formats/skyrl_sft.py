"""`skyrl-sft`: SkyRL's SFT trainer, which loads a folder with this file by its name.

One row a branch suits `train_on_what: all_assistant_messages`; `--row-mode exchange` suits SkyRL's default,
`last_assistant_message`. A row ends with the assistant, or SkyRL 0.3 would drop it.
"""

from __future__ import annotations

from train.rows.formats import Exchange, Format, Row, as_text, prime_sft, provenance_of_exchange


def row(example: Exchange) -> Row:
    """`messages`, `tools` JSON string, then where it comes from."""
    return {
        "messages": prime_sft.conversation(example),
        "tools": as_text(example.tools),
    } | provenance_of_exchange(example)


def check(row: Row) -> list[str]:
    """What is wrong with a row: BenchFlow's checks, and the last message must be the assistant's."""
    problems = prime_sft.check(row)
    if not problems and row["messages"][-1].get("role") != "assistant":
        problems.append("the last message must be the assistant's; SkyRL drops the row otherwise")
    return problems


FORMAT = Format(
    name="skyrl-sft",
    says="SkyRL sft, one row a branch",
    reads="messages",
    trains="all",
    row=row,
    check=check,
)
