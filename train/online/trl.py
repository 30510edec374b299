"""TRL's AsyncGRPO on rollouts of the service: a rollout worker for `AsyncGRPOTrainer(rollout_worker=...)`, TRL 1.16."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from train.errors import BadInput, ServiceBusy, ServiceError
from train.extras import optional
from train.online.chat import choices_of, messages_of
from train.online.client import GroupVerdict, RolloutService
from train.online.groups import no_ratios, sampling_of
from train.online.rows import Row, rows_of
from train.rollouts.messages import Message

logger = logging.getLogger(__name__)

#: The advantage of TRL 1.16's own worker.
ADVANTAGE: Final = {"kind": "grpo", "ddof": 0, "eps": 1e-8}
#: Seconds that `stop` waits for groups to be cancelled.
STOP_SECONDS: Final = 15.0


class RolloutWorker:
    """Keeps `concurrent_groups` groups of `num_generations` rollouts running, and hands their rows to the trainer.

    `tasks` are names, taken in this order again and again; all tasks of the service by default. `temperature` must be
    that of `AsyncGRPOConfig`: the loss divides logits by it; top-k, top-p and min-p are off, as TRL requires.
    `group_options` are further arguments of `RolloutService.group`: a deadline, budgets, another advantage. With a
    `run` name, a trainer that starts again with the number of its `first_group` joins the groups that ran before.

    `lora_name` is for a PEFT model whose adapters TRL publishes to vLLM as "trl-policy-v1", "trl-policy-v2", ...: with
    "trl-policy" calls are made to the newest.

    A rollout gives one row per sequence, each with the oldest version that sampled any of it, so that TRL's
    `max_staleness` judges what was really sampled. A group is also withheld where no ratio can be built on its logprobs
    (`train.tokens.ratio`). A group that is withheld is logged and gives nothing; after `max_withheld` in a row
    `check_health` raises, and so it does with whatever else ended the worker.
    """

    def __init__(
        self,
        service: RolloutService,
        *,
        tasks: Sequence[str] | None = None,
        num_generations: int = 8,
        concurrent_groups: int = 2,
        temperature: float = 1.0,
        group_options: Mapping[str, Any] | None = None,
        run: str | None = None,
        first_group: int = 0,
        queue_size: int = 1024,
        max_withheld: int = 20,
        lora_name: str | None = None,
        sample_type: Callable[..., Any] | None = None,
    ) -> None:
        for name, value in (("num_generations", num_generations), ("concurrent_groups", concurrent_groups)):
            if value < 1:
                raise BadInput(f"{name} {value}: give 1 or more")
        if tasks is not None and not tasks:
            raise BadInput("tasks is empty: name at least one task of the service, or leave it out")
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(queue_size)
        self.metrics_queue: queue.Queue[dict[str, float | tuple[float, float]]] = queue.Queue(4096)
        self._service = service
        self._tasks = None if tasks is None else list(tasks)
        self._size = num_generations
        self._options = {
            "sampling": sampling_of({"temperature": temperature}, training=True),
            "advantage": ADVANTAGE,
            **(group_options or {}),
        }
        self._run = run or uuid.uuid4().hex[:12]
        self._max_withheld = max_withheld
        self._lora_name = lora_name
        self._sample = sample_type or optional(
            "trl.experimental.async_grpo.async_rollout_worker",
            "RolloutSample",
            needed_for="AsyncGRPO needs the trl extra",
            extra="trl",
        )
        self._numbers = itertools.count(first_group)
        self._lock = threading.Lock()
        self._open: set[str] = set()
        self._stopped = threading.Event()
        self._failure: BaseException | None = None
        self._withheld = 0
        self._temperature = temperature
        self._version = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"rollouts-{number}", daemon=True)
            for number in range(concurrent_groups)
        ]

    def start(self) -> None:
        """Begins; TRL calls it once the engine has the trainer's weights."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Cancels what runs: its containers are removed. Safe to call twice."""
        self._stopped.set()
        with self._lock:
            running = sorted(self._open)
        with suppress(ServiceError):  # a service that is gone has no containers either
            for key in running:
                self._service.cancel(key)
        until = time.monotonic() + STOP_SECONDS
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))

    def update_model_version(self, model_version: int) -> None:
        """Calls from now on are stamped with this version; TRL calls it after each transfer of weights."""
        self._version = model_version
        self._service.set_policy(
            model_version, None if self._lora_name is None else f"{self._lora_name}-v{model_version}"
        )

    def check_health(self, stale_after_s: float) -> None:
        """Raises what ended the worker. A silent service has ended it after the client's patience, so that the time
        since the last row says nothing more: a rollout may take longer than `stale_after_s`.
        """
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            while not self._stopped.is_set():
                with self._lock:
                    number = next(self._numbers)
                self._run_group(number)
        except BaseException as error:
            if not self._stopped.is_set():
                self._failure = error
                self._stopped.set()

    def _run_group(self, number: int) -> None:
        key, began, version = f"{self._run}-{number}", time.monotonic(), self._version
        with self._lock:
            self._open.add(key)
        try:
            with self._ask(key, number, version) as group:
                records = {record["rollout"]: record for record in group}
            verdict = group.verdict
        finally:
            with self._lock:
                self._open.discard(key)
        if verdict is None or self._stopped.is_set():
            return
        if verdict["state"] != "complete" or verdict["advantages"] is None:
            self._note_withheld(verdict, verdict["detail"] or verdict["reason"] or verdict["state"])
            return
        if (why := no_ratios(records.values(), self._temperature)) is not None:
            self._note_withheld(verdict, why)
            return
        self._withheld = 0
        seconds = time.monotonic() - began
        sampled = 0
        for name, advantage in zip(verdict["rollouts"], verdict["advantages"], strict=True):
            for fields in samples(records[name], version) if name in records else ():
                sampled += int(fields["completion_mask"].sum())
                fields["metrics"]["reward_std"] = _number(verdict["group_std"])
                self._put(self._sample(advantage=float(advantage), group_id=number, **fields))
        self._push({"rollout/group_s": seconds, "rollout/generated_tok_s": (float(sampled), seconds)})

    def _ask(self, key: str, number: int, version: int) -> Any:
        picked = {"seed": number} if self._tasks is None else {"task": self._tasks[number % len(self._tasks)]}
        while True:
            try:
                return self._service.group(
                    key=key, size=self._size, policy_version=str(version), **picked, **self._options
                )
            except ServiceBusy as error:
                if self._stopped.is_set():
                    raise
                logger.warning("%s", error)

    def _note_withheld(self, verdict: GroupVerdict, why: str) -> None:
        state = "cancelled" if verdict["state"] == "cancelled" else "withheld"
        logger.warning("group %s (%s) is %s: %s", verdict["key"], verdict["task"], state, why)
        self._push({"rollout/groups_withheld_total": 1.0})
        self._withheld += 1
        if self._withheld >= self._max_withheld:
            raise ServiceError(
                f"{self._withheld} groups in a row gave no rows, the last one ({verdict['task']}) because: {why}"
            )

    def _put(self, sample: Any) -> None:
        """Waits while the trainer has enough: the group's place stays taken, and nothing new is sampled for it."""
        began = time.monotonic()
        sample.enqueued_at = time.time()
        while not self._stopped.is_set():
            try:
                self.rollout_buffer.put(sample, timeout=0.2)
            except queue.Full:
                sample.enqueued_at = time.time()
                continue
            break
        waited = time.monotonic() - began
        if waited > 0.1:
            self._push({"rollout/backpressure_s": waited})

    def _push(self, values: dict[str, float | tuple[float, float]]) -> None:
        with suppress(queue.Full):
            self.metrics_queue.put_nowait(values)


