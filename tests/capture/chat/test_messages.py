"""The one rule for the same message, as token-in, coverage and converted rows use it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from capture.chat.messages import MEANING, Message, Relax, canonical_hash, without_reasoning


def call(arguments: Any = '{"n": 1}', call_id: str | None = "call_1", name: str = "run") -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    ]}  # fmt: skip


def message(content: Any, role: str = "assistant", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


SAME = {
    "1 and 1.0": (call('{"n": 1}'), call('{"n": 1.0}')),
    "order of keys": (call('{"a": 1, "b": [2.0]}'), call('{"b":[2],"a":1}')),
    "escapes": (call('{"a": "é"}'), call('{"a": "\\u00e9"}')),
    "an object for a string": (call('{"n": 1}'), call({"n": 1})),
    "no arguments": (call("{}"), call("")),
    "arguments that are null": (call("{}"), call(None)),
    "cut arguments": (call('{"n": '), call(' {"n":')),
    "one part and a string": (message("hello"), message([{"type": "text", "text": "hello"}])),
    "parts and lines": (
        message("a\nb"),
        message([{"type": "text", "text": "a"}, {"type": "output_text", "text": "b"}]),
    ),
    "a part with a cache mark": (
        message("hello", "user"),
        message([{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}], "user"),
    ),
    "developer and system": (message("Be brief.", "developer"), message("Be brief.", "system")),
    "function and tool": (message("3", "function"), message("3", "tool")),
    "null and empty": (message(None), message("")),
    "ends of lines": (message("a  \nb"), message(" a\r\nb\n")),
    "reasoning in a field": (message("4", reasoning_content="2 + 2"), message("4")),
    "reasoning in the text": (message("<think>\n2 + 2\n</think>\n\n4"), message("4")),
    "reasoning that the template opened": (message("2 + 2</think>4"), message("4")),
    "reasoning in a part": (
        message([{"type": "thinking", "thinking": "2"}, {"type": "text", "text": "4"}]),
        message("4"),
    ),
    "tags in capitals": (message("<Think>2 + 2</THINK> 4"), message("4")),
}
MEANING_ONLY = {
    "double spaces": (message("a  b"), message("a b")),
    "indentation": (message("def f():\n    return 1"), message("def f():\n  return 1")),
    "parts joined otherwise": (message([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), message("a b")),
    "differing call ids": (call(call_id="call_1"), call(call_id="toolu_9")),
    "a call without its id": (call(call_id="call_1"), call(call_id=None)),
    "the id of a result": (message("3", "tool", tool_call_id="call_1"), message("3", "tool", tool_call_id="call_2")),
}
OTHER = {
    "an unclosed block is text": (message("<think>2 + 2"), message("")),
    "another unclosed block": (message("<think>2 + 2"), message("<think>3 + 3")),
    "the type of a number": (call('{"n": 1}'), call('{"n": true}')),
    "a number and a text": (call('{"n": 1}'), call('{"n": "1"}')),
    "spaces in an argument": (call('{"n": "a"}'), call('{"n": "a "}')),
    "another big number": (call('{"n": 9007199254740993}'), call('{"n": 9007199254740992}')),
    "another tool": (call(name="run"), call(name="exec")),
    "a call and its words": (call(), message('run {"n": 1}')),
    "a call more": (call(), {**call(), "tool_calls": call()["tool_calls"] * 2}),
    "another role": (message("a", "user"), message("a", "system")),
    "tags of a user": (message("<think>a</think>b", "user"), message("b", "user")),
    "another image": (
        message([{"type": "image_url", "image_url": {"url": "a"}}], "user"),
        message([{"type": "image_url", "image_url": {"url": "b"}}], "user"),
    ),
    "another name": (message("a", "user", name="Ann"), message("a", "user", name="Bob")),
}


def same(pair: tuple[Message, Message], relax: Relax) -> bool:
    return canonical_hash(pair[0], relax) == canonical_hash(pair[1], relax)


@pytest.mark.parametrize("pair", SAME.values(), ids=SAME)
@pytest.mark.parametrize("relax", [Relax.NOTHING, MEANING])
def test_the_same_message_in_another_form(pair: tuple[Message, Message], relax: Relax) -> None:
    assert same(pair, relax)


@pytest.mark.parametrize("pair", MEANING_ONLY.values(), ids=MEANING_ONLY)
def test_the_same_meaning_only(pair: tuple[Message, Message]) -> None:
    assert same(pair, MEANING)
    assert not same(pair, Relax.NOTHING)


@pytest.mark.parametrize("pair", OTHER.values(), ids=OTHER)
@pytest.mark.parametrize("relax", [Relax.NOTHING, MEANING])
def test_another_message(pair: tuple[Message, Message], relax: Relax) -> None:
    assert not same(pair, relax)


@pytest.mark.parametrize(
    "message",
    [
        {},
        message(3),
        message({"a": "\ud800"}),
        message([{"type": ["image"], "text": 3}, 3, None]),
        {"role": "assistant", "tool_calls": "run"},
        {
            "role": "assistant",
            "tool_calls": [None, 3, {"function": "x"}, {"function": {"name": ["a"], "arguments": 3}}],
        },
        message("a", "tool", tool_call_id=["x"], name={"a": 1}),
        call("[" * 5000 + "]" * 5000),
        call("[" * 800 + "1.0" + "]" * 800),
    ],
)
def test_unexpected_messages_have_a_hash(message: Message) -> None:
    assert same((message, message), Relax.NOTHING)
    assert same((message, message), MEANING)


@pytest.mark.parametrize("text", ["<think>" * 60_000, "<think></reasoning>" * 40_000, "</think><thinking>" * 40_000])
def test_reasoning_is_found_in_linear_time(text: str) -> None:
    began = time.process_time()
    without_reasoning(text)
    small = time.process_time() - began
    began = time.process_time()
    without_reasoning(text * 4)
    assert time.process_time() - began < 16 * small + 0.1


def test_an_unclosed_block_of_a_cut_out_goes_where_that_is_asked() -> None:
    assert without_reasoning("a <think>b", unclosed=True).split() == ["a"]
    assert without_reasoning("a <think>b") == "a <think>b"
