"""Calls as rows for a trainer: every sampled id once, the rest as context, nothing invented."""

from __future__ import annotations

import random

import orjson
import pytest

from capture.record import Completion, Ids
from capture.sequences.sequences import TokenSequence, Turn, merge
from capture.sequences.threads import Threads

Call = tuple[list[int], list[list[int]]]


def sequences(*calls: Call, kinds: dict[int, str] | None = None) -> list[TokenSequence]:
    threads, turns = Threads(), []
    for number, (prompt, choices) in enumerate(calls):
        made = [
            Completion(n, Ids.of(ids), None, [-token_id / 1000 for token_id in ids]) for n, ids in enumerate(choices)
        ]
        threads.place(number, Ids.of(prompt), [Ids.of(ids) for ids in choices])
        kind = (kinds or {}).get(number, "agent")
        turns.append(Turn(number, 100 + number, Ids.of(prompt), made, kind, (f"v{number // 2}",)))
    return merge(turns, threads.placements)


def test_a_conversation_is_one_sequence_with_what_was_sampled_marked() -> None:
    (sequence,) = sequences(([1, 2], [[3, 4]]), ([1, 2, 3, 4, 5, 6], [[7]]), ([1, 2, 3, 4, 5, 6, 7, 8], [[9, 10]]))
    assert sequence.prompt_ids == [1, 2]
    assert sequence.completion_ids == [3, 4, 5, 6, 7, 8, 9, 10]
    assert sequence.completion_mask == [1, 1, 0, 0, 1, 0, 1, 1]
    assert sequence.completion_logprobs == [-0.003, -0.004, 0.0, 0.0, -0.007, 0.0, -0.009, -0.010]
    assert sequence.calls == (0, 1, 2) and sequence.lines == (100, 101, 102) and sequence.sampled == 5
    assert [(span.call, span.offset, span.length) for span in sequence.spans] == [(0, 0, 2), (1, 4, 1), (2, 6, 2)]
    assert sequence.policy_versions == ("v0", "v1")


def test_labels_stand_for_themselves_where_they_were_sampled() -> None:
    (sequence,) = sequences(([1, 2], [[3, 4]]), ([1, 2, 3, 4, 5], [[7]]))
    labels = orjson.loads(b"[" + sequence.labels_text() + b"]")
    assert labels == [-100, -100, 3, 4, -100, 7]


def test_the_texts_are_the_lists() -> None:
    (sequence,) = sequences(([1, 2], [[3, 4]]), ([1, 2, 3, 4, 5], [[7]]))
    assert orjson.loads(b"[" + sequence.mask_text(b"1", b"0") + b"]") == sequence.completion_mask
    assert orjson.loads(b"[" + sequence.logprobs_text() + b"]") == sequence.completion_logprobs


def test_branches_train_what_they_share_once() -> None:
    first, second = sequences(([1], [[2, 3]]), ([1, 2, 3, 4], [[5]]), ([1, 2, 3, 6], [[7]]))
    assert first.completion_mask == [1, 1, 0, 1] and second.completion_mask == [0, 0, 0, 1]
    assert second.completion_ids == [2, 3, 6, 7] and second.completion_logprobs == [0.0, 0.0, 0.0, -0.007]


def test_a_side_call_on_top_of_the_conversation_takes_nothing_from_it() -> None:
    kinds = {1: "compaction"}
    agent, side = sequences(([1], [[2]]), ([1, 2, 90], [[91]]), ([1, 2, 3], [[4]]), kinds=kinds)
    assert (agent.kind, agent.completion_mask) == ("agent", [1, 0, 1])
    assert (side.kind, side.completion_mask) == ("compaction", [0, 0, 1])


def test_the_choice_that_was_continued_is_followed_and_two_of_one_call_are_two_branches() -> None:
    first, second = sequences(([1], [[2], [3]]), ([1, 3, 4], [[5]]), ([1, 2, 6], [[7]]))
    assert first.completion_ids == [3, 4, 5] and first.completion_mask == [1, 0, 1]
    assert second.completion_ids == [2, 6, 7] and second.completion_mask == [1, 0, 1]


def test_a_reply_without_ids_and_a_prompt_without_tail_are_accepted() -> None:
    (sequence,) = sequences(([1], [[]]), ([1], [[2]]), ([1, 2], [[3]])) or [None]
    assert sequence is not None and sequence.completion_ids == [2, 3] and sequence.completion_mask == [1, 1]


def test_a_digest_changes_with_any_part() -> None:
    digests = {
        sequence.digest()
        for calls in ([([1], [[2]])], [([1], [[3]])], [([4], [[2]])], [([1], [[2]]), ([1, 2], [[5]])])
        for sequence in sequences(*calls)
    }
    assert len(digests) == 4


@pytest.mark.parametrize("seed", range(20))
def test_every_path_is_the_calls_own_tokens_and_every_sampled_id_is_trained_once(seed: int) -> None:
    dice = random.Random(seed)
    calls: list[Call] = []
    for number in range(15):
        parent = dice.choice([None, *range(number)]) if number else None
        expected = [] if parent is None else calls[parent][0] + calls[parent][1][0]
        prompt = expected + [1000 + 10 * number + k for k in range(dice.randrange(1, 5))]
        calls.append((prompt, [[5000 + 10 * number + k for k in range(dice.randrange(1, 5))]]))
    found = sequences(*calls)
    trained: list[int] = []
    for sequence in found:
        leaf = calls[sequence.calls[-1]]
        assert sequence.prompt_ids.tolist() + sequence.completion_ids.tolist() == leaf[0] + leaf[1][0]
        mask = sequence.completion_mask
        assert len(mask) == len(sequence.completion_ids) == len(sequence.completion_logprobs)
        trained += [value for value, bit in zip(sequence.completion_ids, mask, strict=True) if bit]
    assert sorted(trained) == sorted(value for _, choices in calls for value in choices[0])
