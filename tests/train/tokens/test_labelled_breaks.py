"""Causes of breaks against a labelled set: named right, and never certain of a wrong one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from capture.breaks.breaks import CAUSES, Break
from capture.breaks.diagnosis import diagnose
from tests.train.labelled_breaks import Case, cases
from tests.train.smollm import smollm
from train.tokens.tokenizer import decoder_of

CASES = list(cases())
#: Of labelled breaks, the share that must be named right where a tokenizer and the messages are at hand.
WANTED = 0.95


@pytest.fixture(scope="module")
def diagnoses() -> dict[str, Break]:
    decoder = decoder_of(smollm())
    return {case.name: diagnose(case.before, case.after, decoder) for case in CASES}


def test_the_set_is_large_and_contains_every_cause() -> None:
    assert len(CASES) >= 40
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.cause for case in CASES} == set(CAUSES)
    assert min(Counter(case.cause for case in CASES if case.cause != "unknown").values()) >= 3


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_a_break(case: Case) -> None:
    assert not case.after.prompt.startswith(case.before.prompt + case.before.sampled)


def test_causes_are_named_right(diagnoses: dict[str, Break]) -> None:
    wrong = [f"{case.name}: {diagnoses[case.name].cause}" for case in CASES if diagnoses[case.name].cause != case.cause]
    assert len(wrong) <= (1 - WANTED) * len(CASES), wrong


@pytest.mark.parametrize("evidence", ["all", "no tokenizer", "no messages", "tokens only"])
def test_never_certain_of_a_wrong_cause(evidence: str) -> None:
    decoder = decoder_of(smollm()) if evidence in ("all", "no messages") else None
    for case in CASES:
        before, after = case.before, case.after
        if evidence in ("no messages", "tokens only"):
            before = replace(before, messages=None, tools=None, reply=None, finish_reason=None, tokens=None)
            after = replace(after, messages=None, tools=None)
        found = diagnose(before, after, decoder)
        assert found.sure != "certain" or found.cause == case.cause, (case.name, found.cause)


def test_the_index_is_where_the_ids_differ(diagnoses: dict[str, Break]) -> None:
    for case in CASES:
        expected, new = (case.before.prompt + case.before.sampled).tolist(), case.after.prompt.tolist()
        index = diagnoses[case.name].index
        assert expected[:index] == new[:index]
        assert expected[index : index + 1] != new[index : index + 1]
        assert diagnoses[case.name].expected == expected[index : index + 8]
        assert diagnoses[case.name].found == new[index : index + 8]


@pytest.mark.parametrize("tokenizer", [True, False])
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if "tool call" in case.name and case.cause == "history_edited"],
    ids=lambda c: c.name,
)
def test_changed_tool_calls_are_an_edited_history(case: Case, tokenizer: bool) -> None:
    found = diagnose(case.before, case.after, decoder_of(smollm()) if tokenizer else None)
    assert (found.cause, found.sure) == ("history_edited", "certain")
