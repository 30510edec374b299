"""SkyRL: a generator whose trajectories run in `bench serve`. Read in SkyRL 0.3.0.

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return ServiceGenerator(url="http://127.0.0.1:8300", step_wise=cfg.generator.step_wise_trajectories)

`ServiceGenerator` is made when it is asked for, from SkyRL's `GeneratorInterface`; nothing of SkyRL is imported before.
"""

from __future__ import annotations

import itertools
import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from train.extras import optional
from train.online.groups import RUN, FinishedGroup, GroupRequest, connect, sampling_of, wait_groups
from train.online.rows import Row, main_row

logger = logging.getLogger(__name__)

_CALLS: Final = itertools.count()


class Generator:
    """What `ServiceGenerator` adds to SkyRL's `GeneratorInterface`.

    The trajectories of an `instance_id` are one group of the service. The task is the prompt's `task` column; else the
    one whose name or prompt it is; else the prompt's number picks one. `step_wise` is SkyRL's
    `generator.step_wise_trajectories`: with it each sequence of a rollout is an entry, without it one of them. `url`
    and `key` default to BENCHFLOW_SERVE_URL and BENCHFLOW_SERVE_KEY; `deadline` is seconds for a whole group.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        step_wise: bool = False,
        deadline: float | None = None,
    ) -> None:
        self._service = connect(url, key)
        self._step_wise = step_wise
        self._deadline = deadline

    async def generate(self, input_batch: Mapping[str, Any], disable_tqdm: bool = False) -> dict[str, Any]:
        """SkyRL's `GeneratorOutput`, in the order of the input.

        A group that is withheld keeps its entries, with mask 0 and reward 0.0: its advantages are 0.
        """
        members = _members(input_batch)
        call = next(_CALLS)
        requests = [self._request(call, name, places, input_batch) for name, places in members.items()]
        groups = await wait_groups(self._service, requests)
        at = {place: (group, number) for group, places in zip(groups, members.values(), strict=True)
              for number, place in enumerate(places)}  # fmt: skip
        ids = input_batch.get("trajectory_ids") or [None] * len(at)
        entries = Entries(step_wise=self._step_wise)
        for place in range(len(at)):
            entries.add(*at[place], ids[place])
        for group in groups:
            if not group.complete:
                logger.warning("the group %s is left out: %s", group.key, group.reason)
        if entries.left_out:
            logger.warning("%d sequences are left out: set generator.step_wise_trajectories", entries.left_out)
        sampling = input_batch.get("sampling_params")
        output = entries.output(logprobs=sampling is None or sampling.get("logprobs") is not None)
        metrics = optional("skyrl.train.generators.utils", "get_rollout_metrics", **NEEDED)
        output["rollout_metrics"] = metrics(
            output["response_ids"], output["rewards"], loss_masks=output["loss_masks"]
        ) | {
            "benchflow/groups_withheld": sum(not group.complete for group in groups),
            "benchflow/sequences_left_out": entries.left_out,
        }
        return output

    def _request(self, call: int, name: str, places: Sequence[int], batch: Mapping[str, Any]) -> GroupRequest:
        metadata = batch.get("batch_metadata")
        extras = batch.get("env_extras")
        task = (extras[places[0]] or {}).get("task") if extras else None
        sampling = batch.get("sampling_params") or {}
        purpose: Literal["train", "eval"] = (
            "eval" if metadata is not None and metadata.training_phase == "eval" else "train"
        )
        number = int(name) if name.isdecimal() else zlib.crc32(name.encode())
        return GroupRequest(
            key=f"skyrl-{RUN}-{call}-{places[0]}",
            size=len(places),
            task=None if task is None else str(task),
            prompt=batch["prompts"][places[0]],
            seed=number,
            sampling=sampling_of(sampling, training=purpose == "train"),
            policy_version=None if metadata is None or metadata.global_step is None else str(metadata.global_step),
            deadline=self._deadline,
            purpose=purpose,
            ratios=sampling.get("temperature") if purpose == "train" and sampling.get("logprobs") is not None else None,
            max_output_tokens=sampling.get("max_tokens"),
        )


class Entries:
    """The lists of a `GeneratorOutput`, filled trajectory by trajectory."""

    def __init__(self, *, step_wise: bool) -> None:
        self._step_wise = step_wise
        self._rows: list[Row] = []
        self._rewards: list[float] = []
        self._reasons: list[str] = []
        self._seconds: list[float] = []
        self._ids: list[Any] = []
        self._last: list[bool] = []
        self.left_out = 0

    def add(self, group: FinishedGroup, number: int, trajectory_id: Any) -> None:
        """The sequences of rollout `number` of a group, each with the rollout's reward: SkyRL reads the last one's."""
        rows = group.rows(number)
        reward = (group.reward(number) or 0.0) if rows else 0.0
        reason = "stop" if rows else "abort"
        if not self._step_wise and len(rows) > 1:
            self.left_out += len(rows) - 1
            rows = [main_row(rows) or rows[0]]
        rows = rows or [group.masked(number)]
        for row in rows:
            self._rows.append(row)
            self._rewards.append(float(reward))
            self._reasons.append(reason)
            self._seconds.append(group.seconds[number])
            self._ids.append(trajectory_id)
            self._last.append(row is rows[-1])

    def output(self, *, logprobs: bool) -> dict[str, Any]:
        return {
            "prompt_token_ids": [list(row.prompt_ids) for row in self._rows],
            "response_ids": [list(row.completion_ids) for row in self._rows],
            "rewards": self._rewards,
            "loss_masks": [list(row.completion_mask) for row in self._rows],
            "stop_reasons": self._reasons,
            "rollout_metrics": None,
            "rollout_logprobs": [list(row.logprobs) for row in self._rows] if logprobs else None,
            "trajectory_ids": self._ids if self._step_wise else None,
            "trajectory_generation_times": self._seconds,
            "rollout_expert_indices": None,
            "is_last_step": self._last if self._step_wise else None,
            "env_metrics": None,
        }


def _members(batch: Mapping[str, Any]) -> dict[str, list[int]]:
    """Places in the batch by instance; a prompt without an id is an instance of its own."""
    ids = batch.get("trajectory_ids")
    members: dict[str, list[int]] = {}
    for place in range(len(batch["prompts"])):
        name = str(place) if ids is None else str(ids[place].instance_id)
        members.setdefault(name, []).append(place)
    return members


NEEDED: Final = {
    "needed_for": "ServiceGenerator needs SkyRL",
    "install": "use it in a run of SkyRL 0.3, with its environment",
}


def __getattr__(name: str) -> Any:
    if name != "ServiceGenerator":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = optional("skyrl.train.generators.base", "GeneratorInterface", **NEEDED)
    made = type(base)("ServiceGenerator", (Generator, base), {"__module__": __name__, "__doc__": Generator.__doc__})
    globals()[name] = made
    return made
