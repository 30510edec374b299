"""Rows with advantages: whole groups one after the other, with the rules of the stream (`train.groups`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capture.errors import CaptureError
from train.rollouts.job_state import Attempts, RetryPolicy
from train.rollouts.rollouts import Rollout
from train.rows.skip_reasons import Tally
from train.stream.groups import (
    DEFAULT_BY,
    EPS,
    AdvantageKind,
    Group,
    MemberLog,
    advantages,
    group_key,
    mean_and_std,
    why_withheld,
)
from train.stream.stream import member_log
from train.tokens.rollout_tokens import read_tokens

FORMULAS: dict[str, str] = {
    "grpo": "(reward - mean) / (std + eps)",
    "dr-grpo": "reward - mean",
    "rloo": "reward - mean of the others",
}


@dataclass(frozen=True, slots=True)
class Grouping:
    """How rollouts are grouped and what their advantage is. `size` None: all rollouts of a key are one group."""

    by: Sequence[str] = DEFAULT_BY
    size: int | None = None
    kind: AdvantageKind = "grpo"
    ddof: int = 1
    eps: float = EPS

    def to_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {"group_advantage": self.kind, "formula": FORMULAS[self.kind], "group_by": list(self.by)}
        return told | {"group_size": self.size, "std_ddof": self.ddof, "eps": self.eps}


@dataclass(frozen=True, slots=True)
class Member:
    """A rollout of a whole group, and the columns that its group gives to each of its rows."""

    rollout: Rollout
    signal: dict[str, Any]


def plan(found: Iterable[Rollout], grouping: Grouping, tally: Tally) -> Iterator[list[Member]]:
    """The groups that are whole, in the order of their first rollouts; the others are counted, by reason.

    Rollouts are held in few words, their logs are read one after the other.
    """
    keyed: dict[tuple[str | None, ...], list[Rollout]] = {}
    for rollout in _without_replaced(list(found), tally):
        keyed.setdefault(tuple(group_key(rollout, grouping.by).values()), []).append(rollout)
    for rollouts in keyed.values():
        size = grouping.size or len(rollouts)
        for begin in range(0, len(rollouts), size):
            members = rollouts[begin : begin + size]
            group = Group(group_key(members[0], grouping.by), size, members)
            withheld = why_withheld(group) or why_withheld(group, [_log(member) for member in members])
            if withheld is not None:
                tally.leave_out(group_reason(withheld.reason), len(members))
                continue
            signals = _signals(group, grouping, number=len(tally.groups))
            tally.groups.append({name: value for name, value in signals[0].items() if name != "advantage"})
            yield [Member(rollout, signal) for rollout, signal in zip(members, signals, strict=True)]


def group_reason(reason: str) -> str:
    """The name in `train.reasons` of a reason to withhold a group."""
    return reason if reason.startswith("group_") else f"group_{reason}"


def _signals(group: Group, grouping: Grouping, number: int) -> list[dict[str, Any]]:
    mean, std = mean_and_std(group.rewards, grouping.ddof)
    worth: list[float | None] = [None]  # one rollout alone has nothing to be compared with
    if len(group.rollouts) > 1:
        worth = [*advantages(group.rewards, grouping.kind, grouping.ddof, grouping.eps)]
    return [
        {
            "advantage": value,
            "group": group.id,
            "group_number": number,
            "group_size": len(group.rollouts),
            "group_mean": mean,
            "group_std": std,
            "advantage_kind": grouping.kind,
            "ddof": grouping.ddof,
            "eps": grouping.eps,
        }
        for value in worth
    ]


def _log(rollout: Rollout) -> MemberLog:
    try:
        return member_log(rollout, read_tokens(rollout))
    except CaptureError as error:
        return MemberLog(reached=False, sequence=False, unreadable=str(error))


def _without_replaced(rollouts: list[Rollout], tally: Tally) -> list[Rollout]:
    """The rollouts in the order they finished, without the failed attempts that a retry stands in for."""
    rollouts.sort(key=lambda one: (one.finished_at or "", one.rollout_path))
    attempts: dict[Path, Attempts] = {}
    replaced: set[str] = set()
    for rollout in rollouts:
        job = rollout.path.parent
        if job not in attempts:
            attempts[job] = Attempts(RetryPolicy.read(job))
        before = attempts[job].add(rollout)
        if before is not None:
            replaced.add(before.rollout_path)
    tally.leave_out("replaced", len(replaced))
    return [one for one in rollouts if one.rollout_path not in replaced]
