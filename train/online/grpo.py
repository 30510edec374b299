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
from itertools import groupby
from typing import Any, Final, Protocol

from train.errors import BadInput
from train.online.client import RolloutService
from train.online.rows import main_row, rows_of
from train.online.task_choice import TaskChoice
from train.stream.records import RolloutRecord

log = logging.getLogger(__name__)

#: The trainer's settings that a demanded sampling is made of, where they are set.
SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Transfer(Protocol):
    """How weights reach the engine: TRL's own `WeightTransferProtocol`, as AsyncGRPO uses it too."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None: ...

    def resume(self) -> None: ...


class ServiceRollouts:
    """A `rollout_func`. Sequences of rollouts that had no place in a row are counted in `left_out`.

    With `transfer`, the main process sends the weights whenever the trainer's step has moved, and the service learns
    the step as the policy's version; without it, someone else updates the engine. `group` holds further fields of
    `RolloutService.group`, such as `deadline` or `max_calls`. The sampling that the trainer's configuration asks for is
    demanded of the service and wins over what an agent sends.
    """

    def __init__(self, service: RolloutService, *, transfer: Transfer | None = None, **group: Any) -> None:
        self._service, self._transfer, self._group = service, transfer, group
        self._run = uuid.uuid4().hex[:12]
        self._calls = 0
        self._sent_step: int | None = None
        self._tasks: TaskChoice | None = None
        self._warned: set[str] = set()
        self.left_out = 0

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """One row per prompt, in order: prompt and completion ids, `env_mask` (1: sampled), logprobs, and the reward.

        A rollout of which nothing can be trained has a row of one masked token and no reward, which TRL leaves out of
        its group's baseline. Raises `ServiceUnavailable`, `ServiceRefused`, and `BadInput` for a prompt that is no
        task's.
        """
        self._calls += 1
        if self._tasks is None:
            self._tasks = TaskChoice(self._service.tasks())
        self._warn_about_the_loss(trainer)
        self._send_weights(trainer)
        tasks = [self._tasks.named(prompt) for prompt in prompts]
        groups = [(task, len(list(members))) for task, members in groupby(tasks)]
        with ThreadPoolExecutor(max_workers=max(1, len(groups))) as pool:
            numbered = [(number, task, size) for number, (task, size) in enumerate(groups)]
            members = [
                record for found in pool.map(lambda group: self._members(trainer, *group), numbered) for record in found
            ]
        rows = [self._row(record, trainer) for record in members]
        names = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "rollout_reward", "rollout_path")
        return {name: [row[name] for row in rows] for name in names}

    def _members(self, trainer: Any, number: int, task: str, size: int) -> list[RolloutRecord | None]:
        """The records of a group, one per place; None where a rollout has no record."""
        training = bool(trainer.model.training)
        group = self._service.group(
            **{
                "sampling": demanded_sampling(trainer.args),
                "policy_version": str(trainer.state.global_step),
                **self._group,
                "key": f"{self._run}-{self._calls}-{trainer.accelerator.process_index}-{number}",
                "task": task,
                "size": size,
                "purpose": "train" if training else "eval",
            }
        )
        with group:
            records = list(group)
        if len(records) < size:
            detail = group.verdict["detail"] if group.verdict is not None else "no verdict"
            log.warning("%d of %d rollouts of %s: %s", len(records), size, task, detail)
        return [*records, *[None] * (size - len(records))][:size]

    def _row(self, record: RolloutRecord | None, trainer: Any) -> dict[str, Any]:
        rows = [] if record is None else rows_of(record)
        main = main_row(rows)
        if record is None or main is None:
            end = trainer.processing_class.eos_token_id
            # TRL needs a token; this one is masked, and without a reward it is in no baseline.
            return {
                "prompt_ids": [end], "completion_ids": [end], "logprobs": [0.0], "env_mask": [0],
                "rollout_reward": None, "rollout_path": None if record is None else record["rollout_path"],
            }  # fmt: skip
        if len(rows) > 1:
            self.left_out += len(rows) - 1
            self._warn(
                "several sequences",
                f"{record['rollout']} has {len(rows)} sequences (several agents, or a history that the agent rewrote) "
                "and GRPOTrainer takes one per prompt: the one with the most sampled tokens is trained; the AsyncGRPO "
                "adapter trains all",
            )
        return {
            "prompt_ids": main.prompt_ids,
            "completion_ids": main.completion_ids,
            "logprobs": main.logprobs,
            "env_mask": main.completion_mask,
            "rollout_reward": record["reward"],
            "rollout_path": record["rollout_path"],
        }

    def _send_weights(self, trainer: Any) -> None:
        step = trainer.state.global_step
        if self._transfer is None or step == self._sent_step:
            return
        first, self._sent_step = self._sent_step is None, step
        if trainer.accelerator.is_main_process:
            if first:
                self._transfer.init_weight_transfer()
            self._transfer.pause()
            self._transfer.send_weights(whole_weights(trainer))
            self._transfer.resume()
            self._service.set_policy(str(step))
        trainer.accelerator.wait_for_everyone()

    def _warn_about_the_loss(self, trainer: Any) -> None:
        if not (trainer.use_vllm and trainer.vllm_importance_sampling_correction):
            self._warn(
                "loss",
                "GRPOTrainer uses the engine's logprobs in its loss only with use_vllm=True and "
                "vllm_importance_sampling_correction: here it computes its own, and what was sampled under older "
                "weights or in another precision is not corrected for; AsyncGRPOTrainer uses the engine's",
            )

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s", text)


def rollout_reward(*_: Any, rollout_reward: Sequence[float | None], **__: Any) -> list[float | None]:
    """TRL's reward function for rows of `ServiceRollouts`: the tasks' own rewards, None where there is none."""
    return list(rollout_reward)


def demanded_sampling(args: Any) -> dict[str, Any]:
    """What the trainer's configuration says of sampling; its loss divides the logits by this temperature."""
    found = {name: getattr(args, name, None) for name in SAMPLING}
    return {name: value for name, value in found.items() if value is not None}


def whole_weights(trainer: Any) -> Iterator[tuple[str, Any]]:
    """The model's parameters by name. Raises `BadInput` where they are not whole in this process."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "peft_config"):
        raise BadInput("weights of a PEFT model cannot be sent: train the whole model, or update the engine yourself")
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise BadInput("weights that are sharded by DeepSpeed or FSDP cannot be sent: update the engine yourself")
    return ((name, parameter.data) for name, parameter in model.named_parameters())
