"""The rows of a record: exact ids, masks, logprobs and versions, and nothing of what is not trained on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.train.build import Line, broken, conversation, failed, make_rollout, uncaptured
from train import stream_rollouts
from train.online.rows import main_row, rows_of


def record(folder: Path, calls: list[Line], **spec: Any) -> dict[str, Any]:
    make_rollout(folder, calls=calls, **spec)
    [made] = stream_rollouts(folder, follow=False)
    return dict(made)


def versions(calls: list[Line], *given: str | tuple[str, str] | None) -> list[Line]:
    for call, version in zip(calls, given, strict=True):
        if isinstance(version, tuple):
            call["metadata"] |= {"policy_version": version[0], "policy_version_end": version[1]}
        elif version is not None:
            call["metadata"]["policy_version"] = version
    return calls


def test_a_conversation_is_one_row_with_the_ids_of_its_calls(tmp_path: Path) -> None:
    calls = conversation(3)
    [row] = rows_of(record(tmp_path, calls))
    captures = [call["metadata"]["token_capture"] for call in calls]
    last = captures[-1]
    assert row.prompt_ids == captures[0]["prompt_token_ids"]
    assert row.prompt_ids + row.completion_ids == last["prompt_token_ids"] + last["completions"][0]["token_ids"]
    assert len(row.completion_mask) == len(row.logprobs) == len(row.completion_ids)
    for span, capture in zip(row.spans, captures, strict=True):
        part = slice(span.offset, span.offset + span.length)
        assert row.completion_ids[part] == capture["completions"][0]["token_ids"]
        assert row.logprobs[part] == capture["completions"][0]["logprobs"]
        assert row.completion_mask[part] == [1] * span.length
    assert row.sampled == sum(span.length for span in row.spans) == 12
    assert {value for value, mask in zip(row.logprobs, row.completion_mask, strict=True) if not mask} == {0.0}


@pytest.mark.parametrize(
    ("given", "seen", "oldest"),
    [
        (("3", "3", "4"), ["3", "4"], 3),
        (("10", "9", "11"), ["10", "9", "11"], 9),
        (("3", ("3", "5"), "5"), ["3", "5"], 3),
        (("3", None, "4"), ["3", "4"], None),
        ((None, None, None), [], None),
        (("step-3", "4", "5"), ["step-3", "4", "5"], None),
    ],
)
def test_each_call_has_the_version_it_was_sampled_with(
    tmp_path: Path, given: tuple[Any, ...], seen: list[str], oldest: int | None
) -> None:
    [row] = rows_of(record(tmp_path, versions(conversation(3), *given)))
    assert row.policy_versions == seen and row.oldest_version == oldest
    firsts = [version[0] if isinstance(version, tuple) else version for version in given]
    lasts = [version[1] if isinstance(version, tuple) else version for version in given]
    assert [span.policy_version for span in row.spans] == firsts
    assert [span.policy_version_end for span in row.spans] == lasts


def test_interleaved_agents_are_two_rows_each_in_its_own_order(tmp_path: Path) -> None:
    one, two = conversation(3, first=100), conversation(3, first=500)
    mixed = [call for pair in zip(one, two, strict=True) for call in pair]
    for number, call in enumerate(mixed):
        call["metadata"]["call"] = number
    rows = rows_of(record(tmp_path, mixed))
    assert [[span.call for span in row.spans] for row in rows] == [[0, 2, 4], [1, 3, 5]]
    assert [row.prompt_ids[0] for row in rows] == [100, 500]


def test_a_rollout_that_broke_gives_its_exact_parts(tmp_path: Path) -> None:
    made = record(tmp_path, broken(2))
    assert not made["token_capture"]["training_grade"] and made["sequences"] == []
    rows = rows_of(made)
    assert [row.sampled for row in rows] == [4, 4]


def test_an_incomplete_call_is_in_no_row(tmp_path: Path) -> None:
    calls = conversation(2)
    aborted = copy.deepcopy(calls[1])
    aborted["metadata"]["token_capture"] = copy.deepcopy(aborted["metadata"]["token_capture"])
    aborted["metadata"]["token_capture"]["completions"][0]["logprobs"] = None
    aborted["metadata"]["token_capture"]["unavailable"] = {"logprobs": {"code": "truncated", "detail": "aborted"}}
    aborted["metadata"]["token_capture"]["complete"] = False
    rows = rows_of(record(tmp_path, [calls[0], aborted]))
    assert [[span.call for span in row.spans] for row in rows] == [[0]]


@pytest.mark.parametrize("calls", [uncaptured(), [failed()], [], None])
def test_no_capture_is_no_row(tmp_path: Path, calls: list[Line] | None) -> None:
    made = record(tmp_path, calls)  # type: ignore[arg-type]
    assert rows_of(made) == [] and main_row(rows_of(made)) is None


def test_side_calls_are_no_rows(tmp_path: Path) -> None:
    title = conversation(1, first=900, call_purpose="title")
    calls = conversation(2)
    title[0]["metadata"]["call"] = 2
    made = record(tmp_path, [*calls, *title])
    assert len(made["segments"]) == 2 and len(rows_of(made)) == 1


def test_the_main_row_is_the_one_with_most_sampled_ids(tmp_path: Path) -> None:
    helper, agent = conversation(1, first=500), conversation(3, first=100, start=1)
    rows = rows_of(record(tmp_path, [*helper, *agent]))
    main = main_row(rows)
    assert len(rows) == 2 and main is not None and main.prompt_ids[0] == 100
