"""The table of rollouts: groups, layouts, logs that grow, are lost, or cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.build import conversation, failed, make_job, make_rollout, uncaptured
from tests.train.view.view_job import view_of
from train.errors import NoSuchPath
from train.groups.groups import GroupOptions
from train.view.api import View
from train.view.groups import VIEW_BY


def test_groups_have_rewards_and_advantages_and_withheld_ones_their_reason(tmp_path: Path) -> None:
    make_job(tmp_path / "a", [{"task": "x", "reward": 1.0}, {"task": "x", "reward": 0.0}])
    make_job(tmp_path / "b", [{"task": "y", "reward": 1.0}, {"task": "y", "reward": None, "error": "it fell"}])
    job = view_of(tmp_path).answer("job", {})
    first, second = sorted(job["groups"], key=lambda group: group["key"]["task"])
    assert (first["rewards"], first["withheld"]) == ([1.0, 0.0], None)
    assert (second["withheld"], "it fell" in second["withheld_detail"]) == ("unscored", True)
    advantages = {row["task"]: row["advantage"] for row in job["rows"] if row["reward"] == 1.0}
    assert advantages["x"] == pytest.approx(0.7071, abs=1e-3) and advantages["y"] is None
    sized = view_of(tmp_path / "a", grouping=GroupOptions(VIEW_BY, size=4)).answer("job", {})
    assert [group["withheld"] for group in sized["groups"]] == ["group_incomplete"]


def test_rows_are_there_before_any_log_is_read(tmp_path: Path) -> None:
    view = View(make_job(tmp_path / "job", [{}, {"calls": uncaptured()}, {"calls": [failed(0)]}]))
    view.index.scan()
    before = view.answer("job", {})
    assert (before["read"], len(before["rows"])) == (0, 3)
    assert all("grade" not in row and row["reward"] == 1.0 for row in before["rows"])
    while view.index.read_next():
        pass
    after = view.answer("job", {"since": str(before["version"])})
    assert [row["grade"] for row in after["rows"]] == [True, False, False]
    assert all(row["reason"] for row in after["rows"] if not row["grade"])


@pytest.mark.parametrize("kind", ["rollout", "journal", "bare", "trials"])
def test_every_layout_is_shown(tmp_path: Path, kind: str) -> None:
    if kind == "trials":
        make_job(tmp_path / "jobs/trial-01/job", [{}])
        make_job(tmp_path / "jobs/trial-02/job", [{}])
        root = tmp_path / "jobs"
    else:
        root = make_rollout(tmp_path / "job", finished=kind != "bare")
        root = root / "trajectory/llm_trajectory.jsonl" if kind == "journal" else root
    view = view_of(root)
    job = view.answer("job", {})
    assert len(job["rows"]) == (2 if kind == "trials" else 1) and len(job["groups"]) <= 1
    for row in job["rows"]:
        assert row["grade"] is True and row["all_calls"] == 2
        assert view.answer("strip", {"path": row["path"], "of": "s0"})["trained"] == 8


def test_a_lost_folder_is_reported_and_what_was_read_is_kept(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{}, {}])
    view = view_of(job)
    (job / "result").mkdir()
    name = view.index.entries()[0].rollout
    for file in sorted(name.path.rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    name.path.rmdir()
    view.index.scan()
    rows = {row["path"]: row for row in view.answer("job", {})["rows"]}
    assert rows[name.rollout_path]["gone"] and rows[name.rollout_path]["grade"] is True
    with pytest.raises(NoSuchPath, match="is gone"):
        view.answer("rollout", {"path": name.rollout_path})


def test_a_journal_that_grows_is_read_again(tmp_path: Path) -> None:
    calls = conversation(3)
    folder = make_rollout(tmp_path, calls=calls[:1], finished=False)
    view = view_of(folder)
    name = view.index.entries()[0].rollout.rollout_path
    assert len(view.answer("rollout", {"path": name})["calls"]) == 1
    with (folder / "trajectory/llm_trajectory.jsonl").open("a") as journal:
        journal.writelines(json.dumps(call) + "\n" for call in calls[1:])
    view.index.scan()
    assert view.index.read_next()
    assert len(view.answer("rollout", {"path": name})["calls"]) == 3


def test_a_log_that_our_own_code_fails_at_is_reported_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = View(make_job(tmp_path / "job", [{}, {}]))
    view.index.scan()
    first, once = view.index.entries()[0], view.readings.once
    monkeypatch.setattr(view.readings, "once", lambda rollout: {}["x"] if rollout == first.rollout else once(rollout))
    while view.index.read_next():
        pass
    rows = {row["path"]: row for row in view.index.job()["rows"]}
    failed_at = rows.pop(first.rollout.rollout_path)
    assert "KeyError" in failed_at["unreadable"] and failed_at["fresh"]
    assert rows and all(row["fresh"] and "unreadable" not in row for row in rows.values())
