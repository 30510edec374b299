"""Sequences and calls token by token, as the page asks for them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from capture.record import Completion
from tests.train.build import conversation, line, make_job
from tests.train.view.view_job import long_journal, view_of
from train.errors import BadInput
from train.view.token_strips import SLICE, entropy_of
from train.view.token_text import SYMBOL, Part


def test_entropy_counts_what_was_not_captured_as_one_outcome() -> None:
    half = math.log(0.5)
    sure = Completion(0, None, ["a"], [half], [[{"token": "a", "logprob": half}, {"token": "b", "logprob": half}]])
    assert entropy_of(sure, 0) == pytest.approx(math.log(2))
    rest = Completion(0, None, ["a"], [half], [[{"token": "a", "logprob": half}]])
    assert entropy_of(rest, 0) == pytest.approx(math.log(2))
    alternative = Completion(0, None, ["z"], [math.log(0.25)], [[{"token": "a", "logprob": half}]])
    assert entropy_of(alternative, 0) == pytest.approx(1.5 * math.log(2))
    assert entropy_of(Completion(0, None, ["a"], [half]), 0) is None


def test_a_strip_contains_the_merged_sequence_token_by_token(tmp_path: Path) -> None:
    calls = conversation(3)
    view = view_of(make_job(tmp_path / "job", [{"calls": calls}]))
    name = view.index.entries()[0].rollout.rollout_path
    index = view.answer("strip", {"path": name, "of": "s0"})
    last = calls[-1]["metadata"]["token_capture"]
    ids = last["prompt_token_ids"] + last["completions"][0]["token_ids"]
    result = view.answer("slice", {"path": name, "of": "s0", "from": "0"})
    assert (index["tokens"], index["prompt"], index["trained"]) == (len(ids), 12, 12)
    assert result["ids"] == ids
    sampled = [
        at for stretch in index["stretches"] for at in range(stretch["start"], stretch["start"] + stretch["length"])
    ]
    assert [at for at, value in enumerate(result["logprobs"]) if value is not None] == sampled
    assert [result["texts"][at] for at in sampled] == [f"<{ids[at]}>" for at in sampled]
    assert result["texts"][0] is None and result["shown"]["0"] == [Part("⟨100⟩", SYMBOL)]
    assert result["logprobs"][index["least"][0]] == min(value for value in result["logprobs"] if value is not None)


def test_one_call_is_shown_also_where_it_is_not_complete(tmp_path: Path) -> None:
    call_line = line(0, [1, 2], [3, 4])
    call_line["metadata"]["token_capture"]["completions"][0]["logprobs"] = [-0.5]
    view = view_of(make_job(tmp_path / "job", [{"calls": [call_line]}]))
    name = view.index.entries()[0].rollout.rollout_path
    result = view.answer("slice", {"path": name, "of": "c0.0", "from": "0"})
    assert (result["ids"], result["logprobs"]) == ([1, 2, 3, 4], [None, None, -0.5, None])
    with pytest.raises(BadInput, match="no sequence 0"):
        view.answer("strip", {"path": name, "of": "s0"})


def test_slices_are_bounded_and_meet(tmp_path: Path) -> None:
    view = view_of(long_journal(tmp_path / "long.jsonl", 3 * SLICE))
    name = view.index.entries()[0].rollout.rollout_path
    got: list[int] = []
    for start in range(0, 4 * SLICE, SLICE):
        result = view.answer("slice", {"path": name, "of": "s0", "from": str(start)})
        assert len(result["ids"]) == len(result["texts"]) == len(result["logprobs"]) <= SLICE
        got += result["ids"]
    assert len(got) == 3 * SLICE + 3
