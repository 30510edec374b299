"""verl's agent loop without verl: a stand-in has the fields of its output. The real package is in `tests/live`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.train.build import conversation
from tests.train.online.groups import PLAIN, TWO_THREADS, Service, records_of
from train.errors import BadInput
from train.online import verl
from train.online.groups import GroupWithheld
from train.online.rows import rows_of
from train.online.verl import ServiceLoop, fit, steps

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


class Base:
    def __init__(self, trainer_config: Any, **more: Any) -> None:
        self.config = trainer_config


class Loop(ServiceLoop, Base): ...


@pytest.fixture(autouse=True)
def _verl(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        AgentLoopOutput=lambda **fields: SimpleNamespace(**fields), AgentLoopMetrics=lambda **fields: fields
    )
    monkeypatch.setitem(sys.modules, "verl.experimental.agent_loop.agent_loop", module)  # type: ignore[arg-type]


def loops(
    service: Service,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    mode: str = "sync",
    cap: int | None = None,
    **lengths: int,
) -> Any:
    """A loop per sample, as verl makes them, for `service`."""
    monkeypatch.setattr(verl, "connect", lambda url, key: service)
    rollout = SimpleNamespace(**{"prompt_length": 64, "response_length": 64, **lengths})
    config = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout=rollout),
        trainer=SimpleNamespace(v1=SimpleNamespace(trainer_mode=mode)),
    )
    options: dict[str, Any] = {"url": "http://127.0.0.1:1", "max_output_tokens": cap}
    return [Loop(trainer_config=config, **options) for _ in range(size)]


async def run(made: list[Any], sampling: dict[str, Any] = SAMPLING, *, v1: bool = False, **row: Any) -> list[Any]:
    row = {"uid": "u", "index": 5, "raw_prompt": [], **row}
    rows = [row | ({"session_id": number, "global_steps": 7} if v1 else {}) for number in range(len(made))]
    return await asyncio.gather(*(loop.run(sampling, **one) for loop, one in zip(made, rows, strict=True)))


async def test_a_group_of_four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = records_of(tmp_path / "job", [{"reward": float(number % 2)} for number in range(4)])
    service = Service(records)
    outputs = await run(loops(service, 4, monkeypatch))
    assert [output.reward_score for output in outputs] == [0.0, 1.0, 0.0, 1.0]
    for output, record in zip(outputs, records, strict=True):
        [row] = rows_of(record)
        assert (output.prompt_ids, output.response_ids) == (row.prompt_ids, row.completion_ids)
        assert (output.response_mask, output.response_logprobs) == (row.completion_mask, row.logprobs)
        assert output.num_turns == 4 and output.extra_fields["left_out"] is None
    [asked] = service.asked
    assert (asked["size"], asked["seed"], asked["task"], asked["purpose"]) == (4, 5, None, "train")
    assert asked["sampling"] == PLAIN | {"repetition_penalty": 1.0}
    assert asked["policy_version"] is None


async def test_what_a_call_may_sample_is_the_loops_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(records_of(tmp_path / "job", [{}]))
    await run(loops(service, 1, monkeypatch, cap=99))
    assert service.asked[0]["max_output_tokens"] == 99


async def test_the_v1_trainer_takes_every_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(records_of(tmp_path / "job", [{"calls": TWO_THREADS}, {}]))
    outputs = await run(loops(service, 2, monkeypatch), v1=True, extra_info={"task": "write-number", "split": "test"})
    assert [len(sample) for sample in outputs] == [2, 1]
    for sample in outputs:
        for output in sample:
            assert output.extra_fields["reward_extra_info"] == {}
            assert output.extra_fields["min_global_steps"] == output.extra_fields["max_global_steps"] == 7
    [asked] = service.asked
    assert (asked["task"], asked["seed"], asked["policy_version"], asked["purpose"]) == (
        "write-number",
        None,
        "7",
        "eval",
    )


async def test_an_asynchronous_trainers_step_is_not_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(records_of(tmp_path / "job", [{}]))
    await run(loops(service, 1, monkeypatch, mode="separate_async"), v1=True)
    assert service.asked[0]["policy_version"] is None


async def test_one_sequence_per_sample_elsewhere_and_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(records_of(tmp_path / "job", [{"calls": TWO_THREADS}]))
    [output] = await run(loops(service, 1, monkeypatch))
    assert output.extra_fields["left_out"] == "1 of 2 sequences, since this trainer takes one per sample"


async def test_a_withheld_group_is_masked_or_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = records_of(tmp_path / "job", [{"reward": 1.0}, {"reward": None, "calls": None}])
    service = Service(records, state="withheld", detail="rollout 1 has no reward")
    outputs = await run(loops(service, 2, monkeypatch))
    for output in outputs:
        assert not any(output.response_mask) and output.reward_score == 0.0 and output.response_ids
        assert len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs)
        assert output.extra_fields["left_out"] == "rollout 1 has no reward"
    with pytest.raises(GroupWithheld, match="is left out: rollout 1 has no reward"):
        await run(loops(service, 2, monkeypatch), v1=True)


async def test_logprobs_of_another_temperature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused where verl asks for logprobs, and no matter where it does not, nor in an evaluation."""
    service = Service(records_of(tmp_path / "job", [{"sampling": {"temperature": 0.7}}]))
    sampling = SAMPLING | {"temperature": 0.7}
    [output] = await run(loops(service, 1, monkeypatch), sampling)
    assert not any(output.response_mask) and "no ratio can be built" in output.extra_fields["left_out"]
    [output] = await run(loops(service, 1, monkeypatch), sampling | {"logprobs": False})
    assert any(output.response_mask) and output.response_logprobs is None
    [output] = await run(loops(service, 1, monkeypatch), sampling, extra_info={"split": "test"})
    assert any(output.response_mask)