def samples(record: Mapping[str, Any], version: int) -> Iterator[dict[str, Any]]:
    """The fields of TRL's `RolloutSample` for each row of a rollout, but for its group's: advantage and `group_id`.

    `version` is for rows whose calls have no version. N ids: `input_ids` and `completion_mask` (int64) and
    `old_log_probs` (float32) have N values each.
    """
    import numpy as np

    reward = _number(record["reward"])
    for row in rows_of(record):
        prompt, completion = _messages(record, row)
        before = len(row.prompt_ids)
        oldest = row.oldest_version
        yield {
            "prompt": prompt,
            "completion": completion,
            "input_ids": np.asarray(row.prompt_ids + row.completion_ids, dtype=np.int64),
            "completion_mask": np.asarray([0] * before + row.completion_mask, dtype=np.int64),
            "old_log_probs": np.asarray([0.0] * before + row.logprobs, dtype=np.float32),
            "model_version": version if oldest is None else oldest,
            "metrics": {"reward": reward, "rewards/verifier": reward},
        }


def _messages(record: Mapping[str, Any], row: Row) -> tuple[list[Message], list[Message]]:
    """What the row's first call sent, and what was said after that; TRL shows them to people."""
    first, last = row.spans[0].call, row.spans[-1].call
    prompt, seen = messages_of(record, first), messages_of(record, last)
    replies = [choice["message"] for choice in choices_of(record, last)[:1]]
    return prompt, (seen[len(prompt) :] if seen[: len(prompt)] == prompt else []) + replies


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def task_prompts(service: RolloutService, tasks: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """One row per task for `Dataset.from_list`: the trainer wants a dataset, from which it counts epochs."""
    found = {task["name"]: task for task in service.tasks()}
    unknown = [name for name in tasks or () if name not in found]
    if unknown:
        raise BadInput(f"the service has no task {unknown[0]!r}: it has {', '.join(sorted(found))}")
    return [
        {"prompt": [{"role": "user", "content": found[name]["prompt"]}], "task": name} for name in tasks or list(found)
    ]
