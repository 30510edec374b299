"""Rollouts of an evaluation: no row, no record and no group has one that did not ask for it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from capture.journal.trainer_files import results_row, verifiers_row
from tests.train.build import conversation, make_job, make_rollout
from tests.train.conversion import notes_of, options, rows_of
from train import astream_rollouts, stream_rollouts
from train.cli import app
from train.errors import BadInput, NothingWritten
from train.rollouts.rollouts import find_rollouts
from train.rows.convert import convert
from train.rows.formats import NAMES

EVAL = {"result": {"purpose": "eval"}}
LEFT_OUT = "run as an evaluation; --purpose eval or all takes them"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Two rollouts of each purpose, of one task."""
    names = [{"name": f"t__{number}", "task": "t"} for number in range(4)]
    return make_job(tmp_path / "job", [names[0], {**names[1], **EVAL}, names[2], {**names[3], **EVAL}])


@pytest.mark.parametrize("format", NAMES)
@pytest.mark.parametrize(("purpose", "count"), [("train", 2), ("eval", 2), ("all", 4)])
def test_rows_are_of_the_purpose_that_was_asked_for(
    job: Path, tmp_path: Path, format: str, purpose: str, count: int
) -> None:
    result = convert(
        job, tmp_path / ("rows.parquet" if format == "verl-sft" else "rows"), options(format=format, purpose=purpose)
    )
    assert result.rollouts == count and result.manifest["purpose"] == purpose
    assert (LEFT_OUT in notes_of(result)) == (purpose == "train")
    assert ("run for training" in notes_of(result)) == (purpose == "eval")


@pytest.mark.parametrize("mode", ["exchange", "segment"])
def test_other_modes_leave_evaluations_out_too(job: Path, tmp_path: Path, mode: str) -> None:
    result = convert(job, tmp_path / "rows.jsonl", options(format="trl-sft-ids", row_mode=mode))
    assert result.rollouts == 2 and result.manifest["left_out"] == {"evaluation": 2}


def test_the_command_takes_training_only_unless_asked(job: Path, tmp_path: Path) -> None:
    command = ["convert", str(job), "--format", "trl-sft", "--out", str(tmp_path / "rows.jsonl")]
    assert f"left out 2 rollout(s): {LEFT_OUT}" in CliRunner().invoke(app, command).stderr
    assert "4 rollout(s)" in CliRunner().invoke(app, [*command, "--purpose", "all"]).stdout
    wrong = CliRunner().invoke(app, [*command, "--purpose", "test"])
    assert isinstance(wrong.exception, BadInput) and "--purpose must be train, eval or all" in str(wrong.exception)


def test_a_job_of_evaluations_alone_gives_no_rows_and_says_why(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [EVAL, EVAL])
    with pytest.raises(NothingWritten) as error:
        convert(job, tmp_path / "rows.jsonl", options())
    assert f"left out 2 rollout(s): {LEFT_OUT}" in error.value.notes


def test_a_group_never_mixes_them(job: Path, tmp_path: Path) -> None:
    def groups(**fields: Any) -> set[frozenset[str]]:
        records = list(stream_rollouts(job, follow=False, group_size=2, **fields))
        of: dict[str, list[str]] = {}
        for row in records:
            of.setdefault(row["group_id"], []).append(row["rollout"])
        return {frozenset(names) for names in of.values()}

    assert groups() == {frozenset({"t__0", "t__2"})}
    assert groups(purpose="eval") == {frozenset({"t__1", "t__3"})}
    assert groups(purpose="all") == {frozenset({"t__0", "t__2"}), frozenset({"t__1", "t__3"})}


def test_the_stream_gives_training_only_and_says_what_it_left_out(job: Path) -> None:
    result = CliRunner().invoke(app, ["stream", str(job), "--no-follow"])
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["rollout"] for row in rows] == ["t__0", "t__2"] and {row["purpose"] for row in rows} == {"train"}
    assert "2 rollouts streamed; 2 evaluation rollouts left out (--purpose train)" in result.stderr
    evaluated = list(stream_rollouts(job, follow=False, purpose="eval"))
    assert [(row["rollout"], row["purpose"]) for row in evaluated] == [("t__1", "eval"), ("t__3", "eval")]
    with pytest.raises(BadInput, match="--purpose"):
        stream_rollouts(job, purpose="x")  # type: ignore[arg-type]

    async def read() -> list[str]:
        return [row["rollout"] async for row in astream_rollouts(job, follow=False, purpose="all")]

    assert len(asyncio.run(read())) == 4


@pytest.mark.parametrize("make", [results_row, verifiers_row])
def test_rows_that_a_runner_wrote_say_it(tmp_path: Path, make: Any) -> None:
    result = {
        "task_name": "t", "rollout_name": "t__0", "rewards": {"reward": 1.0}, "agent_result": {"n_calls": 1},
        "purpose": "eval",
    }  # fmt: skip
    events = [{"type": "user_message", "text": "hi"}, {"type": "agent_message", "text": "ho"}]
    source = tmp_path / "results.jsonl"
    rows = [make(result, events), make({**result, "purpose": "train"}, events)]
    assert rows[0]["info"]["training_ready"] is False and rows[0]["info"]["training_ready_reason"] == "evaluation"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for purpose, count in (("train", 1), ("eval", 1), ("all", 2)):
        assert convert(source, tmp_path / "rows.jsonl", options(purpose=purpose)).rows == count


def test_journals_without_a_result_say_it_themselves(tmp_path: Path) -> None:
    for name, metadata in {"a": {"purpose": "eval"}, "b": {"purpose": "train"}, "c": {}}.items():
        make_rollout(tmp_path / "captures", name=name, calls=conversation(**metadata), finished=False)
    found = {rollout.name: rollout.purpose for rollout in find_rollouts(tmp_path / "captures")}
    assert found == {"a": "eval", "b": "train", "c": "train"}
    [alone] = find_rollouts(tmp_path / "captures/a/trajectory/llm_trajectory.jsonl")
    assert alone.purpose == "eval"
    result = convert(tmp_path / "captures", tmp_path / "rows.jsonl", options())
    assert result.rollouts == 2 and len(rows_of(tmp_path / "rows.jsonl")) == 2
