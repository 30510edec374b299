"""Advantages are what trainers count, and never NaN; groups go out whole or say why not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.errors import BadInput
from train.groups.advantage import advantages, mean_and_std
from train.groups.groups import Group, GroupCollector, group_id, group_key, parse_group_by
from train.groups.withhold import MemberLog, why_withheld
from train.rollouts.rollouts import Rollout

GOOD = MemberLog(reached=True, sequence=True)
TEXT = MemberLog(reached=True, sequence=False)


def rollout(number: int = 0, **more: object) -> Rollout:
    record = {"task": "t", "agent": "a", "model": "m", "reward": 1.0, "finished": True, **more}
    return Rollout(Path(f"job/t__{number}"), f"t__{number}", f"t__{number}", "job", None, **record)  # type: ignore[arg-type]


def group(*members: Rollout, size: int | None = None, by: str = "task,agent,model") -> Group:
    return Group(group_key(members[0], parse_group_by(by)), size or len(members), list(members))


@pytest.mark.parametrize(
    "rewards", [[0.1, 0.1, 0.1], [0.1 + 0.2, 0.3], [1.0, 1.0 - 1e-15, 1.0], [0.0, 0.0], [0.0, -0.0], [1.0], [1, 1.0]]
)
@pytest.mark.parametrize("kind", ["grpo", "dr-grpo", "rloo"])
def test_rewards_that_people_call_equal_have_no_advantage_at_all(rewards: list[float], kind: str) -> None:
    values = advantages(rewards, kind)  # type: ignore[arg-type]
    assert values == [0.0] * len(rewards) and all(math.copysign(1, value) == 1 for value in values)
    assert mean_and_std(rewards)[1] == 0.0


@pytest.mark.parametrize(
    ("kind", "ddof", "eps", "wanted"),
    [
        ("grpo", 1, 1e-4, 0.5 / (math.sqrt(1 / 3) + 1e-4)),  # TRL, verl, BenchFlow: 0.866
        ("grpo", 0, 1e-8, 1.0),  # TRL's AsyncGRPO
        ("dr-grpo", 1, 1e-4, 0.5),
        ("rloo", 1, 1e-4, 2 / 3),
    ],
)
def test_two_of_four_passing_gives_each_trainers_own_number(kind: str, ddof: int, eps: float, wanted: float) -> None:
    values = advantages([1, 1, 0, 0], kind, ddof, eps)  # type: ignore[arg-type]
    assert values == pytest.approx([wanted, wanted, -wanted, -wanted], rel=1e-7)


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=9),
    st.sampled_from(["grpo", "dr-grpo", "rloo"]),
    st.sampled_from([0, 1]),
    st.sampled_from([0.0, 1e-4, 1.0]),
)
def test_an_advantage_is_finite_for_any_rewards(rewards: list[float], kind: str, ddof: int, eps: float) -> None:
    values = advantages(rewards, kind, ddof, eps)  # type: ignore[arg-type]
    assert len(values) == len(rewards) and all(map(math.isfinite, values))
    assert all(map(math.isfinite, mean_and_std(rewards, ddof)))
    best = max(range(len(rewards)), key=rewards.__getitem__)
    assert values[best] >= 0.0


def test_group_by_takes_any_order_and_names_what_it_does_not_know() -> None:
    assert parse_group_by("job, model,task") == ("task", "model", "job")
    for wrong in ("task,seed", "", ","):
        with pytest.raises(BadInput, match=r"^--group-by: .*task_digest, job"):
            parse_group_by(wrong)


def test_a_groups_id_names_its_keys_and_null_for_what_is_not_known() -> None:
    assert group_id(group_key(rollout(model=None))) == "task=t|agent=a|model=null|job=job"


def test_a_group_is_withheld_for_each_of_its_reasons() -> None:
    whole = group(rollout(1), rollout(2), rollout(3))
    assert why_withheld(whole, [GOOD] * 3) is None
    assert why_withheld(whole, [TEXT] * 3) is None  # no sequence at all: text can be trained on
    cases = {
        "unscored": why_withheld(group(rollout(1), rollout(2, reward=None, error="it crashed"))),
        "no_model_calls": why_withheld(whole, [GOOD, GOOD, MemberLog(False, False)]),
        "mixed_sequences": why_withheld(whole, [GOOD, TEXT, GOOD]),
        "group_incomplete": why_withheld(group(rollout(1), size=3)),
        "mixed_tasks": why_withheld(group(rollout(1, task_digest="sha256:a"), rollout(2, task_digest="sha256:b"))),
        "unreadable_log": why_withheld(whole, [GOOD, MemberLog(False, False, "cannot be read"), GOOD]),
    }
    assert {reason: why and why.reason for reason, why in cases.items()} == {reason: reason for reason in cases}
    assert "it crashed" in cases["unscored"].detail  # type: ignore[union-attr]


def test_tasks_may_be_mixed_where_nobody_groups_by_task() -> None:
    members = rollout(1, task_digest="sha256:a"), rollout(2, task="other", task_digest="sha256:b")
    assert why_withheld(group(*members, by="agent,model")) is None


def test_rollouts_beyond_a_groups_size_start_the_next_group() -> None:
    groups = GroupCollector(2)
    filled = [groups.add(rollout(number)) for number in range(5)]
    assert [group and [member.name for member in group.rollouts] for group in filled] == [
        None, ["t__0", "t__1"], None, ["t__2", "t__3"], None,
    ]  # fmt: skip
    assert [[member.name for member in group.rollouts] for group in groups.drain()] == [["t__4"]]
    assert list(groups.drain()) == []
