"""One call's messages, and breaks with both their sides."""

from __future__ import annotations

from pathlib import Path

from tests.train.build import broken, conversation, make_job
from tests.train.view.view_job import view_of


def test_a_break_shows_two_windows_cut_at_the_same_places(tmp_path: Path) -> None:
    view = view_of(make_job(tmp_path / "job", [{"calls": broken(2)}]))
    name = view.index.entries()[0].rollout.rollout_path
    result = view.answer("rollout", {"path": name})
    (found,) = result["breaks"]
    expected = [token["id"] for column in found["columns"] for token in column["expected"]]
    sent = [token["id"] for column in found["columns"] for token in column["sent"]]
    assert (expected, sent) == (found["expected_ids"], found["found_ids"])
    assert all((column["expected"] == column["sent"]) == column["same"] for column in found["columns"])
    assert found["cause_name"] and found["remedy"] and found["sure"] in ("certain", "likely", "possible")
    assert (found["segment_before"], found["segment_after"]) == (0, 1)


def test_messages_that_a_call_has_from_the_one_before_are_not_repeated(tmp_path: Path) -> None:
    view = view_of(make_job(tmp_path / "job", [{"calls": conversation(3)}]))
    name = view.index.entries()[0].rollout.rollout_path
    result = view.answer("call", {"path": name, "call": "2"})
    assert result["same"] == {"call": 1, "messages": 3}
    assert [message["content"] for message in result["messages"]] == ["reply 1", "and then? 1"]
