"""TRL's `GRPOTrainer` over a rollout service: a `rollout_func` (TRL 1.16), and the reward function that goes with it.

    rollouts = ServiceRollouts(RolloutService(url, key), transfer=transfer)
    GRPOTrainer(model, reward_funcs=rollout_reward, rollout_func=rollouts, train_dataset=prompts, args=...)

TRL calls a `rollout_func` with this process's rows as its code has them, not as its docstring says: each prompt
`num_generations` times, next to each other. It takes one row per prompt, in that order, so that of a rollout with
several sequences one is trained; `train.online.trl` trains all of them. Rewards and advantages are TRL's own.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import Any, Final, Protocol

from train.errors import BadInput
from train.online.client import RolloutService
from train.online.groups import FinishedGroup, GroupRequest, read_group, sampling_of
from train.online.rows import main_row
from train.online.task_choice import TaskChoice

log = logging.getLogger(__name__)

#: What a `rollout_func` returns: TRL's own names, and two that go to the reward functions.
FIELDS: Final = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "rollout_reward", "rollout_path")


class WeightTransfer(Protocol):
    """How weights reach the engine; those in `train.online.weights` also hold calls back and set the policy version."""

    def update(self, weights: Iterator[tuple[str, Any]]) -> int: ...


class ServiceRollouts:
    """A `rollout_func`. Sequences of rollouts that had no place in a row are counted in `left_out`.

    With `transfer`, the main process sends the weights before the first rollouts and whenever the trainer's step has
    moved since; without it, someone else updates the engine. `deadline` is in seconds, of a whole group. The sampling
    that the trainer's configuration asks for wins over what an agent sends.
    """

    def __init__(
        self, service: RolloutService, *, transfer: WeightTransfer | None = None, deadline: float | None = None
    ) -> None:
        self._service, self._transfer, self._deadline = service, transfer, deadline
        self._run = uuid.uuid4().hex[:12]
        self._calls = 0
        self._sent_step: int | None = None
        self._tasks: TaskChoice | None = None
        self._warned: set[str] = set()
        self.left_out = 0

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """One row per prompt, in order: prompt and completion ids, `env_mask` (1: sampled), logprobs, and the reward.

        A rollout of which nothing can be trained, as of a group that is withheld, has a masked row and no reward, and
        TRL leaves it out of the baseline. Raises `ServiceUnavailable`, `ServiceRefused`, and `BadInput` for
        a prompt that is no task's.
        """
        self._calls += 1
        if self._tasks is None:
            self._tasks = TaskChoice(self._service.tasks())
        self._warn_about_the_loss(trainer)
        self._send_weights(trainer)
        tasks = [self._tasks.named(prompt) for prompt in prompts]
        requests = [self._request(trainer, n, *group) for n, group in enumerate(_runs(tasks))]
        with ThreadPoolExecutor(max_workers=max(1, len(requests))) as pool:
            groups = list(pool.map(partial(read_group, self._service), requests))
        rows = [self._row(group, place) for group in groups for place in range(len(group.records))]
        return {name: [row[name] for row in rows] for name in FIELDS}

    def _request(self, trainer: Any, number: int, task: str, size: int) -> GroupRequest:
        training = bool(trainer.model.training)
        return GroupRequest(
            key=f"{self._run}-{self._calls}-{trainer.accelerator.process_index}-{number}",
            size=size,
            task=task,
            sampling=sampling_of(vars(trainer.args), training=training),
            deadline=self._deadline,
            purpose="train" if training else "eval",
            ratios=trainer.args.temperature if training and _uses_logprobs(trainer) else None,
        )

    def _row(self, group: FinishedGroup, place: int) -> dict[str, Any]:
        record, rows = group.records[place], group.rows(place)
        reward, main = group.reward(place), main_row(rows)
        path = None if record is None else record["rollout_path"]
        if main is None:
            log.warning("group %s: nothing is trained of rollout %d: %s", group.key, place, group.why(place))
            reward, main = None, group.masked(place)
        if len(rows) > 1:
            self.left_out += len(rows) - 1
            self._warn_once(
                "several sequences",
                f"{path} has {len(rows)} sequences (several agents, or a history that the agent rewrote) and "
                "GRPOTrainer takes one per prompt: the one with the most sampled tokens is trained; the AsyncGRPO "
                "adapter trains all",
            )
        values = (main.prompt_ids, main.completion_ids, main.logprobs, main.completion_mask, reward, path)
        return dict(zip(FIELDS, values, strict=True))

    def _send_weights(self, trainer: Any) -> None:
        step = trainer.state.global_step
        if self._transfer is None or step == self._sent_step:
            return
        if trainer.accelerator.is_main_process:
            self._transfer.update(whole_weights(trainer))
        self._sent_step = step
        trainer.accelerator.wait_for_everyone()

    def _warn_about_the_loss(self, trainer: Any) -> None:
        if not _uses_logprobs(trainer):
            self._warn_once(
                "loss",
                "GRPOTrainer uses the engine's logprobs in its loss only with use_vllm=True and "
                "vllm_importance_sampling_correction: here it computes its own, and what was sampled under older "
                "weights or in another precision is not corrected for; AsyncGRPOTrainer uses the engine's",
            )

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s", text)


def rollout_reward(*_: Any, rollout_reward: Sequence[float | None], **__: Any) -> list[float | None]:
    """TRL's reward function for rows of `ServiceRollouts`: the tasks' own rewards, None where there is none."""
    return list(rollout_reward)


def whole_weights(trainer: Any) -> Iterator[tuple[str, Any]]:
    """The model's parameters by name. Raises `BadInput` where they are not whole in this process."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "peft_config"):
        raise BadInput("weights of a PEFT model cannot be sent: train the whole model, or update the engine yourself")
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise BadInput("weights that are sharded by DeepSpeed or FSDP cannot be sent: update the engine yourself")
    return ((name, parameter.data) for name, parameter in model.named_parameters())


def _runs(tasks: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Each task with how many times in a row it occurs."""
    for task, members in groupby(tasks):
        yield task, sum(1 for _ in members)


def _uses_logprobs(trainer: Any) -> bool:
    """Whether the trainer's loss has the engine's logprobs in it."""
    return bool(trainer.use_vllm and trainer.vllm_importance_sampling_correction)
