"""The types that `datasets.load_dataset("json")` gives the columns of a file of rows, nested fields included.

It reads 10 MiB and the rest of the line, takes the types from these rows, and casts all later rows to them (datasets
5.2, `packaged_modules/json`; huggingface/datasets#7092, #7222). A field that is null, empty or absent so far and has a
value later makes the whole file unreadable. A field with nothing but dates becomes one of timestamps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import orjson

#: The bytes of a file that decide over its types; the row that begins before their end belongs to them.
CHUNK: Final = 10 << 20
MAX_LEVELS: Final = 62
#: A kind -> the one which can hold its values, so that it may come later.
_HELD_BY: Final = {"integer": "number", "date": "string"}
#: Columns in which a string that became a timestamp would break the chat template.
_MESSAGES: Final = ("messages", "prompt", "completion")
#: What Arrow's JSON reader takes for a timestamp (pyarrow 26).
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d(?:[ T]\d\d(?::\d\d(?::\d\d)?)?)?(?:Z|[+-]\d\d:\d\d)?")

#: A field, as in `messages[].tool_calls[].function.name`, and the kind of its values.
FieldKind = tuple[str, str]


@dataclass(slots=True)
class ColumnTypes:
    """Where in a file each field has its first value of each kind."""

    first: dict[FieldKind, int] = field(default_factory=dict)

    def add(self, row: Mapping[str, Any], offset: int) -> list[FieldKind]:
        """Takes note of a row that begins at `offset` bytes; returns what is new in it."""
        new = [found for found in set(_kinds(row, "")) if found not in self.first]
        self.first.update(dict.fromkeys(new, offset))
        return new

    def forget(self, offset: int) -> None:
        """Forgets all rows from `offset` on."""
        self.first = {found: at for found, at in self.first.items() if at < offset}

    def late(self) -> dict[FieldKind, int]:
        """What the rows of the first `CHUNK` bytes do not show, with the offset of the first row that does."""
        return {
            (path, kind): at
            for (path, kind), at in self.first.items()
            if at >= CHUNK and self.first.get((path, _HELD_BY.get(kind, "")), CHUNK) >= CHUNK
        }

    def dates(self) -> list[str]:
        """The fields of messages whose texts are all dates."""
        return sorted(
            path
            for path, kind in self.first
            if kind == "date" and (path, "string") not in self.first and path.startswith(_MESSAGES)
        )


def too_deep(path: str) -> bool:
    """Whether a field is below more lists and objects than Arrow's schemas have levels (pyarrow 26)."""
    return path.count(".") + path.count("[]") > MAX_LEVELS


def _kinds(value: Any, path: str) -> Iterator[FieldKind]:
    """The kinds of all values in a row; null, and what an empty list or object would hold, has none."""
    if isinstance(value, dict):
        if path:
            yield path, "object"
        for name, inner in value.items():
            yield from _kinds(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list | tuple):
        yield path, "list"
        path += "[]"
        if set(map(type, value)) <= {int, float}:  # token ids: many
            yield from ((path, _NUMBERS[kind]) for kind in set(map(type, value)))
        else:
            for inner in value:
                yield from _kinds(inner, path)
    elif isinstance(value, str):
        yield path, "date" if _is_date(value) else "string"
    elif isinstance(value, bool):
        yield path, "boolean"
    elif isinstance(value, int):
        yield path, "integer" if -(2**63) <= value < 2**63 else "number"
    elif isinstance(value, float):
        yield path, "number"
    elif isinstance(value, orjson.Fragment):  # ids and logprobs, never empty
        yield path, "list"


_NUMBERS: Final[dict[type, str]] = {int: "integer", float: "number"}


def _is_date(text: str) -> bool:
    if not _DATE.fullmatch(text):
        return False
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True
