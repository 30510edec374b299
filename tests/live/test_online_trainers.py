"""verl, SkyRL and verifiers themselves, each in its own environment, take a group of rollouts from the rollout service.

The service is `bench serve` with plain folders in place of containers and a model that follows a script. Rollouts of
several sequences, which its agent has none of, come from a service that gives recorded ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.live.test_trainers import step
from tests.sandbox.scripted_engine import ScriptedEngine
from tests.sandbox.service.local_service import KEY
from tests.sandbox.service.support import ROOT, Model, Service, write_tasks
from tests.train.online import scripted_service
from tests.train.online.groups import TWO_THREADS, records_of
from tests.train.online.scripted_service import Answer, ndjson, ok, verdict
from train import stream_rollouts
from train.groups.advantage import advantages
from train.online.rows import main_row, rows_of

WEIGHTS = Path.home() / ".cache/capture-vllm/model"
GROUP, TASK = 4, "write-42"
WHY = "one of its rollouts has no reward"


@dataclass(frozen=True)
class Sequence:
    """What a trainer has of a sequence; logprobs in float32."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    reward: float
    advantage: float | None = None


def sequence(prompt: list[int], response: list[int], mask: list[int], logprobs: list[float], *more: Any) -> Sequence:
    return Sequence(tuple(prompt), tuple(response), tuple(mask), tuple(round(value, 4) for value in logprobs), *more)


def expected(records: list[Any], *, all_sequences: bool) -> list[Sequence]:
    """What the records hold, with the group's advantages as verl and SkyRL compute them."""
    found = []
    for record, advantage in zip(records, advantages([row["reward"] for row in records], eps=1e-6), strict=True):
        rows = rows_of(record)
        for row in rows if all_sequences else [main_row(rows)]:
            assert row is not None
            found.append(
                sequence(
                    row.prompt_ids, row.completion_ids, row.completion_mask, row.logprobs, record["reward"],
                    round(advantage, 3),
                )
            )  # fmt: skip
    return found


def one(values: list[float]) -> float:
    assert len(values) == 1, values
    return round(values[0], 3)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    write_tasks(tmp_path / "tasks", TASK)
    with ScriptedEngine(Model(right=0.75)) as engine, Service(tmp_path, engine, concurrency=GROUP) as running:
        yield running


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[Any]]]:
    """The address of a service that gives four recorded rollouts, the first of two sequences, and their records."""
    yield from recorded_service(tmp_path, monkeypatch, {})


@pytest.fixture
def withheld(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a service that gives the same rollouts and withholds their group."""
    verdicts = {"state": "withheld", "reason": "unscored", "detail": WHY, "advantages": None}
    for url, _ in recorded_service(tmp_path, monkeypatch, verdicts):
        yield url


def recorded_service(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> Iterator[tuple[str, list[Any]]]:
    rollouts = [{"reward": float(number % 2), **({} if number else {"calls": TWO_THREADS})} for number in range(GROUP)]
    records = records_of(folder / "recorded", rollouts)

    def answer(method: str, path: str, body: Any) -> Answer:
        if path == "/tasks":
            return ok({"tasks": [{"name": TASK, "digest": None, "prompt": "Write 42."}]})
        group = records[: body["size"]]
        return 200, {}, ndjson(*group[::-1], verdict(body["key"], group, **fields))

    monkeypatch.setattr(scripted_service, "KEY", KEY)
    with scripted_service.scripted_service(answer) as running:
        yield running.url, records


def ask(trainer: str, url: str, *words: str | Path) -> dict[str, Any]:
    """What the trainer's step prints. It imports this checkout, and uses what the document shows of its trainer."""
    document = (ROOT / "docs/online-trainers.md").read_text(encoding="utf-8")
    [shown] = re.findall(rf"```(?:yaml|python)\n([^`]*train\.online\.{trainer}[^`]*)```", document)
    variables = {
        "BENCHFLOW_SERVE_URL": url, "BENCHFLOW_SERVE_KEY": KEY, "PYTHONPATH": str(ROOT), "SHOWN": shown,
    }  # fmt: skip
    return step(trainer, f"online_{trainer}_steps.py", *words, **variables)


def records_by_group(job: Path) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for record in stream_rollouts(job, follow=False):
        groups.setdefault(str(record["group"]["group"]), []).append(record)
    assert all(len(records) == GROUP for records in groups.values())
    return groups


def in_verl(row: dict[str, Any]) -> Sequence:
    return sequence(
        row["prompt_ids"], row["response_ids"], row["response_mask"], row["logprobs"], row["reward"],
        one(row["advantages"]),
    )  # fmt: skip


def in_skyrl(result: dict[str, Any]) -> list[Sequence]:
    names = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "rewards")
    return [
        sequence(*values, one(levels))
        for *values, levels in zip(*(result[name] for name in names), result["advantages"], strict=True)
    ]


