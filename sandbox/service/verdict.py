"""The verdict about a finished group: its advantages, or why it is withheld. Reads the members' folders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from capture import json
from capture.journal.layout import JobDir
from sandbox.service.group_request import GroupRequest
from train.groups.groups import Group, group_key
from train.groups.withhold import Withheld, member_log, why_withheld
from train.rollouts.rollouts import Rollout, read_rollout
from train.stream.records import Encode, record
from train.tokens.rollout_tokens import read_log

SCHEMA_VERSION: Final = "benchflow.group-verdict.v1"
#: How the advantages of a whole group were computed; null in every other verdict.
SIGNAL: Final = ("advantage_kind", "group_mean", "group_std", "ddof", "eps")


def record_line(job: JobDir, name: str) -> bytes | None:
    """The `benchflow.rollout-stream.v1` line of a finished rollout, its chats included; None where its folder is gone
    or cannot be read.
    """
    rollout = read_rollout(job.rollout(name).path, job.path, lambda _: None)
    if rollout is None:
        return None
    row = record(rollout, read_log(rollout, chat=True), group_key(rollout), Encode(text=True))
    return json.dumps(row) + b"\n"


def decide(
    job: JobDir, request: GroupRequest, members: Sequence[str | None], *, cancelled: bool, trouble: str | None
) -> dict[str, Any]:
    """The verdict of a group of which nothing runs; `members` are folder names by index."""
    verdict: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "key": request.key,
        "task": request.task,
        "size": request.size,
        "purpose": request.purpose,
        "state": "withheld",
        "reason": None,
        "detail": None,
        "rollouts": list(members),
        "advantages": None,
        **dict.fromkeys(SIGNAL),
    }
    if cancelled:
        return verdict | {"state": "cancelled", "reason": "cancelled", "detail": "the trainer cancelled the group"}
    rollouts = [read_rollout(job.rollout(name).path, job.path, lambda _: None) for name in members if name]
    group = Group(_key(rollouts), request.size, [rollout for rollout in rollouts if rollout is not None])
    ended = trouble or "the group ended"
    why = why_withheld(group, ended=ended) or why_withheld(
        group, [member_log(rollout, read_log(rollout)) for rollout in group.rollouts]
    )
    if why is not None:
        return verdict | {"reason": why.reason, "detail": _detail(why, trouble)}
    signals = group.signals(request.advantage)
    shared = {name: signals[0][name] for name in SIGNAL}
    return verdict | shared | {"state": "complete", "advantages": [signal["advantage"] for signal in signals]}


def _key(rollouts: Sequence[Rollout | None]) -> dict[str, str | None]:
    return next((group_key(rollout) for rollout in rollouts if rollout is not None), {})


def _detail(why: Withheld, trouble: str | None) -> str:
    return why.detail if trouble is None or trouble in why.detail else f"{why.detail}; {trouble}"
