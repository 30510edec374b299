"""Token ids kept as text, and the record that is complete or says why not."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from capture.errors import RecordError
from capture.record import (
    FIELDS,
    ROUNDING,
    Completion,
    Ids,
    TokenCapture,
    Unavailable,
    are_alternatives,
    are_ids,
    are_logprobs,
    is_logprob,
)

ids = st.lists(st.integers(0, 200_000), max_size=12)
#: Few values, many of them beginnings of each other as text.
alike = st.lists(st.sampled_from([1, 12, 123, 2, 0]), max_size=6)


@given(ids)
def test_ids_are_the_list_they_were_made_of(values: list[int]) -> None:
    made = Ids.of(values)
    assert made.tolist() == values and len(made) == len(values) and list(made) == values
    assert bool(made) == bool(values)
    assert orjson.loads(orjson.dumps({"x": made.json()})) == {"x": values}


@pytest.mark.parametrize("spaces", ["", " ", "\n  "])
@given(values=ids)
def test_ids_are_read_however_they_were_written(spaces: str, values: list[int]) -> None:
    text = f"[{spaces}" + f",{spaces}".join(map(str, values)) + "]"
    assert Ids.parse(text.encode()) == values


@given(st.text(alphabet="0123456789,[] .-e", max_size=12))
def test_what_is_not_a_list_of_ids_is_none(inner: str) -> None:
    text = f"[{inner}]".encode()
    try:
        value = json.loads(text)
        right = "-" not in inner and all(type(item) is int for item in value)  # -0 is no id
    except ValueError:
        right = False
    assert (Ids.parse(text) == value) if right else (Ids.parse(text) is None)


@pytest.mark.parametrize(
    "text",
    [b"null", b"[true]", b"[1.0]", b"[null]", b"[-1]", b"[1 2]", b"[01]", b"[1,,2]", b"{}", b"[7,18446744073709551615]",
     b"[99999999999999999999999,7]"],
)  # fmt: skip
def test_bools_floats_torn_lists_and_numbers_beyond_63_bits_are_not_ids(text: bytes) -> None:
    assert Ids.parse(text) is None


def test_the_largest_id_is_one() -> None:
    assert Ids.parse(b"[1,9223372036854775807]") == [1, 2**63 - 1]


@given(alike, alike)
def test_text_comparisons_are_those_of_lists(ours: list[int], theirs: list[int]) -> None:
    a, b = Ids.of(ours), Ids.of(theirs)
    common = next(
        (n for n, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), min(len(ours), len(theirs))
    )
    assert a.common(b) == common
    assert a.startswith(b) == (ours[: len(theirs)] == theirs)
    assert (a + b).tolist() == ours + theirs
    if a.startswith(b):
        assert a.after(b).tolist() == ours[len(theirs) :]


@given(alike, st.text(alphabet="0123456789,. -", max_size=6))
@example([], ",0")
def test_ids_that_continue_known_ones_are_read_as_if_none_were_known(known: list[int], more: str) -> None:
    before = Ids.of(known)
    text = b"[" + before.text + more.encode() + b"]"
    alone, after = Ids.parse(text), Ids.parse(text, before)
    assert (after is None) == (alone is None)
    if alone is not None and after is not None:
        assert after == alone and len(after) == len(alone) == len(orjson.loads(text))


@pytest.mark.parametrize("value", [True, 1.0, -1, "1", None, 2**63, 2**64, [], [1], {}, math.nan])
def test_only_non_negative_ints_become_ids(value: object) -> None:
    with pytest.raises(RecordError):
        Ids.of([5, value])  # type: ignore[list-item]
    assert Ids.from_json([value, 5]) is None and not are_ids([value])


def capture(*completions: Completion, prompt: Ids | None = None) -> TokenCapture:
    return TokenCapture.of(
        wire="openai-chat", provider="vllm", requested={}, prompt_token_ids=prompt, completions=list(completions),
        unavailable={},
    )  # fmt: skip


def plain_digest(digested: dict[str, Any]) -> str:
    """The digest as it is defined: of what Python's own json writes."""
    return "sha256:" + hashlib.sha256(json.dumps(digested, separators=(",", ":")).encode()).hexdigest()


#: Any logprob, and those about which writers of JSON differ: below 1e-4.
logprobs = (
    st.floats(-9998, 0)
    | st.floats(-2e-4, ROUNDING)
    | st.integers(-9998, 0)
    | st.sampled_from([0.0, -0.0, -1e-4, -9.999999747378752e-05, -1.1920928955078125e-07, -5e-324, ROUNDING])
)
others = st.floats(ROUNDING, exclude_min=True) | st.sampled_from(
    [math.nan, math.inf, -math.inf, -9999.0, 1.7e308, -1.7e308, True, None, 10**400, 1, 1e15, 12.5]
)


@given(st.lists(logprobs | others))
def test_logprobs_are_judged_together_as_each_alone(values: list[Any]) -> None:
    assert are_logprobs(values) == all(map(is_logprob, values))


@given(others)
def test_what_is_not_a_logprob(value: Any) -> None:
    assert not is_logprob(value) and not are_logprobs([-0.5, value])


