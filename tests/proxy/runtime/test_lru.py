"""What sessions remember is bounded, in number and in size, each and all together; what was used last stays."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

from capture.token_ids import Ids
from capture.token_in.parent import Conversation, PastCall, PastReply
from proxy.runtime.lru import EACH, BoundedLRU, MemoryBudget
from proxy.sessions.answer_cache import AnswerCache
from proxy.sessions.registry import Sessions
from proxy.settings import SessionOptions
from proxy.token_in.call_history import CallHistory
from proxy.upstream.replicas import Replicas


def test_the_oldest_go_where_there_are_too_many() -> None:
    cache = AnswerCache(most=2)
    for name in "abc":
        cache.keep({name: name})
    assert [cache.get(name) for name in "abc"] == [None, "b", "c"]


def test_the_oldest_go_where_they_are_too_large() -> None:
    cache = AnswerCache(largest=2 * EACH + 4_000)
    cache.keep({"a": "1" * 1_900, "b": b"1" * 1_900})
    cache.keep({"a": "1"})  # less than before, and the latest now
    cache.keep({"c": "1" * 1_900})
    assert [cache.get(name) is not None for name in "abc"] == [True, False, True]
    cache.keep({"d": "1" * 5_000})
    assert [cache.get(name) for name in "abcd"] == [None] * 4


def test_a_text_counts_as_what_it_takes_not_as_its_characters() -> None:
    cache = AnswerCache(largest=EACH + 3_000)
    cache.keep({"a": "\U0001f600" * 1_000})
    assert cache.get("a") is None


def test_one_bound_for_all_takes_what_was_used_longest_ago_whoever_has_it() -> None:
    whole = MemoryBudget(4 * (EACH + 100))
    first, second = (BoundedLRU[str, str](10, 1 << 20, whole) for _ in range(2))
    for name in "ab":
        first.put(name, name, 100)
        second.put(name, name, 100)
    assert first.get("a") == "a"  # a use of it
    second.put("c", "c", 100)  # the fifth
    assert second.get("a") is None and list(first) == ["b", "a"] and list(second) == ["b", "c"]
    first.close()
    assert whole.size == 2 * (EACH + 100)
    first.put("late", "late", 100)  # a call that ended after its session
    assert list(first) == [] and whole.size == 2 * (EACH + 100)


def past_call(call: int, size: int) -> PastCall:
    conversation = Conversation.of({"messages": [{"role": "user", "content": str(call)}]})
    assert conversation is not None
    prompt = b"1," * (size // 2)
    return PastCall(call, conversation, prompt, prompt, (PastReply(call, b"7"),))


def test_a_call_that_the_bound_for_all_took_is_known_as_one_that_was_forgotten() -> None:
    whole = MemoryBudget(100_000)
    first, second = CallHistory(whole), CallHistory(whole)
    first.add(past_call(0, 40_000))
    second.add(past_call(1, 40_000))
    second.add(past_call(2, 40_000))
    assert list(first) == [] and list(first.known) == [0]
    assert [call.call for call in second] == [1, 2] and list(second.known) == []


def test_a_thousand_sessions_hold_no_more_than_the_bound() -> None:
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    whole = MemoryBudget(4 << 20)
    sessions = [(AnswerCache(budget=whole), CallHistory(whole)) for _ in range(1_000)]
    for turn in range(5):
        for number, (cache, calls) in enumerate(sessions):
            cache.keep({f"resp_{number}_{turn}": b"x" * 2_000, f"call_{number}_{turn}": "{}" * turn})
            calls.add(past_call(turn, 4_000))
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert whole.size <= 4 << 20
    assert taken < (4 << 20) * 1.25 + 1_000 * 3_000, "and what a thousand empty memories take"
    assert sum(len(list(calls)) for _, calls in sessions) > 300, "the latest are here"
    for cache, calls in sessions:
        cache.end()
        calls.end()
    assert whole.size == 0


async def test_a_long_prompt_is_remembered_until_its_session_ends(tmp_path: Path) -> None:
    budget = MemoryBudget()
    sessions = Sessions(open_mode=True, out=tmp_path, fsync=False, grace=1, budget=budget)
    session = sessions.open("one", SessionOptions(), Replicas([]))
    session.prompt = Ids.of(range(100))
    assert session.prompt is None and budget.size == 0
    for last in (5_000, 6_000):
        session.prompt = long = Ids.of(range(last))
        assert session.prompt == long and len(long.text) < budget.size < len(long.text) + 1_000
    await sessions.close(session.id)
    session.prompt = Ids.of(range(5_000))  # a call that ended after its session
    assert session.prompt is None and budget.size == 0