async def test_logprobs_only_where_verl_asks_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(records_of(tmp_path / "job", [{}]))
    [output] = await run(loops(service, 1, monkeypatch), SAMPLING | {"logprobs": False})
    assert output.response_logprobs is None


async def test_a_greedy_baseline_is_a_group_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(records_of(tmp_path / "job", [{}, {}]))
    made = loops(service, 3, monkeypatch)
    greedy = SAMPLING | {"temperature": 0}
    await asyncio.gather(run(made[:2]), run(made[2:], greedy))
    assert sorted(asked["size"] for asked in service.asked) == [1, 2]
    assert len({asked["key"] for asked in service.asked}) == 2


@pytest.mark.parametrize(("prompt", "response"), [(64, 64), (5, 64), (5, 12), (12, 1), (1, 1)])
def test_what_does_not_fit_the_prompt_comes_before_the_response(tmp_path: Path, prompt: int, response: int) -> None:
    [row] = rows_of(records_of(tmp_path / "job", [{"calls": conversation(3)}])[0])
    made = fit(row, prompt, response)
    whole = row.prompt_ids + row.completion_ids
    assert made.prompt_ids + made.response_ids == whole[: min(len(row.prompt_ids), prompt) + response]
    assert len(made.response_ids) == len(made.response_mask) == len(made.response_logprobs) <= response
    mask = [0] * len(row.prompt_ids) + row.completion_mask
    logprobs = [0.0] * len(row.prompt_ids) + row.logprobs
    start = len(made.prompt_ids)
    assert made.response_mask == mask[start : start + response]
    assert made.response_logprobs == logprobs[start : start + response]


def test_policy_steps() -> None:
    def rows(*versions: list[str]) -> Any:
        return [SimpleNamespace(policy_versions=some) for some in versions]

    assert steps(rows(["3", "4"], ["11"]), 9) == {"min_global_steps": 3, "max_global_steps": 11}
    assert steps(rows([]), 9) == {"min_global_steps": 9, "max_global_steps": 9}
    assert steps(rows(["base", "4"]), 9) == {"min_global_steps": 9, "max_global_steps": 9}
    assert steps(rows(["base"]), None) == {}


def test_without_verl_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl.experimental.agent_loop.agent_loop", None)
    with pytest.raises(BadInput, match=r"ServiceAgentLoop needs verl .*: name it in a run of verl"):
        verl.ServiceAgentLoop  # noqa: B018 - it is made when it is asked for
