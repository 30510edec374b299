"""Rollouts are found wherever the runners put them, and what is wrong with one costs that one only."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.build import conversation, end_job, make_job, make_rollout, write
from train.errors import BadInput, NoSuchPath
from train.rollouts.attempts import Attempts, RetryPolicy
from train.rollouts.job_state import job_state
from train.rollouts.rollouts import Rollout, find_rollouts


def found(path: Path) -> list[Rollout]:
    return list(find_rollouts(path))


@pytest.mark.parametrize("tree", ["job", "trial-01/job", "jobs/no-skills/agent/trial-01/2026-11-04__17-52-13"])
def test_rollouts_are_found_in_every_tree(tmp_path: Path, tree: str) -> None:
    make_job(tmp_path / tree, [{"name": "a__1"}, {"name": "b__2"}])
    assert [one.rollout_path for one in find_rollouts(tmp_path)] == [f"{tree}/a__1", f"{tree}/b__2"]
    assert {one.job for one in find_rollouts(tmp_path)} == {tree.split("/")[-1]}


def test_one_rollout_may_be_given_by_its_folder_or_its_result(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"name": "a__1", "reward": 0.5}])
    for path in (job / "a__1", job / "a__1/result.json"):
        [one] = find_rollouts(path)
        assert (one.name, one.rollout_path, one.job, one.reward) == ("a__1", "a__1", "job", 0.5)


def test_the_stand_alone_proxys_folder_is_a_rollout_without_a_reward(tmp_path: Path) -> None:
    make_rollout(tmp_path, name="default", finished=False)
    for part in ("config.json", "agent", "verifier", "artifacts", "trainer"):
        path = tmp_path / "default" / part
        path.unlink() if path.is_file() else path.rmdir()
    [one] = find_rollouts(tmp_path)
    assert (one.finished, one.reward, one.outcome, len(list(one.calls()))) == (False, None, "unfinished", 2)
    [same] = find_rollouts(tmp_path / "default/trajectory/llm_trajectory.jsonl")
    assert (same.name, same.journal) == ("default", one.journal)


def test_what_lies_inside_a_rollout_is_no_rollout(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"name": "a__1"}, {"name": "b__2", "finished": False}])
    for name in ("a__1", "b__2"):
        write(job / name / "artifacts/result.json", {"task_name": "made by the agent"})
    make_rollout(job, name="judge__3", result={"purpose": "reviewer"})
    assert [(one.name, one.finished) for one in found(tmp_path)] == [("a__1", True), ("b__2", False)]


def test_links_are_not_followed_and_told(tmp_path: Path) -> None:
    make_job(tmp_path / "jobs/job", [{"name": "a__1"}])
    (tmp_path / "jobs/latest").symlink_to(tmp_path / "jobs", target_is_directory=True)
    warnings: list[str] = []
    assert len(list(find_rollouts(tmp_path / "jobs", warnings.append))) == 1
    assert len(warnings) == 1 and "latest" in warnings[0]


def test_no_such_path_and_a_file_that_is_no_rollout(tmp_path: Path) -> None:
    with pytest.raises(NoSuchPath, match=r"No such path: .*nowhere"):
        found(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(BadInput, match="give a job folder"):
        found(tmp_path / "notes.txt")


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"task_name": "x"', "\x00\x01", '"text"'])
def test_a_result_that_is_no_json_object_is_told_and_the_others_are_there(tmp_path: Path, text: str) -> None:
    job = make_job(tmp_path / "job", [{"name": "a__1"}, {"name": "b__2"}])
    (job / "a__1/result.json").write_text(text)
    warnings: list[str] = []
    assert [one.name for one in find_rollouts(job, warnings.append)] == ["b__2"]
    assert warnings == [f"skipping {job}/a__1/result.json: not a readable JSON object"]


@pytest.mark.parametrize("reward", ["NaN", "Infinity", "-Infinity", "true", "false", '"1"', "[1]", "1e999"])
def test_what_is_no_reward_leaves_the_rollout_unscored_and_says_so(tmp_path: Path, reward: str) -> None:
    job = make_job(tmp_path / "job", [{"name": "a__1"}])
    path = job / "a__1/result.json"
    path.write_text(path.read_text().replace('"reward": 1.0', f'"reward": {reward}'))
    warnings: list[str] = []
    [one] = find_rollouts(job, warnings.append)
    assert (one.reward, one.scored, one.outcome) == (None, False, "errored")
    assert len(warnings) == 1 and "counts as unscored" in warnings[0]


@pytest.mark.parametrize("reward", [5.0, -1.0, 1.0000001])
def test_a_reward_beyond_the_range_is_kept_and_told(tmp_path: Path, reward: float) -> None:
    warnings: list[str] = []
    [one] = find_rollouts(make_job(tmp_path / "job", [{"reward": reward}]), warnings.append)
    assert one.reward == reward and one.outcome == "failed"
    assert len(warnings) == 1 and "outside of 0 to 1" in warnings[0]


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        ({"rewards": {"reward": 1.0}, "error": "timed out"}, "passed"),
        ({"rewards": {"reward": 0.99}}, "failed"),
        ({"rewards": None, "error": "crashed", "verifier_error": "crashed too"}, "errored"),
        ({"rewards": None, "verifier_error": "no reward file"}, "verifier_errored"),
        ({"rewards": None}, "errored"),
        ({"rewards": {"reward": 1.0}, "scoring": {"status": "error"}}, "errored"),
        ({"rewards": {"reward": 0.4}, "scoring": {"status": "complete", "passed": True}}, "passed"),
    ],
)
def test_the_outcome_is_benchflows(tmp_path: Path, result: dict[str, object], outcome: str) -> None:
    [one] = find_rollouts(make_job(tmp_path / "job", [{"result": result}]))
    assert one.outcome == outcome


def test_unknown_keys_and_odd_values_are_borne(tmp_path: Path) -> None:
    odd = {"new_key": {"deep": [1]}, "model": 7, "usage_tracking": None, "task_digest": ["no"], "finished_at": 12}
    [one] = find_rollouts(make_job(tmp_path / "job", [{"result": odd}]))
    assert (one.model, one.task_digest, one.finished_at, one.endpoint_kind) == (None, None, None, None)
    assert one.result["new_key"] == {"deep": [1]}


def test_two_rollouts_of_one_name_are_two(tmp_path: Path) -> None:
    for trial in ("trial-01", "trial-02"):
        make_job(tmp_path / trial / "job", [{"name": "a__1"}])
    assert [one.rollout_path for one in found(tmp_path)] == ["trial-01/job/a__1", "trial-02/job/a__1"]


def test_a_half_written_line_is_told_and_the_calls_before_it_are_there(tmp_path: Path) -> None:
    whole = json.dumps(conversation(1)[0]).encode() + b"\n"
    job = make_job(tmp_path / "job", [{"journal": whole + whole[:500]}])
    warnings: list[str] = []
    [one] = find_rollouts(job, warnings.append)
    assert len(list(one.calls())) == 1
    assert len(warnings) == 1 and "line 2: the last line was cut off" in warnings[0]


def test_half_a_surrogate_pair_becomes_text_that_can_be_written(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"error": "bad \ud800 text"}])
    [one] = find_rollouts(job)
    assert one.error == "bad ? text"


def dead_pid() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_a_jobs_state_follows_its_lock_and_its_summary(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [], state="running")
    assert job_state(job).kind == "running"
    write(job / ".evaluation.lock", {"pid": dead_pid(), "host": socket.gethostname()})
    assert job_state(job).kind == "stopped" and "is gone (lock" in job_state(job).detail
    write(job / ".evaluation.lock", {"pid": dead_pid(), "host": "another-host"})
    assert job_state(job).kind == "running"
    (job / ".evaluation.lock").write_text('{"pi')
    assert job_state(job).kind == "running"
    end_job(job)
    assert job_state(job).kind == "finished"
    end_job(job, stopped=True)
    assert job_state(job).kind == "stopped"
    (job / "summary.json").unlink()
    assert job_state(job).kind == "waiting" and job_state(job, had_lock=True).kind == "stopped"
    assert job_state(tmp_path / "nowhere").kind == "waiting"


def test_a_later_process_of_the_same_number_is_not_the_jobs(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [], state="running")
    held = {"pid": os.getpid(), "host": socket.gethostname()}
    ticks = Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[19]
    write(job / ".evaluation.lock", {**held, "started": ticks})
    assert job_state(job).kind == "running"
    write(job / ".evaluation.lock", {**held, "started": "1"})
    assert job_state(job).kind == "stopped"


def test_a_process_that_died_and_was_not_collected_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as zombie:
        assert zombie.stdout is not None and zombie.stdout.read() == b""
        job = make_job(tmp_path / "job", [], state="running", pid=zombie.pid)
        deadline = time.monotonic() + 10
        while job_state(job).kind != "stopped" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert job_state(job).kind == "stopped"


def attempts(job: Path) -> list[tuple[str, str | None, bool]]:
    """Of each rollout in the order they finished: its name, which one it replaces, whether it awaits a retry."""
    known, told = Attempts(RetryPolicy.read(job)), []
    for rollout in sorted(find_rollouts(job), key=lambda one: one.finished_at or ""):
        before = known.add(rollout)
        told.append((rollout.name, before and before.name, known.awaits_retry(rollout)))
    return told


CRASH = {"reward": None, "error": "the container died", "error_category": "infra_failure"}


def test_a_retry_is_told_from_the_policy_as_benchflow_does(tmp_path: Path) -> None:
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
