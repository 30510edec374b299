"""Whole groups for rows with advantages: the same groups and rules as the stream's (`train.groups`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from train.groups.groups import GroupOptions, group_finished
from train.groups.withhold import member_log, why_withheld
from train.rollouts.rollouts import Rollout
from train.rows.skip_reasons import WITHHELD, Tally
from train.tokens.rollout_tokens import read_log


@dataclass(frozen=True, slots=True)
class Member:
    """A rollout of a whole group, and the columns that its group adds to each of its rows."""

    rollout: Rollout
    signal: dict[str, Any]


def whole_groups(rollouts: Iterable[Rollout], options: GroupOptions, tally: Tally) -> Iterator[list[Member]]:
    """The groups that are whole, in the order of their first rollouts; the others are counted by reason.

    Rollouts are kept without their logs, which are read one after the other.
    """
    groups, replaced = group_finished(rollouts, options)
    tally.leave_out("replaced", len(replaced))
    for group in groups:
        withheld = why_withheld(group) or why_withheld(
            group, [member_log(member, read_log(member)) for member in group.rollouts]
        )
        if withheld is not None:
            tally.leave_out(WITHHELD[withheld.reason], len(group.rollouts))
            continue
        place = {"group": group.id, "group_number": len(tally.groups)}
        signals = [place | signal for signal in group.signals(options)]
        tally.groups.append({name: value for name, value in signals[0].items() if name != "advantage"})
        yield [Member(rollout, signal) for rollout, signal in zip(group.rollouts, signals, strict=True)]
