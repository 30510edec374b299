"""Rollouts for a trainer that is written in Python: `stream_rollouts`, and `astream_rollouts` for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from train.groups.advantage import EPS, AdvantageKind
from train.groups.groups import DEFAULT_BY, GroupOptions, parse_group_by
from train.rollouts.rollouts import Warn
from train.stream.records import Encode, RolloutRecord
from train.stream.stream import Stream, StreamOptions

Purpose = Literal["train", "eval", "all"]
OnWithheld = Callable[[list[RolloutRecord]], None]


def stream_rollouts(
    path: str | Path,
    *,
    follow: bool = True,
    poll_interval: float = 1.0,
    timeout: float | None = None,
    group_size: int | None = None,
    group_by: str | Sequence[str] = DEFAULT_BY,
    advantage: AdvantageKind = "grpo",
    std_ddof: int = 1,
    eps: float = EPS,
    purpose: Purpose = "train",
    on_withheld: OnWithheld | None = None,
    on_warning: Warn | None = None,
) -> Iterator[RolloutRecord]:
    """Yields one record per finished rollout of a job, or of the jobs below `path`, in the order they finished.

    With `follow` it continues until the job ends, and waits for a folder that does not exist yet; without, it reads
    once. `poll_interval` and `timeout` are seconds. With `group_size` N, the N records of a group come one after the
    other, each with its `advantage`. A group that is not whole goes to `on_withheld` as one list instead, each record
    with `withheld` and `withheld_detail`. `purpose` says whether rollouts for training, of an evaluation, or both come;
    groups never mix them. `on_warning` is called with a sentence for each thing that was left out.

    In a record with P prompt ids and C further ids, `sequences[i]` has `prompt_ids` (P ints) and `completion_ids`,
    `completion_mask` and `completion_logprobs` (C values each: mask 1 and a logprob for sampled ids, 0 and 0.0 for
    others).

    Raises, after the last record, `JobStopped` when the job was stopped or its process died, and `StreamTimeout` when
    `timeout` ran out. Raises `BadInput` or `NoSuchPath` at once for arguments that cannot be used.
    """
    groups = GroupOptions(_keys(group_by), group_size, advantage, std_ddof, eps)
    options = StreamOptions(follow, poll_interval, timeout, groups, purpose)
    stream = Stream(Path(path), options, Encode(text=False), on_withheld=on_withheld, on_warning=on_warning)
    return _records(stream)


async def astream_rollouts(
    path: str | Path,
    *,
    follow: bool = True,
    poll_interval: float = 1.0,
    timeout: float | None = None,  # noqa: ASYNC109 - how long the job is followed, as in stream_rollouts
    group_size: int | None = None,
    group_by: str | Sequence[str] = DEFAULT_BY,
    advantage: AdvantageKind = "grpo",
    std_ddof: int = 1,
    eps: float = EPS,
    purpose: Purpose = "train",
    on_withheld: OnWithheld | None = None,
    on_warning: Warn | None = None,
) -> AsyncIterator[RolloutRecord]:
    """`stream_rollouts` for an event loop: a thread reads the files and waits for the job.

    The callbacks run on the loop. Leaving or cancelling the iteration stops the thread.
    """
    loop = asyncio.get_running_loop()

    def on_loop(callback: Callable[[Any], None] | None) -> Callable[[Any], None] | None:
        return None if callback is None else lambda value: cast(None, loop.call_soon_threadsafe(callback, value))

    groups = GroupOptions(_keys(group_by), group_size, advantage, std_ddof, eps)
    options = StreamOptions(follow, poll_interval, timeout, groups, purpose)
    stream = Stream(
        Path(path), options, Encode(text=False), on_withheld=on_loop(on_withheld), on_warning=on_loop(on_warning)
    )
    records = _records(stream)
    try:
        while (found := await asyncio.to_thread(next, records, None)) is not None:
            yield found
    finally:
        stream.stop()


def _records(stream: Stream) -> Iterator[RolloutRecord]:
    for row in stream:
        yield cast(RolloutRecord, row)
    stream.raise_end()


def _keys(by: str | Sequence[str]) -> tuple[str, ...]:
    return parse_group_by(by if isinstance(by, str) else ",".join(by))
