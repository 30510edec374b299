"""slime's generate function by its published signature: a stand-in has the fields of slime's `Sample`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.train.online.groups import PLAIN, TWO_THREADS, Service, records_of
from train.errors import BadInput
from train.online import slime
from train.online.rows import rows_of
from train.online.slime import generate, group_rewards, keep_group

ARGS = SimpleNamespace(
    n_samples_per_prompt=4,
    rewards_normalization=True,
    grpo_std_normalization=True,
    advantage_estimator="grpo",
    reward_key=None,
)
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 77, "stop": None}


@dataclass
class Sample:
    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        FAILED = "failed"

    status: Status = Status.PENDING

    def get_reward_value(self, args: Any) -> Any:
        return self.reward


async def ask(service: Service, samples: list[Sample], monkeypatch: pytest.MonkeyPatch, **more: Any) -> list[Any]:
    monkeypatch.setattr(slime, "connect", lambda: service)
    return await asyncio.gather(*(generate(ARGS, sample, SAMPLING, **more) for sample in samples))


def group(number: int = 6) -> list[Sample]:
    return [Sample(group_index=number, index=10 * number + place) for place in range(4)]


async def test_a_group_of_four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = records_of(tmp_path / "job", [{"reward": float(number % 2)} for number in range(4)])
    service = Service(records)
    made = [sample for [sample] in await ask(service, group(), monkeypatch)]
    assert [sample.reward for sample in made] == [0.0, 1.0, 0.0, 1.0]
    for place, (sample, record) in enumerate(zip(made, records, strict=True)):
        [row] = rows_of(record)
        assert sample.tokens == row.prompt_ids + row.completion_ids
        assert (
            sample.response_length == len(sample.loss_mask) == len(sample.rollout_log_probs) == len(row.completion_ids)
        )
        assert (sample.loss_mask, sample.rollout_log_probs) == (row.completion_mask, row.logprobs)
        assert sample.status is Sample.Status.COMPLETED and not sample.remove_sample
        assert (sample.index, sample.rollout_id, sample.group_index) == (60 + place, 60 + place, 6)
    [asked] = service.asked
    assert (asked["size"], asked["seed"], asked["purpose"], asked["max_output_tokens"]) == (4, 6, "train", 77)
    assert asked["sampling"] == PLAIN


async def test_the_sequences_of_a_rollout_are_siblings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = [{"calls": TWO_THREADS, "reward": 1.0}, {"reward": 0.0}, {"reward": 0.0}, {"reward": 1.0}]
    made = await ask(Service(records_of(tmp_path / "job", rollouts)), group(), monkeypatch)
    first, second = made[0]
    assert first.rollout_id == second.rollout_id == 60 and first.tokens != second.tokens
    assert [len(samples) for samples in made] == [2, 1, 1, 1] and keep_group(ARGS, made)
    flat = [sample for samples in made for sample in samples]
    raw, normalized = group_rewards(ARGS, flat)
    assert raw == [1.0, 1.0, 0.0, 0.0, 1.0]
    # The group's mean is over its four rollouts, 0.5, not over its five samples, 0.6.
    assert normalized == pytest.approx([0.866, 0.866, -0.866, -0.866, 0.866], abs=1e-3)
    assert group_rewards(SimpleNamespace(**vars(ARGS) | {"rewards_normalization": False}), flat) == (raw, raw)
    centred = SimpleNamespace(**vars(ARGS) | {"grpo_std_normalization": False})
    assert group_rewards(centred, flat)[1] == [0.5, 0.5, -0.5, -0.5, 0.5]


async def test_a_withheld_group_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = records_of(tmp_path / "job", [{"reward": 1.0}, {}, {}, {"reward": None, "calls": None}])
    service = Service(records, state="withheld", detail="rollout 3 has no reward")
    groups = await ask(service, group(), monkeypatch)
    assert not keep_group(ARGS, groups)
    made = [sample for [sample] in groups]
    for sample in made:
        assert sample.remove_sample and sample.status is Sample.Status.FAILED and sample.reward == 0.0
        assert sample.response_length == len(sample.loss_mask) == len(sample.rollout_log_probs) > 0
        assert not any(sample.loss_mask) and sample.metadata["left_out"] == "rollout 3 has no reward"
    assert group_rewards(ARGS, made) == ([0.0] * 4, [0.0] * 4)


async def test_a_group_that_slime_asks_for_again_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(records_of(tmp_path / "job", [{}] * 4))
    for _ in range(2):
        await ask(service, group(2), monkeypatch)
    assert len(service.asked) == len({asked["key"] for asked in service.asked}) == 2


async def test_an_evaluation_sample_is_a_group_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(records_of(tmp_path / "job", [{"error": "out of time", "calls": TWO_THREADS}]))
    samples = [Sample(index=3, metadata={"task": "write-number"}), Sample(index=3)]
    made = await ask(service, samples, monkeypatch, evaluation=True)
    assert [sample.status for sample in made] == [Sample.Status.TRUNCATED] * 2
    assert [(asked["size"], asked["task"], asked["seed"], asked["purpose"]) for asked in service.asked] == [
        (1, "write-number", None, "eval"),
        (1, None, 3, "eval"),
    ]
    assert service.asked[0]["key"] != service.asked[1]["key"]


async def test_a_deadline_that_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(records_of(tmp_path / "job", [{}]))
    monkeypatch.setenv("BENCHFLOW_SERVE_DEADLINE", "soon")
    with pytest.raises(BadInput, match="BENCHFLOW_SERVE_DEADLINE must be a number of seconds, not 'soon'"):
        await ask(service, group(), monkeypatch)
    monkeypatch.setenv("BENCHFLOW_SERVE_DEADLINE", "90")
    await ask(service, [Sample(index=1)], monkeypatch)
    assert service.asked[-1]["deadline"] == 90.0
