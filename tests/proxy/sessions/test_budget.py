"""How a session's budget is counted: what calls reserve, wait for, and give back."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from proxy.errors import SettingsError
from proxy.sessions.budget import Budget, BudgetReached, Reservation
from proxy.settings import SessionOptions

CHAT: dict[str, Any] = {"model": "m", "messages": []}


def budget(**options: Any) -> Budget:
    made = Budget.of(SessionOptions(**options))
    assert made is not None
    return made


def test_a_session_without_limits_has_no_budget() -> None:
    assert Budget.of(SessionOptions(max_output_tokens=5)) is None


async def test_parallel_calls_cannot_pass_the_limit_together() -> None:
    limit = budget(max_calls=3)
    made = await asyncio.gather(*(limit.reserve(CHAT) for _ in range(8)), return_exceptions=True)
    assert sum(isinstance(result, Reservation) for result in made) == 3
    assert sum(isinstance(result, BudgetReached) for result in made) == 5
    assert limit.state() == {"calls": 3, "sampled_tokens": 0, "reached": "max_calls", "ended_calls": 5}


async def test_a_call_that_was_not_answered_is_given_back() -> None:
    limit = budget(max_calls=1)
    limit.settle(await limit.reserve(CHAT), 0, answered=False)
    limit.settle(await limit.reserve(CHAT), 5, answered=True)
    with pytest.raises(BudgetReached, match="1 of 1 calls"):
        await limit.reserve(CHAT)


@pytest.mark.parametrize(
    "body",
    [{"max_tokens": 40}, {"max_completion_tokens": 40}, {"max_tokens": 4, "n": 10}, {"max_tokens": "40"}],
    ids=str,
)
async def test_calls_that_fit_run_at_once_and_others_wait_for_them(body: dict[str, Any]) -> None:
    limit = budget(max_sampled_tokens=100)
    first, second = await limit.reserve({**CHAT, **body}), await limit.reserve({**CHAT, **body})
    assert first == second == Reservation(40)
    third = asyncio.ensure_future(limit.reserve({**CHAT, **body}))
    await asyncio.sleep(0)
    assert not third.done()
    limit.settle(first, 10, answered=True)
    assert await third == Reservation(40)


async def test_the_last_call_is_cut_to_what_is_left_for_each_of_its_choices() -> None:
    limit = budget(max_sampled_tokens=100)
    limit.settle(await limit.reserve({**CHAT, "max_tokens": 93}), 93, answered=True)
    last = await limit.reserve({**CHAT, "max_tokens": 40, "n": 2})
    assert last == Reservation(7, 3)
    limit.settle(last, 6, answered=True)
    with pytest.raises(BudgetReached, match="99 of 100 tokens"):
        await limit.reserve({**CHAT, "n": 2})


async def test_a_call_without_a_limit_asks_for_all_that_is_left() -> None:
    limit = budget(max_sampled_tokens=100)
    first = await limit.reserve(CHAT)
    assert first == Reservation(100, 100)
    waiting = [asyncio.ensure_future(limit.reserve(CHAT)) for _ in range(2)]
    limit.settle(first, 100, answered=True)
    done = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, BudgetReached) for result in done)


async def test_completions_sample_sixteen_where_they_do_not_say() -> None:
    limit = budget(max_sampled_tokens=100)
    assert await limit.reserve({"prompt": ["a", "b"]}) == Reservation(32)
    assert await limit.reserve({"prompt": [1, 2, 3]}) == Reservation(16)


async def test_seconds_count_from_the_first_call() -> None:
    limit = budget(max_seconds=0.05)
    await asyncio.sleep(0.06)
    await limit.reserve(CHAT)
    await asyncio.sleep(0.06)
    with pytest.raises(BudgetReached, match=r"of 0\.05 seconds"):
        await limit.reserve(CHAT)


async def test_an_agent_that_calls_again_anyway_gets_errors() -> None:
    limit = budget(max_calls=1)
    await limit.reserve(CHAT)
    answers = []
    for _ in range(5):
        with pytest.raises(BudgetReached) as reached:
            await limit.reserve(CHAT)
        answers.append(reached.value.to_json()["answer"])
    assert answers == ["message"] * 3 + ["error"] * 2


async def test_a_call_that_is_cancelled_while_it_waits_takes_nothing() -> None:
    limit = budget(max_calls=5, max_sampled_tokens=10)
    first = await limit.reserve(CHAT)
    waiting = asyncio.ensure_future(limit.reserve(CHAT))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    limit.settle(first, 2, answered=True)
    assert await limit.reserve(CHAT) == Reservation(8, 8)
    assert limit.calls == 2


@pytest.mark.parametrize(
    "options",
    [{"max_calls": 0}, {"max_sampled_tokens": -1}, {"max_seconds": 0.0}, {"max_seconds": math.nan},
     {"max_output_tokens": 0}, {"grammars": "allow"}, {"purpose": "reviewer"},
     {"force_sampling": {"messages": []}}, {"force_sampling": {"temprature": 1}}],
    ids=str,
)  # fmt: skip
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"^--"):
        SessionOptions(**options).check()
