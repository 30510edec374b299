"""Rollouts shown together: their group, its rewards and advantages, and why it would be withheld (`train.groups`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from train.groups.advantage import mean_and_std
from train.groups.groups import Group, GroupOptions, group_finished, group_key
from train.groups.withhold import MemberLog, why_withheld
from train.rollouts.job_state import JobState
from train.rollouts.rollouts import Rollout

#: The default of `--group-by`: repeats of a run are separate jobs, and shown together they are what a trainer compares.
VIEW_BY = ("task", "agent", "model")


@dataclass
class GroupRows:
    """`groups` for the page, and by `rollout_path` what a row says of its group."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    of: dict[str, dict[str, Any]] = field(default_factory=dict)


def group_rows(
    rollouts: Sequence[tuple[Rollout, MemberLog | None]], options: GroupOptions, state: JobState
) -> GroupRows:
    """`MemberLog` None: the log was not read yet, so what it would say is left open."""
    logs = {rollout.rollout_path: log for rollout, log in rollouts}
    groups, replaced = group_finished([rollout for rollout, _ in rollouts if rollout.finished], options)
    rows = GroupRows()
    for group in groups:
        _add(rows, group, options, logs, state)
    by_key = {tuple(group["key"].values()): group["number"] for group in rows.groups}
    for rollout, _ in rollouts:
        number = by_key.get(tuple(group_key(rollout, options.by).values()))
        row = rows.of.setdefault(rollout.rollout_path, {"group": number, "advantage": None, "withheld": None})
        if rollout.rollout_path in replaced:
            row["withheld"], row["replaced_by"] = "retried", replaced[rollout.rollout_path].rollout_path
    return rows


def _add(
    rows: GroupRows, group: Group, options: GroupOptions, logs: dict[str, MemberLog | None], state: JobState
) -> None:
    members = [logs[member.rollout_path] for member in group.rollouts]
    known = [log for log in members if log is not None]
    ended = "the job is running:" if state.kind == "running" else "the job ended"
    why = why_withheld(group, known if len(known) == len(members) else (), ended=ended)
    mean, std = mean_and_std(group.rewards, options.ddof)
    number = len(rows.groups)
    rows.groups.append(
        {
            "number": number,
            "id": group.id,
            "key": group.key,
            "size": group.size,
            "members": [member.rollout_path for member in group.rollouts],
            "rewards": [member.reward for member in group.rollouts],
            "mean": mean if group.rewards else None,
            "std": std if group.rewards else None,
            "withheld": why.reason if why else None,
            "withheld_detail": why.detail if why else None,
            "judged": len(known) == len(members),
        }
    )
    advantages = [signal["advantage"] for signal in group.signals(options)] if why is None else [None] * len(members)
    for member, advantage in zip(group.rollouts, advantages, strict=True):
        rows.of[member.rollout_path] = {
            "group": number,
            "advantage": advantage,
            "withheld": why.reason if why else None,
        }
