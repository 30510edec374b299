"""Rollouts shown together: their group, its rewards and advantages, and why it would be withheld (`train.groups`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.rollouts.job_state import Attempts, JobState, RetryPolicy
from train.rollouts.rollouts import Rollout
from train.stream.groups import Group, Groups, MemberLog, Withheld, advantages, group_key, mean_and_std, why_withheld

#: Repeats of a run stand in jobs of their own; shown together they are what a trainer compares.
SHOWN_BY = ("task", "agent", "model")


@dataclass(frozen=True, slots=True)
class Grouping:
    """`size` None: a group is whatever has one key. Else groups fill in the order in which rollouts finished."""

    by: tuple[str, ...] = SHOWN_BY
    size: int | None = None


@dataclass
class Grouped:
    """`groups` for the page, and by `rollout_path` what a row says of its group."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    of: dict[str, dict[str, Any]] = field(default_factory=dict)


def grouped(rollouts: Sequence[tuple[Rollout, MemberLog | None]], how: Grouping, state: JobState) -> Grouped:
    """`MemberLog` None: the log was not read yet, so what it would say is left open."""
    logs = {rollout.rollout_path: log for rollout, log in rollouts}
    finished = sorted((one for one, _ in rollouts if one.finished), key=lambda one: one.finished_at or "")
    replaced = _replaced(finished)
    told = Grouped()
    size = how.size or max(len(rollouts), 1)
    groups = Groups(size, how.by)
    full = [group for one in finished if one.rollout_path not in replaced and (group := groups.add(one)) is not None]
    for group in (*full, *groups.rest()):
        _tell(told, group if how.size else Group(group.key, len(group.rollouts), group.rollouts), logs, state)
    by_key = {tuple(group["key"].values()): group["number"] for group in told.groups}
    for rollout, _ in rollouts:
        number = by_key.get(tuple(group_key(rollout, how.by).values()))
        row = told.of.setdefault(rollout.rollout_path, {"group": number, "advantage": None, "withheld": None})
        if rollout.rollout_path in replaced:
            row["withheld"], row["replaced_by"] = "retried", replaced[rollout.rollout_path]
    return told


def _tell(told: Grouped, group: Group, logs: dict[str, MemberLog | None], state: JobState) -> None:
    members = [logs[one.rollout_path] for one in group.rollouts]
    known = [one for one in members if one is not None]
    ended = "so far the job goes on:" if state.kind == "running" else "the job ended"
    why: Withheld | None = why_withheld(group, known if len(known) == len(members) else (), ended=ended)
    rewards = group.rewards
    mean, std = mean_and_std(rewards)
    counted = advantages(rewards) if why is None and len(rewards) > 1 else None
    number = len(told.groups)
    told.groups.append(
        {
            "number": number,
            "id": group.id,
            "key": group.key,
            "size": group.size,
            "members": [one.rollout_path for one in group.rollouts],
            "rewards": [one.reward for one in group.rollouts],
            "mean": mean if rewards else None,
            "std": std if rewards else None,
            "withheld": why.reason if why else None,
            "withheld_detail": why.detail if why else None,
            "judged": len(known) == len(members),
        }
    )
    for place, one in enumerate(group.rollouts):
        told.of[one.rollout_path] = {
            "group": number,
            "advantage": counted[place] if counted is not None else None,
            "withheld": why.reason if why else None,
        }


def _replaced(finished: Sequence[Rollout]) -> dict[str, str]:
    """rollout_path of an attempt that failed -> of the one that stands in for it."""
    attempts: dict[Path, Attempts] = {}
    found: dict[str, str] = {}
    for one in finished:
        folder = one.path.parent
        if folder not in attempts:
            attempts[folder] = Attempts(RetryPolicy.read(folder))
        before = attempts[folder].add(one)
        if before is not None:
            found[before.rollout_path] = one.rollout_path
    return found
