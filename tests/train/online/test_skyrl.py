"""SkyRL's generator without SkyRL, but for the metrics it computes itself. The real package is in `tests/live`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.train.online.groups import PLAIN, TWO_THREADS, Service, records_of
from train.errors import BadInput, ServiceUnavailable
from train.online import skyrl
from train.online.rows import rows_of
from train.online.skyrl import Generator


@pytest.fixture(autouse=True)
def _skyrl(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(get_rollout_metrics=lambda responses, rewards, loss_masks: {"n": len(responses)})
    monkeypatch.setitem(sys.modules, "skyrl.train.generators.utils", module)  # type: ignore[arg-type]


def generator(service: Service, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Generator:
    monkeypatch.setattr(skyrl, "connect", lambda url, key: service)
    return Generator("http://127.0.0.1:1", **options)


def batch(*ids: tuple[str, int], phase: str = "train", extras: Any = None) -> dict[str, Any]:
    return {
        "prompts": [[] for _ in ids],
        "env_classes": ["" for _ in ids],
        "env_extras": extras,
        "sampling_params": {"temperature": 1.0, "top_k": -1, "max_tokens": 99, "logprobs": 1, "stop": None},
        "trajectory_ids": [SimpleNamespace(instance_id=name, repetition_id=number) for name, number in ids],
        "batch_metadata": SimpleNamespace(global_step=12, training_phase=phase),
    }


async def test_a_group_per_instance_in_the_order_of_the_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = records_of(tmp_path / "job", [{"reward": 0.0}, {"reward": 1.0}])
    service = Service(records)
    output = await generator(service, monkeypatch).generate(batch(("4", 0), ("9", 0), ("4", 1), ("9", 1)))
    assert output["rewards"] == [0.0, 0.0, 1.0, 1.0]
    rows = [rows_of(records[number])[0] for number in (0, 0, 1, 1)]
    assert output["prompt_token_ids"] == [row.prompt_ids for row in rows]
    assert output["response_ids"] == [row.completion_ids for row in rows]
    assert output["loss_masks"] == [row.completion_mask for row in rows]
    assert output["rollout_logprobs"] == [row.logprobs for row in rows]
    assert output["stop_reasons"] == ["stop"] * 4 and output["is_last_step"] is output["trajectory_ids"] is None
    assert sorted((asked["seed"], asked["size"]) for asked in service.asked) == [(4, 2), (9, 2)]
    asked = service.asked[0]
    assert asked["sampling"] == PLAIN
    assert (asked["policy_version"], asked["purpose"], asked["max_output_tokens"]) == ("12", "train", 99)


async def test_step_wise_has_an_entry_per_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(records_of(tmp_path / "job", [{"calls": TWO_THREADS, "reward": 1.0}, {"reward": 0.0}]))
    given = batch(("a", 0), ("a", 1), extras=[{"task": "write-number"}] * 2, phase="eval")
    output = await generator(service, monkeypatch, step_wise=True).generate(given)
    assert output["is_last_step"] == [False, True, True] and output["rewards"] == [1.0, 1.0, 0.0]
    first, second = given["trajectory_ids"]
    assert output["trajectory_ids"] == [first, first, second]
    [asked] = service.asked
    assert (asked["task"], asked["seed"], asked["purpose"]) == ("write-number", None, "eval")


async def test_one_sequence_per_trajectory_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(records_of(tmp_path / "job", [{"calls": TWO_THREADS}]))
    output = await generator(service, monkeypatch).generate(batch(("1", 0)))
    assert len(output["response_ids"]) == 1 and output["rollout_metrics"]["benchflow/sequences_left_out"] == 1
    assert "set generator.step_wise_trajectories" in caplog.text


async def test_a_withheld_group_has_no_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    records = records_of(tmp_path / "job", [{"reward": 1.0}, {"reward": None, "calls": None}])
    service = Service(records, state="withheld", detail="rollout 1 has no reward")
    output = await generator(service, monkeypatch, step_wise=True).generate(batch(("1", 0), ("1", 1)))
    assert output["rewards"] == [0.0, 0.0] and output["stop_reasons"] == ["abort", "abort"]
    assert not any(any(mask) for mask in output["loss_masks"]) and all(output["response_ids"])
    assert output["rollout_metrics"] == {"n": 2, "benchflow/groups_withheld": 1, "benchflow/sequences_left_out": 0}
    assert "is left out: rollout 1 has no reward" in caplog.text


async def test_an_evaluation_alone_has_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(records_of(tmp_path / "job", [{}]))
    given = batch(("1", 0), phase="eval")
    given["batch_metadata"].global_step = None
    await generator(service, monkeypatch).generate(given)
    assert service.asked[0]["policy_version"] is None


async def test_keys_are_never_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(records_of(tmp_path / "job", [{}]))
    made = generator(service, monkeypatch)
    for _ in range(2):
        await made.generate(batch(("1", 0)))
    await generator(service, monkeypatch).generate(batch(("1", 0)))
    assert len({asked["key"] for asked in service.asked}) == 3


async def test_the_services_sentence_ends_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service([], error=ServiceUnavailable("the rollout service does not answer"))
    with pytest.raises(ServiceUnavailable, match="does not answer"):
        await generator(service, monkeypatch).generate(batch(("1", 0), ("2", 0)))


def test_without_skyrl_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skyrl.train.generators.base", None)
    with pytest.raises(BadInput, match=r"ServiceGenerator needs SkyRL .*: use it in a run of SkyRL"):
        skyrl.ServiceGenerator  # noqa: B018 - it is made when it is asked for
