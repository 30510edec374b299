"""Which rollout of a job replaces which failed one."""

from __future__ import annotations

from pathlib import Path

from tests.train.build import CRASH, make_job
from train.rollouts.attempts import Attempts, RetryPolicy
from train.rollouts.rollouts import find_rollouts


def attempts(job: Path) -> list[tuple[str, str | None, bool]]:
    """Of each rollout in the order they finished: its name, which one it replaces, whether it awaits a retry."""
    known, result = Attempts(RetryPolicy.read(job)), []
    for rollout in sorted(find_rollouts(job), key=lambda rollout: rollout.finished_at or ""):
        before = known.add(rollout)
        result.append((rollout.name, before and before.name, known.awaits_retry(rollout)))
    return result


def test_retries_are_recognized_by_the_policy_as_benchflow_does(tmp_path: Path) -> None:
    policy = {"max_retries": 1, "exclude_categories": ["timeout"]}
    specs = [
        {"name": "a__1", **CRASH},
        {"name": "b__1", "task": "other", "reward": None, "error": "too slow", "error_category": "timeout"},
        {"name": "a__2", **CRASH},
        {"name": "a__3"},
    ]
    job = make_job(tmp_path / "job", specs, retry=policy)
    # a__2 was the last attempt that the policy allows, so a__3 is a rollout of its own.
    assert attempts(job) == [
        ("a__1", None, True),
        ("b__1", None, False),
        ("a__2", "a__1", False),
        ("a__3", None, False),
    ]


def test_the_runners_own_word_decides_who_is_replaced(tmp_path: Path) -> None:
    policy = {"max_retries": 2, "retry_categories": ["infra_failure"], "exclude_categories": []}
    specs = [
        {"name": "a__1", **CRASH, "result": {"retry_of": None}},
        {"name": "a__2", "result": {"retry_of": None}},
        {"name": "a__3", "result": {"retry_of": "a__1"}},
        {"name": "a__4", **CRASH, "error_category": "agent_error", "result": {"retry_of": None}},
    ]
    job = make_job(tmp_path / "job", specs, retry=policy)
    assert attempts(job) == [
        ("a__1", None, True),
        ("a__2", None, False),
        ("a__3", "a__1", False),
        ("a__4", None, False),
    ]


def test_attempts_of_one_member_of_an_rl_group_do_not_replace_another(tmp_path: Path) -> None:
    specs = [{"name": "a__g7-r00-a0", **CRASH}, {"name": "a__g7-r01-a0"}, {"name": "a__g7-r00-a1"}]
    job = make_job(tmp_path / "job", specs, retry={"max_retries": 2})
    assert attempts(job) == [
        ("a__g7-r00-a0", None, True),
        ("a__g7-r01-a0", None, False),
        ("a__g7-r00-a1", "a__g7-r00-a0", False),
    ]
