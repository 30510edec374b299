"""Which version of the weights sampled which ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class VersionRange(NamedTuple):
    """The ids of one choice from `start` up to, not including, `end` were sampled with `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """`length` sampled ids from index `offset` of a sequence's `completion_ids` on, and the version that sampled them.

    Where `policy_version_end` is set, the weights changed somewhere between, and the engine did not say where.
    """

    offset: int
    length: int
    policy_version: str | None
    policy_version_end: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "offset": self.offset,
            "length": self.length,
            "policy_version": self.policy_version,
            "policy_version_end": self.policy_version_end,
        }


def version_in_name(model: object) -> str | None:
    """The N of a model named `NAME-vN`, as TRL 1.16 names the LoRA adapter of each version; None for another name."""
    if not isinstance(model, str) or "-v" not in model:
        return None
    name, _, number = model.rpartition("-v")
    return number if name and number.isascii() and number.isdecimal() else None


def read_ranges(value: object, ids: int) -> tuple[VersionRange, ...]:
    """The ranges of a choice of so many ids, as an engine or a record has them; empty where they do not cover it."""
    ranges: list[VersionRange] = []
    for row in value if isinstance(value, list) else ():
        version, start, end = (
            (row.get(name) for name in ("version", "start", "end")) if isinstance(row, dict) else "???"
        )
        if not isinstance(version, str) or type(start) is not int or type(end) is not int or end < start:
            return ()
        if start != (ranges[-1].end if ranges else 0):
            return ()
        ranges.append(VersionRange(version, start, end))
    if not ranges or ranges[-1].end < ids:
        return ()
    cut = (VersionRange(version, start, min(end, ids)) for version, start, end in ranges)
    return tuple(each for each in cut if each.start < each.end)


def version_spans(
    offset: int, length: int, ranges: Sequence[VersionRange], versions: Sequence[str]
) -> list[VersionSpan]:
    """The spans of one choice at `offset`: by its ranges where they are known, else by the versions of its call."""
    if ranges:
        return [VersionSpan(offset + each.start, each.end - each.start, each.version) for each in ranges]
    first = versions[0] if versions else None
    return [VersionSpan(offset, length, first, versions[-1] if len(versions) > 1 else None)] if length else []
