"""Arguments of tool calls that a row can hold with the value that was sampled, and those that it cannot."""

from __future__ import annotations

import json
from typing import Any

import pytest

from train.rollouts.messages import MAX_DEPTH, arguments_of


def arguments(text: str) -> dict[str, Any] | None:
    return arguments_of({"function": {"name": "f", "arguments": text}})


def nested(levels: int, opening: str = '{"a": ', inner: str = "1", closing: str = "}") -> str:
    return opening * levels + inner + closing * levels


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63), 1.5, 1e300, 0.1234567890123456789, "9" * 30])
def test_values_that_a_row_holds(number: Any) -> None:
    text = json.dumps({"n": [number]})
    assert arguments(text) == {"n": [number]}


@pytest.mark.parametrize("number", [2**63, 2**64 - 1, 2**64, 2**70, 10**20, -(2**63) - 1, -(10**22)])
def test_integers_that_become_floats_are_left_out(number: int) -> None:
    """orjson reads 10**20 as 1e+20, which compares equal; `load_dataset` (5.2) makes a float of 2**63."""
    assert arguments(json.dumps({"n": number})) is None
    assert arguments(json.dumps({"m": 1, "n": [{"o": number}]})) is None


@pytest.mark.parametrize("text", ['{"n": NaN}', '{"n": 1e400}', '{"n": "\\ud800"}', '{"n": 1', "[1]", "1", "null"])
def test_what_is_no_object_of_strict_json(text: str) -> None:
    assert arguments(text) is None


def test_nesting_that_arrow_has_no_schema_for_is_left_out() -> None:
    """`load_dataset` refuses a whole file for one row with 64 levels, the messages included."""
    assert arguments(nested(MAX_DEPTH)) is not None
    assert arguments(nested(MAX_DEPTH + 1)) is None
    assert arguments('{"n": ' + nested(MAX_DEPTH, "[", "1", "]") + "}") is None
    assert arguments("{}") == {} and arguments("  ") == {}
