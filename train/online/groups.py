"""Whole groups for trainers that ask for samples: asyncio outside, the client of the rollout service inside.

verl and slime call once per sample, and all samples of a prompt are one group here: `GroupMembers` lets the calls for
one prompt share one request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary

from train.errors import BadInput, TrainError
from train.online.client import RolloutService
from train.online.rows import Row, rows_of
from train.online.task_choice import TaskChoice
from train.stream.records import RolloutRecord
from train.tokens.ratio import ratio_ready

logger = logging.getLogger(__name__)

#: Where the service is and its key, for trainers that leave no place for an option.
URL_VARIABLE: Final = "BENCHFLOW_SERVE_URL"
KEY_VARIABLE: Final = "BENCHFLOW_SERVE_KEY"
#: What a trainer assumes of sampling that it says nothing about; an engine's own defaults may differ.
_PLAIN: Final = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
#: Part of every key: a trainer that starts again counts its prompts from 0, and must not be given old rollouts.
RUN: Final = uuid.uuid4().hex[:12]


class GroupWithheld(TrainError):
    """A group of rollouts is not whole: none of it is trained."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """What is asked of the service, as `RolloutService.group` takes it.

    Without a `task` it is the one whose name or prompt is the text of `prompt`, and else the one that `seed` picks.
    `ratios` says that the trainer builds ratios on the logprobs, with its logits divided by that temperature.
    """

    key: str
    size: int
    task: str | None = None
    prompt: object = None
    seed: int | None = None
    sampling: Mapping[str, Any] | None = None
    policy_version: str | None = None
    deadline: float | None = None
    purpose: Literal["train", "eval"] = "train"
    max_output_tokens: int | None = None
    ratios: float | None = None


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A finished group: `records[i]` is rollout i of it, None where there is none.

    `seconds[i]` is how long after the request the record came. `reason` is None for a whole group.
    """

    key: str
    records: list[RolloutRecord | None]
    seconds: list[float]
    reason: str | None

    @property
    def complete(self) -> bool:
        return self.reason is None

    def rows(self, place: int) -> list[Row]:
        """What can be trained of rollout `place`; nothing of a group that is withheld."""
        record = self.records[place]
        return rows_of(record) if record is not None and self.complete else []

    def reward(self, place: int) -> float | None:
        record = self.records[place]
        return None if record is None else record["reward"]

    def masked(self, place: int) -> Row:
        """A sequence of a rollout of which nothing is trained, for trainers that must have one: mask 0 everywhere."""
        record = self.records[place]
        for part in () if record is None else record["segments"]:
            if part["prompt_ids"] and part["completion_ids"]:
                ids = part["completion_ids"]
                return Row(part["thread"], part["kind"], part["prompt_ids"], ids, [0] * len(ids), [0.0] * len(ids), ())
        return Row(0, "main", [0], [0], [0], [0.0], ())

    def why(self, place: int) -> str:
        """Why nothing of rollout `place` is trained."""
        if self.reason is not None:
            return self.reason
        return "no part of it is exact" if self.records[place] is not None else "it has no record"


def connect(url: str | None = None, key: str | None = None) -> RolloutService:
    """A client of the service that is named here or in the environment. Raises `BadInput` where none is named."""
    url = url or os.environ.get(URL_VARIABLE)
    if not url:
        raise BadInput(
            f"no rollout service is named: set url, or {URL_VARIABLE}, to the address that bench serve prints"
        )
    return _client(url, key or os.environ.get(KEY_VARIABLE))


@lru_cache(maxsize=8)
def _client(url: str, key: str | None) -> RolloutService:
    return RolloutService(url, key)


def sampling_of(given: Mapping[str, Any], *, training: bool) -> dict[str, Any]:
    """What is forced on every call: the trainer's sampling parameters, and plain ones where it has none of its own.

    A `top_k` of 0 cuts nothing for TRL, vLLM and llama.cpp; SGLang (0.5.23) knows only -1 for that, as they do.
    """
    named = {name: given[name] for name in (*_PLAIN, "repetition_penalty") if given.get(name) is not None}
    if named.get("top_k") == 0:
        named["top_k"] = -1
    return _PLAIN | named if training else named


