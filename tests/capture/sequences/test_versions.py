"""Which weights sampled which ids: from an engine's answer to the spans of a sequence."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from capture.engines import engine
from capture.record import Completion, Ids
from capture.sequences.sequences import Turn, merge
from capture.sequences.threads import Threads
from capture.sequences.versions import VersionRange, VersionSpan, read_ranges, version_in_name
from tests.proxy.fake_engine import transcript


def test_the_version_in_a_models_name() -> None:
    names = ["lora-v12", "a/b-v0", "x-v1-v2", "-v3", "v3", "lora-v", "lora-v1.5", "lora-v1x", "lora-v1\n", None, 7]
    assert [version_in_name(name) for name in names] == ["12", "0", "2", *[None] * 8]


def rows(*ranges: tuple[Any, Any, Any]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in ranges]


@pytest.mark.parametrize(
    ("value", "ids", "ranges"),
    [
        (rows(("6", 0, 3), ("7", 3, 5)), 5, [("6", 0, 3), ("7", 3, 5)]),
        (rows(("6", 0, 3), ("7", 3, 9)), 5, [("6", 0, 3), ("7", 3, 5)]),
        (rows(("6", 0, 5), ("7", 5, 9)), 5, [("6", 0, 5)]),
        (rows(("6", 0, 3)), 5, []),
        (rows(("6", 0, 2), ("7", 3, 5)), 5, []),
        (rows(("6", 1, 5)), 5, []),
        (rows((6, 0, 5)), 5, []),
        (rows(("6", 0, True)), 1, []),
        (rows(("6", 0, 5), ("7", 5, 2)), 5, []),
        ([None], 5, []), ([], 5, []), (None, 5, []), ("6", 5, []), ([[]], 5, []),
    ],
)  # fmt: skip
def test_ranges_that_cover_a_choice(value: Any, ids: int, ranges: list[Any]) -> None:
    assert read_ranges(value, ids) == tuple(VersionRange(*each) for each in ranges)


@pytest.mark.parametrize("name", ["chat-return_token_ids-nostream", "chat-eos-nostream", "cmpl-ids-nostream"])
def test_sglang_says_which_weights_sampled_which_ids_of_an_unstreamed_reply(name: str) -> None:
    """The recorded answers are of an engine whose weights nobody named, `default`, which says nothing."""
    answer = json.loads(transcript(f"sglang/{name}")[1])
    count = answer["usage"]["completion_tokens"]
    assert engine("sglang").weight_versions(answer) is None
    named = rows(("6", 0, 2), ("7", 2, count))
    for place in (answer["metadata"], *(choice.get("meta_info") or {} for choice in answer["choices"])):
        place["weight_versions"] = named
    assert engine("sglang").weight_versions(answer) == [named]
    assert engine("vllm").weight_versions(answer) is None
    half = rows(("default", 0, 2), ("7", 2, count))
    answer["metadata"]["weight_versions"] = half
    answer["choices"][0].pop("meta_info", None)
    assert engine("sglang").weight_versions(answer) == [half], "the first update of a run"


def test_of_several_choices_sglang_names_the_first() -> None:
    answer = json.loads(transcript("sglang/chat-n2-sglext-nostream")[1])
    answer["metadata"]["weight_versions"] = rows(("7", 0, 4))
    assert engine("sglang").weight_versions(answer) == [rows(("7", 0, 4)), None]


@pytest.mark.parametrize("odd", [None, 1, [1], {}, "x", [{"meta_info": []}], [{"meta_info": {"weight_versions": 3}}]])
def test_an_answer_of_another_shape_says_nothing(odd: Any) -> None:
    for answer in ({"choices": odd}, {"choices": [{}], "metadata": odd}, {"choices": odd, "metadata": odd}):
        assert engine("sglang").weight_versions(copy.deepcopy(answer)) is None


def test_a_sequence_names_the_version_of_each_sampled_id() -> None:
    """Exactly where the engine said it, both versions where only the call's ends are known, null where nothing is."""
    calls: list[tuple[list[int], list[int], tuple[str, ...], Any]] = [
        ([1, 2], [3, 4], ("6", "7"), [[VersionRange("6", 0, 1), VersionRange("7", 1, 2)]]),
        ([1, 2, 3, 4, 5], [6, 7], ("7", "8"), []),
        ([1, 2, 3, 4, 5, 6, 7], [8], (), []),
    ]
    threads, turns = Threads(), []
    for number, (prompt, ids, versions, ranges) in enumerate(calls):
        choice = Completion(0, Ids.of(ids), None, [-0.5] * len(ids))
        threads.place(number, Ids.of(prompt), [Ids.of(ids)])
        turns.append(Turn(number, number, Ids.of(prompt), [choice], "agent", versions, ranges))
    (sequence,) = merge(turns, threads.placements)
    assert sequence.version_spans == (
        VersionSpan(0, 1, "6"), VersionSpan(1, 1, "7"), VersionSpan(3, 2, "7", "8"), VersionSpan(5, 1, None),
    )  # fmt: skip
    assert sequence.policy_versions == ("6", "7", "8")
    covered = [at for span in sequence.version_spans for at in range(span.offset, span.offset + span.length)]
    assert covered == [at for at, sampled in enumerate(sequence.completion_mask) if sampled]
    (untold,) = merge([Turn(0, 0, Ids.of([1]), [Completion(0, Ids.of([2]), None, [-1.0])])], {0: threads.placements[0]})
    assert untold.version_spans == ()
