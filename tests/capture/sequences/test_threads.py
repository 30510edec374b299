"""Which call continues which, found by tokens alone."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from capture.record import Ids
from capture.sequences.threads import Placement, Threads, extends


def place(*calls: tuple[list[int], list[list[int]]]) -> list[Placement]:
    threads = Threads()
    return [threads.place(n, Ids.of(p), [Ids.of(choice) for choice in choices]) for n, (p, choices) in enumerate(calls)]


def test_a_conversation_is_one_thread() -> None:
    found = place(([1, 2], [[3]]), ([1, 2, 3, 4], [[5]]), ([1, 2, 3, 4, 5, 6], [[7]]))
    assert [placed.parent for placed in found] == [None, 0, 1]


def test_the_longest_beginning_wins_over_the_last_call() -> None:
    main, side = ([1, 2], [[3]]), ([9], [[8]])
    found = place(main, ([1, 2, 3, 4], [[5]]), side, ([1, 2, 3, 4, 5, 6], [[7]]), ([1, 2, 3, 9], [[1]]))
    assert [placed.parent for placed in found] == [None, 0, None, 1, 0]


def test_the_continued_choice_is_reported() -> None:
    found = place(([1], [[2], [3, 4]]), ([1, 3, 4, 5], [[6]]))
    assert (found[1].parent, found[1].choice) == (0, 1)


def test_equal_candidates_are_reported_and_not_guessed() -> None:
    found = place(([1], [[2]]), ([1], [[2]]), ([1, 2, 3], [[4]]))
    assert found[2] == Placement(2, ambiguous=(0, 1))


def test_ids_that_start_alike_as_text_are_others() -> None:
    found = place(([1, 2], [[3]]), ([1, 2, 33, 4], [[5]]), ([12, 3], [[4]]))
    assert [placed.parent for placed in found] == [None, None, None]


def test_a_reply_of_no_ids_is_continued_by_its_prompt() -> None:
    found = place(([1, 2], [[]]), ([1, 2, 3], [[4]]))
    assert found[1].parent == 0


def test_the_same_prompt_again_does_not_continue_a_reply_of_no_ids() -> None:
    found = place(([1, 2], [[]]), ([1, 2], [[]]), ([1, 2], [[3]]), ([1, 2, 3, 4], [[5]]))
    assert [placement.parent for placement in found] == [None, None, None, 2]


def test_of_replies_of_no_ids_the_latest_is_continued() -> None:
    found = place(([1, 2], [[]]), ([1, 2], [[]]), ([1, 2, 3], [[4]]))
    assert found[2] == Placement(2, 1, 0)


def test_a_call_that_continued_and_sampled_nothing_is_the_parent() -> None:
    found = place(([1], [[2]]), ([1, 2], [[]]), ([1, 2, 3], [[4]]), ([1, 2, 3, 4, 5], [[6]]))
    assert [placement.parent for placement in found] == [None, 0, 1, 2]


def test_a_callback_decides_between_equal_candidates() -> None:
    asked: list[object] = []

    def latest(call: int, candidates: object) -> tuple[int, int]:
        asked.append((call, candidates))
        return (1, 0)

    threads = Threads(latest)
    for number, (prompt, choices) in enumerate([([1], [[2]]), ([1], [[2], [2]]), ([1, 2, 3], [[4]])]):
        threads.place(number, Ids.of(prompt), [Ids.of(choice) for choice in choices])
    assert asked == [(2, [(0, 0), (1, 0), (1, 1)])]
    assert threads.placements[2] == Placement(2, 1, 0)


ids = st.lists(st.sampled_from([1, 12, 2]), max_size=5)


@given(ids, ids, ids)
def test_extends_is_the_comparison_of_lists(prompt: list[int], before: list[int], sampled: list[int]) -> None:
    prefix = before + sampled
    assert extends(Ids.of(prompt), Ids.of(before), Ids.of(sampled)) == (prompt[: len(prefix)] == prefix)


def test_random_trees_are_found_again() -> None:
    dice = random.Random(3)
    for _ in range(50):
        calls: list[tuple[list[int], list[list[int]]]] = []
        parents: list[int | None] = []
        for number in range(12):
            parent = dice.choice([None, *range(number)])
            parent_ids = [] if parent is None else calls[parent][0] + calls[parent][1][0]
            # Every call has ids of its own, so no two are alike.
            calls.append((parent_ids + [1000 * (number + 1) + k for k in range(dice.randrange(1, 4))], [[7 + number]]))
            parents.append(parent)
        assert [placed.parent for placed in place(*calls)] == parents
