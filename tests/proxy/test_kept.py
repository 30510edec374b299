"""What a session keeps of its earlier answers is bounded, in number and in size; the latest stay."""

from __future__ import annotations

from proxy.kept import Kept


def test_the_oldest_go_where_there_are_too_many() -> None:
    kept = Kept(most=2)
    for name in "abc":
        kept.keep({name: name})
    assert [kept.get(name) for name in "abc"] == [None, "b", "c"]


def test_the_oldest_go_where_they_are_too_large() -> None:
    kept = Kept(largest=10)
    kept.keep({"a": "12345", "b": b"12345"})
    kept.keep({"a": "1"})  # less than before, and the latest now
    kept.keep({"c": "12345"})
    assert [kept.get(name) for name in "abc"] == ["1", None, "12345"]
    kept.keep({"d": "1" * 11})
    assert [kept.get(name) for name in "abcd"] == [None] * 4
