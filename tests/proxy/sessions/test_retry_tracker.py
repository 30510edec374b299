"""Which failed call a call makes again; through the proxy in `test_clients.py` and `dialects/anthropic`."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

from proxy.sessions.retry_tracker import MOST, Retries

ONE: dict[str, Any] = {"input": [1]}
TWO: dict[str, Any] = {"input": [1, 2, 3]}


def test_the_same_words_after_a_failure_are_a_retry_and_an_answer_ends_the_chain() -> None:
    retries = Retries()
    retries.remember(b"7", {}, None, 0, "error")
    assert retries.of(b"7", {}, None) == 0 and retries.of(b"8", {}, None) is None
    retries.remember(b"7", {}, None, 1, "truncated")
    assert retries.of(b"7", {}, None) == 1
    retries.remember(b"7", {}, None, 2, "ok")
    assert retries.of(b"7", {}, None) is None


def test_the_same_words_after_an_answer_are_not_a_retry() -> None:
    retries = Retries()
    retries.remember(b"7", {}, None, 0, "ok")
    assert retries.of(b"7", {}, None) is None


def test_a_clients_own_name_links_other_words() -> None:
    """A client may stamp each attempt: the body differs, the name does not."""
    retries = Retries()
    retries.remember(b"7", ONE, "request-1", 0, "error")
    assert retries.of(b"8", ONE, "request-1") == 0
    assert retries.of(b"8", ONE, "request-2") is None


def test_a_name_that_a_whole_conversation_shares_links_no_later_turn() -> None:
    """Codex names every call of a thread the same."""
    retries = Retries()
    retries.remember(b"7", ONE, "thread", 0, "error")
    assert retries.of(b"9", TWO, "thread") is None
    retries.remember(b"8", ONE, "thread", 1, "ok")
    assert retries.of(b"10", ONE, "thread") is None


def test_what_is_remembered_is_bounded() -> None:
    retries = Retries()
    for number in range(MOST + 5):
        retries.remember(b"%d" % number, {}, None, number, "error")
    assert retries.of(b"0", {}, None) is None and retries.of(b"%d" % (MOST + 4), {}, None) == MOST + 4


def test_long_names_are_not_kept() -> None:
    """A name comes from the agent, and is as long as a request's headers may be."""
    retries = Retries()
    gc.collect()
    tracemalloc.start()
    for number in range(200):
        name = f"{number:05d}" * 10_000
        retries.remember(b"%d" % number, ONE, name, number, "error")
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert memory < 200_000 and retries.of(b"x", ONE, "00007" * 10_000) == 7
