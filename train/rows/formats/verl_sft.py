"""`verl-sft`: verl's MultiTurnSFTDataset, a Parquet file with messages and tools as structs; every reply is trained.

verl 0.9 hands tools and messages to the template as it reads them; a JSON string stays a string there. Structs of one
column have the keys of all rows, null where a row has none: so arguments are structs only where that adds no null, and
the writer says when the tools of a file differ. `train.output` decides both when it has seen every row.
"""

from __future__ import annotations

from train.rows.formats import Exchange, Format, Row, prime_sft, provenance_of_exchange
from train.rows.formats.trl_sft import with_objects


def row(example: Exchange) -> Row:
    """`messages` list of structs, `tools` list of structs, then where it comes from."""
    made: Row = {
        "messages": [with_objects(message) for message in prime_sft.conversation(example)],
        "tools": example.tools,
    }
    if isinstance(thinks := (example.template_kwargs or {}).get("enable_thinking"), bool):
        made["enable_thinking"] = thinks
    return made | provenance_of_exchange(example)


def check(row: Row) -> list[str]:
    """What is wrong with a row, in BenchFlow's words; nulls that Parquet filled in are no keys."""
    if isinstance(row.get("tools"), str):
        return ["tools must be a list of structs; verl does not parse a JSON string"]
    return prime_sft.check(row)


FORMAT = Format(
    name="verl-sft",
    says="verl multi-turn sft, Parquet, one row a branch",
    reads="messages",
    trains="all",
    row=row,
    check=check,
    container="parquet",
    file="train.parquet",
)