@pytest.mark.parametrize(
    ("alternatives", "possible"),
    [
        ([], True),
        ([[]], True),
        ([[{"token": "a", "logprob": -0.1}, {"token": "b", "logprob": -2.4}]], True),
        ([[{"token": "a", "logprob": 0.0}, {"token": "b", "logprob": -9999.0}]], True),
        ([[{"token": "a", "logprob": 1e-6}]], True),
        ([[{"token": "a", "logprob": -math.log(20) + 1e-4}] * 20], True),
        ([[{"token": "a", "logprob": None}, 3, {}], None, "x"], True),
        ([[{"token": "a", "logprob": 0.5}]], False),
        ([[], [{"token": "a", "logprob": -0.1}, {"token": "b", "logprob": -0.2}]], False),
        ([[{"token": "a", "logprob": -0.5}] * 3], False),
        ([[{"token": "a", "logprob": math.inf}]], False),
        ([[{"token": "a", "logprob": 10**400}]], False),
    ],
)
def test_alternatives_sum_to_one_at_most(alternatives: list[Any], possible: bool) -> None:
    assert are_alternatives(alternatives) is possible
    choice = Completion(0, Ids.of([5]), ["a"], [-0.1], alternatives)
    assert choice.complete is possible


@given(ids, st.lists(st.lists(logprobs, max_size=8), min_size=1, max_size=3))
def test_a_digest_is_that_of_pythons_json(prompt: list[int], sampled: list[list[float]]) -> None:
    choices = [Completion(n, Ids.of(range(len(values))), None, values) for n, values in enumerate(sampled)]
    made = capture(*choices, prompt=Ids.of(prompt))
    digested = {
        "prompt_token_ids": prompt,
        "completions": [
            {"index": n, "token_ids": list(range(len(values))), "logprobs": [float(value) for value in values]}
            for n, values in enumerate(sampled)
        ],
    }
    assert made.complete and made.digest == plain_digest(digested) == made.compute_digest()


def test_a_whole_capture_is_complete_and_has_a_digest_that_json_can_repeat() -> None:
    made = capture(Completion(0, Ids.of([5, 6]), ["a", "b"], [-0.5, -1e-05]), prompt=Ids.of([1, 2]))
    assert made.complete
    digested = {
        "prompt_token_ids": [1, 2],
        "completions": [{"index": 0, "token_ids": [5, 6], "logprobs": [-0.5, -1e-05]}],
    }
    assert made.digest == plain_digest(digested)
    again = TokenCapture.from_json(orjson.loads(orjson.dumps(made.to_json())))
    assert again.complete and again.digest == made.digest == again.compute_digest()


@pytest.mark.parametrize(
    ("completion", "field"),
    [
        (Completion(0, None, None, [-0.5]), "completion_token_ids"),
        (Completion(0, Ids.of([5, 6]), None, None), "logprobs"),
        (Completion(0, Ids.of([5, 6]), None, [-0.5]), "logprobs"),
        (Completion(0, Ids.of([5]), None, [math.nan]), "logprobs"),
        (Completion(0, Ids.of([5]), None, [-math.inf]), "logprobs"),
        (Completion(0, Ids.of([5]), None, [-9999.0]), "logprobs"),
        (Completion(0, Ids.of([5]), None, [True]), "logprobs"),
    ],
)
def test_a_field_that_is_missing_for_one_choice_is_named(completion: Completion, field: str) -> None:
    whole = Completion(1, Ids.of([7]), None, [-0.1])
    made = capture(whole, completion, prompt=Ids.of([1]))
    assert not made.complete and list(made.unavailable) == [field]
    assert made.digest is None and made.unavailable[field].detail


def test_no_choice_at_all_is_not_complete() -> None:
    made = capture(prompt=Ids.of([1]))
    assert not made.complete and set(made.unavailable) == {"completion_token_ids", "logprobs"}


def test_a_stored_capture_is_not_believed_when_it_says_that_it_is_complete() -> None:
    stored = {"schema_version": "benchflow.token_capture.v1", "prompt_token_ids": [1], "unavailable": {},
              "completions": [{"index": 0, "token_ids": [5, 6], "logprobs": [-0.5]}]}  # fmt: skip
    read = TokenCapture.from_json(stored)
    assert not read.complete and read.unavailable["logprobs"].code == "count_mismatch_ids_logprobs"


def test_benchflows_capture_without_our_fields_is_read() -> None:
    stored = {"schema_version": "benchflow.token_capture.v1", "provider": "vllm", "prompt_token_ids": [1, 2],
              "completions": [{"index": 0, "token_ids": [3], "logprobs": [-0.25]}], "unavailable": {}}  # fmt: skip
    read = TokenCapture.from_json(stored)
    assert read.complete and read.provider == "vllm" and read.completions[0].tokens is None


def test_benchflows_short_reasons_are_read() -> None:
    stored = {"schema_version": "benchflow.token_capture.v1", "completions": [],
              "unavailable": {name: {"reason": "not_requested"} for name in FIELDS}}  # fmt: skip
    read = TokenCapture.from_json(stored)
    assert read.unavailable["logprobs"] == Unavailable("not_requested", "not_requested", "")


@pytest.mark.parametrize("value", [None, [], {"schema_version": "v0"}, {"schema_version": None}])
def test_what_is_not_a_capture_is_refused(value: object) -> None:
    with pytest.raises(RecordError):
        TokenCapture.from_json(value)