def test_verl_takes_a_group_in_both_of_its_trainers(service: Service) -> None:
    result = ask("verl", service.url, WEIGHTS, TASK)
    groups = records_by_group(service.job)
    classic, v1 = (next(groups[key] for key in groups if key.endswith(name)) for name in ("prompt-0", "prompt-1"))
    assert all(row["padding_is_masked"] and row["left_out"] is None for row in result["classic"])
    assert sorted(map(in_verl, result["classic"]), key=repr) == sorted(expected(classic, all_sequences=False), key=repr)
    assert result["status"] == {"prompt-1": "finished"}
    assert sorted(map(in_verl, result["v1"]), key=repr) == sorted(expected(v1, all_sequences=True), key=repr)
    assert all(row["tag"]["min_global_steps"] == row["tag"]["max_global_steps"] == 3 for row in result["v1"])
    assert {version for record in v1 for row in rows_of(record) for version in row.policy_versions} == {"3"}


def test_verls_v1_trainer_takes_two_sequences_of_a_rollout(recorded: tuple[str, list[Any]]) -> None:
    url, records = recorded
    result = ask("verl", url, WEIGHTS, TASK)
    assert [row["key"] for row in result["v1"]] == [f"prompt-1_{key}" for key in ("0_0", "0_1", "1_0", "2_0", "3_0")]
    assert [in_verl(row) for row in result["v1"]] == expected(records, all_sequences=True)
    assert [in_verl(row) for row in result["classic"]] == expected(records, all_sequences=False)
    assert [row["left_out"] for row in result["classic"]][1:] == [None] * 3
    assert result["classic"][0]["left_out"].startswith("1 of 2 sequences")


def test_skyrl_takes_a_group(service: Service) -> None:
    result = ask("skyrl", service.url, WEIGHTS, TASK, "whole")
    [records] = records_by_group(service.job).values()
    assert sorted(in_skyrl(result), key=repr) == sorted(expected(records, all_sequences=False), key=repr)
    assert result["metrics"]["benchflow/groups_withheld"] == 0
    assert result["trained"] == [sum(mask) for mask in result["loss_masks"]]


def test_skyrl_takes_two_sequences_step_wise(recorded: tuple[str, list[Any]]) -> None:
    url, records = recorded
    result = ask("skyrl", url, WEIGHTS, TASK, "step")
    assert in_skyrl(result) == expected(records, all_sequences=True)
    assert result["repetitions"] == [0, 0, 1, 2, 3] and result["last"] == [False, True, True, True, True]


@pytest.mark.parametrize("source", ["service", "recorded"])
def test_verifiers_server_returns_the_rollouts(source: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(source)
    url = found.url if source == "service" else found[0]
    result = ask("verifiers", url, TASK, str(GROUP))
    assert result["tasks"] == [TASK] and all(episode["ok"] and not episode["errors"] for episode in result["episodes"])
    if source == "service":
        records = {record["rollout_path"]: record for record in stream_rollouts(found.job, follow=False)}
        assert len({episode["rollout"] for episode in result["episodes"]}) == GROUP
    else:
        records = {record["rollout_path"]: record for record in found[1]}
    for episode in result["episodes"]:
        record = records[episode["rollout"]]
        rows = rows_of(record)
        assert episode["reward"] == record["reward"] and episode["turns"] == sum(len(row.spans) for row in rows)
        for branch, row in zip(episode["branches"], rows, strict=True):
            assert branch["token_ids"] == row.prompt_ids + row.completion_ids and branch["trainable"]
            assert branch["mask"] == [0] * len(row.prompt_ids) + row.completion_mask
            assert branch["logprobs"] == [0.0] * len(row.prompt_ids) + row.logprobs


def test_nothing_of_a_withheld_group_is_trained(withheld: str) -> None:
    verl = ask("verl", withheld, WEIGHTS, TASK)
    assert verl["status"] == {"prompt-1": "failure"} and verl["v1"] == []
    for row in verl["classic"]:
        assert not any(row["response_mask"]) and row["response_ids"] and row["reward"] == 0 and row["left_out"] == WHY
    skyrl = ask("skyrl", withheld, WEIGHTS, TASK, "step")
    assert skyrl["trained"] == [0] * GROUP and skyrl["rewards"] == [0.0] * GROUP
    assert skyrl["metrics"]["benchflow/groups_withheld"] == 1
    for episode in ask("verifiers", withheld, TASK, "2")["episodes"]:
        assert not episode["ok"] and episode["branches"] == []
        assert episode["errors"] == [f"GroupWithheld: the rollout is left out: {WHY}"]
