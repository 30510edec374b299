"""slime: a generate function whose rollouts run in `bench serve`. Written to slime's published signature.

    --custom-generate-function-path train.online.slime.generate
    --custom-reward-post-process-path train.online.slime.group_rewards
    --dynamic-sampling-filter-path train.online.slime.keep_group

slime is on no package index: its `Sample` and the function that calls this one were read at commit 624b824 (August
2026). Nothing of slime is imported: the samples that come back are made from the one that came in. The service and its
key are named by BENCHFLOW_SERVE_URL and BENCHFLOW_SERVE_KEY; BENCHFLOW_SERVE_DEADLINE is seconds for a whole group.
"""

from __future__ import annotations

import copy
import itertools
import logging
import os
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from train.errors import BadInput
from train.groups.advantage import mean_and_std
from train.online.groups import RUN, FinishedGroup, GroupMembers, GroupRequest, connect, sampling_of
from train.online.rows import Row, main_row

logger = logging.getLogger(__name__)

DEADLINE_VARIABLE: Final = "BENCHFLOW_SERVE_DEADLINE"
_MEMBERS: Final = GroupMembers()
_ASKED: Final[defaultdict[int, Iterator[int]]] = defaultdict(itertools.count)
#: slime's estimators whose rewards are centred on the group's mean, and those that are divided by its deviation.
_SCALED: Final = ("grpo", "gspo", "cispo")
_NORMALIZED: Final = (*_SCALED, "reinforce_plus_plus_baseline")


async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False) -> Any:
    """slime's `Sample`s of one rollout: a list, with one `rollout_id`; for an evaluation the longest alone.

    It is a list for a rollout of one sequence as well: slime flattens a batch by the type of its first element.

    The samples of a `group_index` are one group of the service. The task is `metadata["task"]` of the sample; else the
    one whose name or prompt the sample's prompt is; else its `group_index` picks one. A sample of a group that is
    withheld has status FAILED, reward 0.0 and `remove_sample`, for which slime sets its loss mask to 0.
    """
    alone = evaluation or sample.group_index is None
    size = 1 if alone else int(args.n_samples_per_prompt)
    # A group that slime asks for again is another group.
    name = uuid.uuid4().hex if alone else f"{sample.group_index}-{next(_ASKED[sample.group_index]) // size}"
    key = f"slime-{RUN}-{name}"
    group, place = await _MEMBERS.join(
        connect(), key, lambda members: _request(key, members, sample, sampling_params, evaluation), size=size
    )
    rows, record = group.rows(place), group.records[place]
    if rows and record is not None:
        status = "TRUNCATED" if record["error_category"] == "timeout" else "COMPLETED"
        rows = [main_row(rows) or rows[0]] if evaluation else rows
        made = [_filled(sample, row, status=status, reward=record["reward"], group=group) for row in rows]
    else:
        logger.warning("sample %s is left out: %s", sample.index, group.why(place))
        made = [_filled(sample, group.masked(place), status="FAILED", reward=0.0, group=group, remove=True)]
    return made[0] if evaluation else made


def keep_group(args: Any, group: Sequence[Any], **_: Any) -> bool:
    """slime's dynamic filter: False for a group that was withheld, which slime then replaces."""
    return not any(sample.remove_sample for samples in group for sample in samples)


def group_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """slime's raw and normalized rewards: GRPO's over the rollouts of a group, whatever number of samples each gave.

    slime itself normalizes over all samples of a batch as soon as one rollout gave two.
    """
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    if not args.rewards_normalization or args.advantage_estimator not in _NORMALIZED:
        return raw, raw
    groups: dict[Any, dict[Any, float]] = {}
    for sample, reward in zip(samples, raw, strict=True):
        if not sample.remove_sample:
            groups.setdefault(sample.group_index, {})[sample.rollout_id] = reward
    normalized = []
    for sample, reward in zip(samples, raw, strict=True):
        mean, std = mean_and_std(list(groups.get(sample.group_index, {}).values()))
        divisor = std + 1e-6 if args.grpo_std_normalization and args.advantage_estimator in _SCALED else 1.0
        normalized.append(0.0 if sample.remove_sample else (reward - mean) / divisor)
    return raw, normalized


def _filled(
    sample: Any, row: Row, *, status: str, reward: float | None, group: FinishedGroup, remove: bool = False
) -> Any:
    made = copy.copy(sample)
    made.tokens = [*row.prompt_ids, *row.completion_ids]
    made.response_length = len(row.completion_ids)
    made.loss_mask = list(row.completion_mask)
    made.rollout_log_probs = list(row.logprobs)
    made.weight_versions = list(row.policy_versions)
    made.reward = reward
    made.remove_sample = remove
    made.status = type(sample).Status[status]
    made.rollout_id = sample.index if sample.rollout_id is None else sample.rollout_id
    made.metadata = {**(sample.metadata or {}), "group": group.key, "left_out": group.reason}
    return made


def _request(key: str, size: int, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool) -> GroupRequest:
    task = (sample.metadata or {}).get("task")
    number = sample.index if sample.group_index is None else sample.group_index
    return GroupRequest(
        key=key,
        size=size,
        task=None if task is None else str(task),
        prompt=sample.prompt,
        seed=int(number or 0),
        sampling=sampling_of(sampling_params, training=not evaluation),
        deadline=_deadline(),
        purpose="eval" if evaluation else "train",
        ratios=None if evaluation else sampling_params.get("temperature", 1.0),
        max_output_tokens=sampling_params.get("max_new_tokens"),
    )


def _deadline() -> float | None:
    text = os.environ.get(DEADLINE_VARIABLE)
    try:
        return float(text) if text else None
    except ValueError:
        raise BadInput(f"{DEADLINE_VARIABLE} must be a number of seconds, not '{text}'") from None
