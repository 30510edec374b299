"""Records as the rollout service streams them, of rollouts that a test lays out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from tests.train.build import Line, make_rollout
from train.groups.groups import DEFAULT_BY, group_key
from train.rollouts.rollouts import find_rollouts
from train.stream.records import Encode, RolloutRecord, record
from train.tokens.rollout_tokens import read_log


def service_record(job: Path, calls: list[Line], **spec: Any) -> RolloutRecord:
    """The record of one rollout with these calls; `spec` as `make_rollout` takes it."""
    folder = make_rollout(job, calls=calls, **spec)
    [rollout] = find_rollouts(folder)
    made = record(rollout, read_log(rollout, chat=True), group_key(rollout, DEFAULT_BY), Encode(text=False))
    return cast(RolloutRecord, made)


def interleaved(*conversations: list[Line]) -> list[Line]:
    """Calls of several conversations, turn by turn, numbered as they were made."""
    calls = [call for turn in zip(*conversations, strict=True) for call in turn]
    for number, call in enumerate(calls):
        call["metadata"]["call"] = number
    return calls
