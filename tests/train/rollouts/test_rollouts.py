"""Rollouts are found wherever the runners put them, and what is wrong with one costs that one only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.build import conversation, make_job, make_rollout, write
from train.errors import BadInput, NoSuchPath
from train.rollouts.rollouts import Rollout, find_rollouts


def found(path: Path) -> list[Rollout]:
    return list(find_rollouts(path))


@pytest.mark.parametrize("tree", ["job", "trial-01/job", "jobs/no-skills/agent/trial-01/2026-11-04__17-52-13"])
def test_rollouts_are_found_in_every_tree(tmp_path: Path, tree: str) -> None:
    make_job(tmp_path / tree, [{"name": "a__1"}, {"name": "b__2"}])
    assert [rollout.rollout_path for rollout in find_rollouts(tmp_path)] == [f"{tree}/a__1", f"{tree}/b__2"]
    assert {rollout.job for rollout in find_rollouts(tmp_path)} == {tree.split("/")[-1]}


def test_one_rollout_may_be_given_by_its_folder_or_its_result(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"name": "a__1", "reward": 0.5}])
    for path in (job / "a__1", job / "a__1/result.json"):
        [rollout] = find_rollouts(path)
        assert (rollout.name, rollout.rollout_path, rollout.job, rollout.reward) == ("a__1", "a__1", "job", 0.5)


def test_the_stand_alone_proxys_folder_is_a_rollout_without_a_reward(tmp_path: Path) -> None:
    make_rollout(tmp_path, name="default", finished=False)
    for part in ("config.json", "agent", "verifier", "artifacts", "trainer"):
        path = tmp_path / "default" / part
        path.unlink() if path.is_file() else path.rmdir()
    [rollout] = find_rollouts(tmp_path)
    assert (rollout.finished, rollout.reward, rollout.outcome, len(list(rollout.calls()))) == (
        False,
        None,
        "unfinished",
        2,
    )
    [same] = find_rollouts(tmp_path / "default/trajectory/llm_trajectory.jsonl")
    assert (same.name, same.journal) == ("default", rollout.journal)


def test_folders_inside_a_rollout_are_not_rollouts(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"name": "a__1"}, {"name": "b__2", "finished": False}])
    for name in ("a__1", "b__2"):
        write(job / name / "artifacts/result.json", {"task_name": "made by the agent"})
    make_rollout(job, name="judge__3", result={"purpose": "reviewer"})
    assert [(rollout.name, rollout.finished) for rollout in found(tmp_path)] == [("a__1", True), ("b__2", False)]


def test_links_are_skipped_with_a_warning(tmp_path: Path) -> None:
    make_job(tmp_path / "jobs/job", [{"name": "a__1"}])
    (tmp_path / "jobs/latest").symlink_to(tmp_path / "jobs", target_is_directory=True)
    warnings: list[str] = []
    assert len(list(find_rollouts(tmp_path / "jobs", warnings.append))) == 1
    assert len(warnings) == 1 and "latest" in warnings[0]


def test_missing_paths_and_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NoSuchPath, match=r"No such path: .*nowhere"):
        found(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(BadInput, match="give a job folder"):
        found(tmp_path / "notes.txt")


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"task_name": "x"', "\x00\x01", '"text"'])
def test_a_malformed_result_is_skipped_with_a_warning(tmp_path: Path, text: str) -> None:
    job = make_job(tmp_path / "job", [{"name": "a__1"}, {"name": "b__2"}])
    (job / "a__1/result.json").write_text(text)
    warnings: list[str] = []
    assert [rollout.name for rollout in find_rollouts(job, warnings.append)] == ["b__2"]
    assert warnings == [f"skipping {job}/a__1/result.json: not a readable JSON object"]


@pytest.mark.parametrize("reward", ["NaN", "Infinity", "-Infinity", "true", "false", '"1"', "[1]", "1e999"])
def test_an_invalid_reward_leaves_the_rollout_unscored(tmp_path: Path, reward: str) -> None:
    job = make_job(tmp_path / "job", [{"name": "a__1"}])
    path = job / "a__1/result.json"
    path.write_text(path.read_text().replace('"reward": 1.0', f'"reward": {reward}'))
    warnings: list[str] = []
    [rollout] = find_rollouts(job, warnings.append)
    assert (rollout.reward, rollout.scored, rollout.outcome) == (None, False, "errored")
    assert len(warnings) == 1 and "counts as unscored" in warnings[0]


@pytest.mark.parametrize("reward", [5.0, -1.0, 1.0000001])
def test_a_reward_out_of_range_is_read_with_a_warning(tmp_path: Path, reward: float) -> None:
    warnings: list[str] = []
    [rollout] = find_rollouts(make_job(tmp_path / "job", [{"reward": reward}]), warnings.append)
    assert rollout.reward == reward and rollout.outcome == "failed"
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
    [rollout] = find_rollouts(make_job(tmp_path / "job", [{"result": result}]))
    assert rollout.outcome == outcome


def test_unknown_keys_and_unusual_values_are_accepted(tmp_path: Path) -> None:
    odd = {"new_key": {"deep": [1]}, "model": 7, "usage_tracking": None, "task_digest": ["no"], "finished_at": 12}
    [rollout] = find_rollouts(make_job(tmp_path / "job", [{"result": odd}]))
    assert (rollout.model, rollout.task_digest, rollout.finished_at, rollout.endpoint_kind) == (None, None, None, None)
    assert rollout.result["new_key"] == {"deep": [1]}


def test_two_rollouts_of_one_name_are_two(tmp_path: Path) -> None:
    for trial in ("trial-01", "trial-02"):
        make_job(tmp_path / trial / "job", [{"name": "a__1"}])
    assert [rollout.rollout_path for rollout in found(tmp_path)] == ["trial-01/job/a__1", "trial-02/job/a__1"]


def test_a_half_written_line_loses_only_itself(tmp_path: Path) -> None:
    whole = json.dumps(conversation(1)[0]).encode() + b"\n"
    job = make_job(tmp_path / "job", [{"journal": whole + whole[:500]}])
    warnings: list[str] = []
    [rollout] = find_rollouts(job, warnings.append)
    assert len(list(rollout.calls())) == 1
    assert len(warnings) == 1 and "line 2: the last line was cut off" in warnings[0]


def test_half_a_surrogate_pair_becomes_text_that_can_be_written(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"error": "bad \ud800 text"}])
    [rollout] = find_rollouts(job)
    assert rollout.error == "bad ? text"
