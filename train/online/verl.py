"""verl: an agent loop whose rollouts run in `bench serve`. Read in verl 0.9.1.

Named in the file of `rollout.agent.agent_loop_config_path`, with the options of `ServiceLoop` beside `_target_`:

    - name: benchflow
      _target_: train.online.verl.ServiceAgentLoop
      url: http://127.0.0.1:8300

`ServiceAgentLoop` is made when it is asked for, from verl's `AgentLoopBase`; nothing of verl is imported before.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from train.extras import optional
from train.online.groups import RUN, GroupMembers, GroupRequest, GroupWithheld, connect, sampling_of
from train.online.rows import Row, main_row

logger = logging.getLogger(__name__)

_MEMBERS: Final = GroupMembers()
#: Values of `extra_info.split`, which verl's own data preparation writes, that mean evaluation.
_EVALUATION: Final = frozenset({"test", "val", "validation", "eval"})


@dataclass(frozen=True, slots=True)
class Response:
    """One sequence in verl's shape: P `prompt_ids`, R values each of the others. Mask 1 is a sampled id."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]


def fit(row: Row, prompt_length: int, response_length: int) -> Response:
    """A sequence within verl's lengths, cut on the right as verl's own loops do it.

    verl pads but never cuts a prompt. What does not fit into `prompt_length` goes before the response with mask 0: the
    ids that each token was sampled after stay the same, which a prompt cut on the left would change.
    """
    moved = row.prompt_ids[prompt_length:]
    zeros = [0] * len(moved)
    return Response(
        list(row.prompt_ids[:prompt_length]),
        [*moved, *row.completion_ids][:response_length],
        [*zeros, *row.completion_mask][:response_length],
        [*map(float, zeros), *row.logprobs][:response_length],
    )


def steps(rows: Sequence[Row], default: int | None) -> dict[str, int]:
    """`min_global_steps` and `max_global_steps`, the first and last policy of a rollout, where versions are numbers."""
    versions = [version for row in rows for version in row.policy_versions]
    numbers = [int(version) for version in versions if version.isdecimal()]
    if len(numbers) != len(versions) or not numbers:
        return {} if default is None else {"min_global_steps": default, "max_global_steps": default}
    return {"min_global_steps": min(numbers), "max_global_steps": max(numbers)}


class ServiceLoop:
    """What `ServiceAgentLoop` adds to `AgentLoopBase`: `run` gets its rollout from the service.

    The samples of a prompt, which have one `uid`, are one group of the service. The task is the row's `task` column or
    its `extra_info.task`; else the one whose name or prompt the row's prompt is; else its `index` picks one. `url` and
    `key` default to BENCHFLOW_SERVE_URL and BENCHFLOW_SERVE_KEY; `deadline` is seconds for the whole group, and
    `max_output_tokens` the most that a call may sample.
    """

    config: Any

    def __init__(
        self,
        *arguments: Any,
        url: str | None = None,
        key: str | None = None,
        deadline: float | None = None,
        max_output_tokens: int | None = None,
        **more: Any,
    ) -> None:
        super().__init__(*arguments, **more)
        self._service = connect(url, key)
        self._deadline = deadline
        self._max_output_tokens = max_output_tokens

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """verl's `AgentLoopOutput`; a list of them in the trainer of `verl.trainer.ppo.v1`, which takes several.

        A group that is withheld raises `GroupWithheld` there, and verl drops the prompt. The other trainer would stop,
        so that each sample of the group has mask 0 and reward 0.0, whose advantages are 0.
        """
        several = "session_id" in row
        uid = f"{row.get('uid') or uuid.uuid4().hex}{'-greedy' if sampling_params.get('temperature') == 0 else ''}"
        group, place = await _MEMBERS.join(
            self._service, f"verl-{RUN}-{uid}", lambda size: self._request(uid, size, sampling_params, row)
        )
        rows, left_out = group.rows(place), None
        if not rows:
            left_out = group.why(place)
            if several:
                raise GroupWithheld(f"the group {group.key} is left out: {left_out}")
        elif len(rows) > 1 and not several:
            left_out = f"{len(rows) - 1} of {len(rows)} sequences, since this trainer takes one per sample"
            rows = [main_row(rows) or rows[0]]
        record = group.records[place]
        notes: dict[str, Any] = {
            "reward_extra_info": {},
            "rollout": None if record is None else record["rollout_path"],
            "left_out": left_out,
            **steps(rows, row.get("global_steps")),
        }
        if left_out:
            logger.warning("rollout %s of the group %s is left out: %s", notes["rollout"], group.key, left_out)
        rollout = self.config.actor_rollout_ref.rollout
        loops = _verl()
        outputs = []
        for sequence in rows or [group.masked(place)]:
            response = fit(sequence, int(rollout.prompt_length), int(rollout.response_length))
            outputs.append(
                loops.AgentLoopOutput(
                    prompt_ids=response.prompt_ids,
                    response_ids=response.response_ids,
                    response_mask=response.response_mask,
                    response_logprobs=response.response_logprobs if sampling_params.get("logprobs") else None,
                    reward_score=group.reward(place) if rows else 0.0,
                    num_turns=0 if record is None else 2 * len(record["calls"]),
                    metrics=loops.AgentLoopMetrics(generate_sequences=group.seconds[place]),
                    extra_fields=dict(notes),
                )
            )
        return outputs if several else outputs[0]

    def _request(self, uid: str, size: int, sampling_params: Mapping[str, Any], row: Mapping[str, Any]) -> GroupRequest:
        extra = row.get("extra_info")
        extra = extra if isinstance(extra, Mapping) else {}
        task = row.get("task") or extra.get("task")
        seed = row.get("index", extra.get("index", 0))
        purpose: Literal["train", "eval"] = "eval" if str(extra.get("split")) in _EVALUATION else "train"
        # Only there the step of the row is the policy that samples it.
        synchronous = "session_id" in row and self.config.trainer.v1.trainer_mode == "sync"
        return GroupRequest(
            key=f"verl-{RUN}-{uid}",
            size=size,
            task=None if task is None else str(task),
            prompt=row.get("raw_prompt"),
            seed=int(seed),
            sampling=sampling_of(sampling_params, training=purpose == "train"),
            policy_version=str(row["global_steps"]) if synchronous else None,
            deadline=self._deadline,
            purpose=purpose,
            max_output_tokens=self._max_output_tokens,
            # Nothing of a greedy baseline (temperature 0) is trained.
            ratios=(sampling_params.get("temperature") or None)
            if purpose == "train" and sampling_params.get("logprobs")
            else None,
        )


def _verl() -> Any:
    return optional(
        "verl.experimental.agent_loop.agent_loop",
        needed_for="ServiceAgentLoop needs verl",
        install="name it in a run of verl 0.9, with its environment",
    )


def __getattr__(name: str) -> Any:
    if name != "ServiceAgentLoop":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    loops = _verl()
    base = loops.AgentLoopBase
    made = type(base)("ServiceAgentLoop", (ServiceLoop, base), {"__module__": __name__, "__doc__": ServiceLoop.__doc__})
    globals()[name] = made
    return made