def read_group(service: RolloutService, request: GroupRequest) -> FinishedGroup:
    """Asks for the group and waits for its verdict. Raises what the client raises."""
    started = time.monotonic()
    asked = asdict(request)
    prompt, temperature = asked.pop("prompt"), asked.pop("ratios")
    if request.task is None and prompt:
        asked["task"] = _tasks(service).find(prompt)
    if asked["task"] is not None:
        asked["seed"] = None
    stream = service.group(**asked)
    found: dict[str | None, tuple[RolloutRecord | None, float]] = {}
    for record in stream:
        found[record["rollout"]] = (record, time.monotonic() - started)
    verdict = stream.verdict
    assert verdict is not None
    absent: tuple[RolloutRecord | None, float] = (None, time.monotonic() - started)
    members = [found.get(name, absent) for name in verdict["rollouts"]]
    members += [absent] * (request.size - len(members))
    records = [record for record, _ in members]
    reason = None
    if verdict["state"] != "complete":
        reason = verdict["detail"] or verdict["reason"] or f"the group was {verdict['state']}"
    elif temperature is not None:
        reason = no_ratios(records, temperature)
    return FinishedGroup(request.key, records, [seconds for _, seconds in members], reason)


def no_ratios(records: Iterable[RolloutRecord | None], temperature: float) -> str | None:
    """Why the logprobs of a group are not those that the trainer's ratios need; None where they are."""
    for record in records:
        if record is not None and (why := ratio_ready(record, temperature)) is not None:
            return f"no ratio can be built on the logprobs of {record['rollout']}: {why}"
    return None


@lru_cache(maxsize=8)
def _tasks(service: RolloutService) -> TaskChoice:
    return TaskChoice(service.tasks())


async def wait_groups(service: RolloutService, requests: Sequence[GroupRequest]) -> list[FinishedGroup]:
    """Groups that run at the same time, in order. The first that fails cancels the others."""
    tasks = [asyncio.create_task(wait_group(service, request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise


async def wait_group(service: RolloutService, request: GroupRequest) -> FinishedGroup:
    """`read_group` in a thread of its own. A caller that is cancelled cancels the group: its sandboxes are freed."""
    try:
        return await _in_thread(lambda: read_group(service, request))
    except asyncio.CancelledError:
        threading.Thread(target=_cancel, args=(service, request.key), daemon=True).start()
        raise


class GroupMembers:
    """The calls for one prompt that share a group. They are all made before any of them waits for something else."""

    def __init__(self) -> None:
        self._joined: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Joined]] = WeakKeyDictionary()

    async def join(
        self,
        service: RolloutService,
        key: str,
        request: Callable[[int], GroupRequest],
        *,
        size: int | None = None,
    ) -> tuple[FinishedGroup, int]:
        """The group and the caller's place in it, in the order of the calls.

        `request` makes the request from the number of members: `size`, or all that joined in this pass of the loop.
        """
        loop = asyncio.get_running_loop()
        groups = self._joined.setdefault(loop, {})
        joined = groups.get(key)
        if joined is None:
            joined = groups[key] = _Joined(loop.create_future())
            task = loop.create_task(self._ask(groups, key, joined, service, request, size))
            joined.task = task
        place = joined.members
        joined.members += 1
        if size is not None and joined.members == size:
            del groups[key]
        try:
            return await asyncio.shield(joined.group), place
        except asyncio.CancelledError:
            joined.cancelled += 1
            if joined.task is not None and joined.cancelled == joined.members:
                joined.task.cancel()
            raise

    async def _ask(
        self,
        groups: dict[str, _Joined],
        key: str,
        joined: _Joined,
        service: RolloutService,
        request: Callable[[int], GroupRequest],
        size: int | None,
    ) -> None:
        if size is None:
            await asyncio.sleep(0)  # all members of a prompt are tasks that were made together
            del groups[key]
        try:
            joined.group.set_result(await wait_group(service, request(size or joined.members)))
        except asyncio.CancelledError:
            joined.group.cancel()
            raise
        except Exception as error:
            joined.group.set_exception(error)


@dataclass(slots=True, eq=False)
class _Joined:
    group: asyncio.Future[FinishedGroup]
    task: asyncio.Task[None] | None = None
    members: int = 0
    cancelled: int = 0


async def _in_thread(work: Callable[[], FinishedGroup]) -> FinishedGroup:
    """A daemon thread per group: a pool would bound how many groups run, and keep a trainer from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[FinishedGroup] = loop.create_future()

    def settle(settled: Callable[[], None]) -> None:
        if not future.done():
            settled()

    def run() -> None:
        try:
            group = work()
            settled = partial(future.set_result, group)
        except BaseException as error:
            settled = partial(future.set_exception, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, settled)

    threading.Thread(target=run, name="rollout-group", daemon=True).start()
    return await future


def _cancel(service: RolloutService, key: str) -> None:
    try:
        service.cancel(key)
    except Exception as error:
        logger.warning("the group %s could not be cancelled: %s", key, error)
