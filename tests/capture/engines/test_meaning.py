"""What an engine's logprobs mean, found out from the alternatives of three calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from capture.engines.meaning import ALTERNATIVES, LogprobMeaning, measure
from tests.capture.engines.logprob_modes import FLAT, LOW, PEAKED, alternatives


def measured(logits: list[float], mode: str) -> LogprobMeaning | None:
    asked = measure("m")
    path, body = next(asked)
    try:
        while True:
            assert path == "/v1/chat/completions" and body["max_tokens"] == 1 and body["model"] == "m"
            path, body = asked.send(json.loads(json.dumps(alternatives(logits, mode, body))))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


@pytest.mark.parametrize("logits", [PEAKED, FLAT], ids=["peaked", "flat"])
@pytest.mark.parametrize(
    ("mode", "temperature", "truncation", "values"),
    [
        ("raw", "not_applied", "not_applied", "logprobs"),
        ("temperature", "applied", "not_applied", "logprobs"),
        ("processed", "applied", "applied", "logprobs"),
        ("raw_logits", "not_applied", "not_applied", "logits"),
        ("processed_logits", "applied", "applied", "logits"),
    ],
)
def test_every_mode_is_recognized(
    logits: list[float], mode: str, temperature: str, truncation: str, values: str
) -> None:
    assert measured(logits, mode) == LogprobMeaning(temperature, truncation, values, "probe")


def test_logits_far_below_0_are_not_logprobs_either() -> None:
    found = measured(LOW, "raw_logits")
    assert found is not None and found.values == "logits"


def test_alternatives_that_are_all_alike_say_nothing_about_temperature() -> None:
    found = measured([1.0] * 8, "temperature")
    assert found is not None and (found.temperature, found.truncation) == ("unknown", "not_applied")


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        {"choices": []},
        {"choices": [{"logprobs": None}]},
        {"choices": [{"logprobs": {"content": [{"token": "a", "logprob": -1.0, "top_logprobs": []}]}}]},
        {"choices": [{"logprobs": {"content": [{"top_logprobs": [{"token": "a", "logprob": "x"}]}]}}]},
        {"choices": [{"logprobs": {"content": [{"top_logprobs": [{"token": "a", "logprob": -1}] * ALTERNATIVES}]}}]},
        ["no object"],
    ],
)
def test_an_answer_without_alternatives_ends_the_measuring(answer: Any) -> None:
    asked = measure("m")
    next(asked)
    with pytest.raises(StopIteration) as end:
        asked.send(answer)
    assert end.value.value is None


def test_a_refused_second_or_third_call_leaves_that_part_unknown() -> None:
    asked = measure("m")
    _, body = next(asked)
    asked.send(alternatives(PEAKED, "raw", body))
    asked.send(None)
    with pytest.raises(StopIteration) as end:
        asked.send({"error": {"message": "top_k is not known"}})
    assert end.value.value == LogprobMeaning("unknown", "unknown", "logprobs", "probe")


@pytest.mark.parametrize("value", [None, "x", {}, {"temperature": 3, "source": ["probe"]}, {"temperature": "hot"}])
def test_what_a_record_does_not_say_is_unknown(value: Any) -> None:
    assert LogprobMeaning.from_json(value) == LogprobMeaning()


def test_a_meaning_is_read_as_it_was_written() -> None:
    meaning = LogprobMeaning("applied", "not_applied", "logprobs", "probe")
    assert LogprobMeaning.from_json(meaning.to_json()) == meaning
