"""Rows with advantages: whole groups, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from tests.train.build import broken, conversation, line, make_job
from tests.train.conversion import options, rows_of, run
from train.errors import BadInput
from train.groups.groups import GroupOptions
from train.groups.withhold import WithheldReason
from train.rows.convert import convert
from train.rows.skip_reasons import REASONS, WITHHELD

ROOT = Path(__file__).parents[3]


def test_groups_come_whole_one_after_the_other_with_advantages(tmp_path: Path) -> None:
    job = make_job(
        tmp_path / "job",
        [{"task": task, "reward": reward} for reward in (0.0, 1.0) for task in ("a", "b")],
    )
    convert(job, tmp_path / "o.jsonl", options(format="trl-grpo", group=GroupOptions()))
    rows = rows_of(tmp_path / "o.jsonl")
    assert [row["task_id"] for row in rows] == ["a", "a", "b", "b"], "TRL takes consecutive rows as a group"
    assert [round(row["advantage"], 3) for row in rows] == [-0.707, 0.707] * 2
    assert rows[0]["group"] == "task=a|agent=pi-acp|model=vllm/my-policy|job=job"
    assert (rows[0]["advantage_kind"], rows[0]["ddof"], rows[0]["eps"], rows[0]["group_mean"]) == ("grpo", 1, 1e-4, 0.5)


def test_a_group_of_one_has_no_advantage(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{}])
    convert(job, tmp_path / "o.jsonl", options(group=GroupOptions()))
    assert [row["advantage"] for row in rows_of(tmp_path / "o.jsonl")] == [None]


def test_every_row_of_a_rollout_carries_the_rollouts_one_advantage(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"reward": 0.0, "calls": conversation(3)}, {"reward": 1.0}])
    convert(job, tmp_path / "o.jsonl", options(row_mode="exchange", group=GroupOptions()))
    found = [(row["rollout"][-1], round(row["advantage"], 3)) for row in rows_of(tmp_path / "o.jsonl")]
    assert found == [("1", -0.707)] * 3 + [("2", 0.707)] * 2, "statistics over rollouts, not rows"


def test_a_scored_timeout_stays_in_its_group(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"reward": 0.0, "error": "timeout"}, {"reward": 1.0}])
    assert convert(job, tmp_path / "o.jsonl", options(group=GroupOptions())).rows == 2


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"reward": None}, "left out 2 rollout(s): in a group with an unscored rollout"),
        ({"calls": None}, "left out 2 rollout(s): in a group with a rollout of no model calls"),
        ({"calls": broken(2)}, "left out 2 rollout(s): in a group in which some have a token sequence and some do not"),
    ],
)
def test_a_group_with_one_bad_member_is_withheld_whole(tmp_path: Path, spec: dict[str, Any], sentence: str) -> None:
    job = make_job(tmp_path / "job", [{"reward": 0.0}, spec, {"task": "other"}, {"task": "other"}])
    made = convert(job, tmp_path / "o.jsonl", options(group=GroupOptions()))
    assert {row["task_id"] for row in rows_of(tmp_path / "o.jsonl")} == {"other"}
    assert sentence in made.notes


def test_a_group_that_is_not_full_is_withheld(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"reward": float(k)} for k in range(3)])
    made = convert(job, tmp_path / "o.jsonl", options(group=GroupOptions(size=2)))
    assert made.rows == 2
    assert "left out 1 rollout(s): in a group that is not full" in made.notes


def test_a_member_that_cannot_be_a_row_takes_its_group_with_it(tmp_path: Path) -> None:
    calls = conversation(2)
    fork = line(2, [*calls[1]["metadata"]["token_capture"]["prompt_token_ids"][:16], 7, 8, 9], [1, 2, 3])
    job = make_job(
        tmp_path / "job", [{"reward": 0.0}, {"calls": [*calls, fork]}, {"task": "b", "reward": 0.0}, {"task": "b"}]
    )
    made = convert(job, tmp_path / "o.jsonl", options(format="trl-grpo", group=GroupOptions()))
    assert [row["task_id"] for row in rows_of(tmp_path / "o.jsonl")] == ["b", "b"]
    assert "left out 1 rollout(s): in a group with another rollout that cannot be a row" in made.notes


def test_a_failed_attempt_that_was_retried_is_not_a_member(tmp_path: Path) -> None:
    retry = {"max_retries": 2, "exclude_categories": ["timeout"]}
    bad = {"reward": None, "error": "pipe closed", "error_category": "pipe_closed"}
    job = make_job(tmp_path / "job", [bad, {"reward": 1.0}, {"reward": 1.0, "task": "b"}], retry=retry)
    made = convert(job, tmp_path / "o.jsonl", options(group=GroupOptions()))
    assert made.rows == 2
    assert "left out 1 rollout(s): a failed attempt that a retry replaced" in made.notes


def test_min_reward_filters_after_the_group_was_counted(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"reward": 0.0}, {"reward": 1.0}])
    convert(job, tmp_path / "o.jsonl", options(group=GroupOptions(), min_reward=0.5))
    assert [round(row["advantage"], 3) for row in rows_of(tmp_path / "o.jsonl")] == [0.707]
    with pytest.raises(BadInput, match="would break the groups"):
        convert(job, tmp_path / "o.jsonl", options(format="trl-grpo", group=GroupOptions(), min_reward=0.5))


def test_the_groups_options_are_the_streams(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"reward": 0.0}, {"reward": 1.0}])
    result = run(job, "--format", "trl-grpo", "-o", tmp_path / "o.jsonl", "--group-advantage", "--advantage", "rloo")
    assert result.exit_code == 0
    assert [row["advantage"] for row in rows_of(tmp_path / "o.jsonl")] == [-1.0, 1.0]


def test_every_reason_to_withhold_a_group_has_a_sentence() -> None:
    assert WITHHELD.keys() == set(get_args(WithheldReason)) and set(WITHHELD.values()) <= REASONS.keys()
