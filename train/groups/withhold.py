"""Which groups are withheld from the trainer, and why: a group goes out whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from train.groups.groups import Group
from train.rollouts.rollouts import Rollout
from train.tokens.rollout_tokens import RolloutTokens, UnreadableLog

WithheldReason = Literal[
    "unscored", "no_model_calls", "mixed_sequences", "group_incomplete", "mixed_tasks", "unreadable_log", "retried"
]


@dataclass(frozen=True, slots=True)
class Withheld:
    """Why no line of a group reaches the trainer: `reason` for programs, `detail` a sentence for people."""

    reason: WithheldReason
    detail: str


@dataclass(frozen=True, slots=True)
class MemberLog:
    """What the rules need to know about a member's log.

    `reached`: a model answered at least once. `sequence`: it has a token sequence. `unreadable`: a sentence, where the
    log cannot be read.
    """

    reached: bool
    sequence: bool
    unreadable: str | None = None


def member_log(rollout: Rollout, tokens: RolloutTokens | UnreadableLog) -> MemberLog:
    """Calls that never went through the proxy count as answered where the runner says that they went elsewhere."""
    if isinstance(tokens, UnreadableLog):
        return MemberLog(reached=False, sequence=False, unreadable=tokens.reason)
    elsewhere = rollout.journal is None and rollout.endpoint_kind == "agent_native"
    return MemberLog(tokens.reached or elsewhere, tokens.training_grade)


def why_withheld(group: Group, logs: Sequence[MemberLog] = (), ended: str = "the job ended") -> Withheld | None:
    """Why a group is withheld; None when it goes out whole. `logs` has one entry per member, in order.

    Without `logs`, only the rules that need no log are applied: call it that way first, since reading logs is slow.
    """
    members = group.rollouts
    if not group.full:
        detail = f"{ended} when {len(members)} of the group's {group.size} rollouts had finished"
        return Withheld("group_incomplete", detail)
    for member in members:
        if not member.scored:
            why = member.error or member.verifier_error
            return Withheld("unscored", f"{member.rollout_path} has no reward" + (f": {why}" if why else ""))
    digests = sorted({member.task_digest for member in members if member.task_digest})
    if len(digests) > 1 and "task" in group.key:
        return Withheld(
            "mixed_tasks",
            f"the members ran {len(digests)} different versions of the task (task_digest "
            f"{', '.join(digest[:19] for digest in digests)}): their rewards cannot be compared",
        )
    for member, log in zip(members, logs, strict=False):
        if log.unreadable is not None:
            return Withheld("unreadable_log", f"{member.rollout_path}: {log.unreadable}")
        if not log.reached:
            return Withheld("no_model_calls", f"{member.rollout_path}'s log has no call that a model answered")
    without = [member.rollout_path for member, log in zip(members, logs, strict=False) if not log.sequence]
    if without and len(without) < len(members):
        return Withheld(
            "mixed_sequences",
            f"{len(without)} of {len(members)} members have no token sequence, {without[0]} for one: run bench train "
            "token-coverage --explain to see why",
        )
    return None
