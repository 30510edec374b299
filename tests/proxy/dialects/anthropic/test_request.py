"""Messages to chat and back, as pure functions: what Claude Code really sent, and conversations that nobody made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.chat.assemble import Assembler, stream_of
from capture.sequences.purpose import purpose
from proxy.dialects.anthropic.blocks import input_of
from proxy.dialects.anthropic.dialect import AnthropicDialect
from proxy.errors import Refusal
from tests.examples import examples

MESSAGES = AnthropicDialect()
#: Requests of Claude Code 2.1.197, recorded against a scripted API: by default, lean, and with an API that fails.
RECORDED: list[dict[str, Any]] = [
    entry
    for entry in json.loads((Path(__file__).parents[1] / "transcripts/claude_code.json").read_text())
    if entry["body"]
]


def chat_of(body: dict[str, Any], earlier: dict[str, Any] | None = None) -> dict[str, Any]:
    return MESSAGES.translate(body, earlier or {}).chat


def recorded(name: str) -> dict[str, Any]:
    return next(recorded["body"] for recorded in RECORDED if recorded["name"] == name)


def test_every_recorded_request_becomes_chat() -> None:
    assert len(RECORDED) >= 9
    for recorded in RECORDED:
        made = MESSAGES.translate(recorded["body"], {})
        chat = made.chat
        assert chat["stream"] is True and chat["stream_options"] == {"include_usage": True} and made.streams
        assert chat["model"] == "my-policy" and chat["max_tokens"] == recorded["body"]["max_tokens"]
        roles = [message["role"] for message in chat["messages"]]
        assert roles[:2] == ["system", "user"] and roles.count("system") == 1
        assert all(isinstance(message["content"], str | None) for message in chat["messages"])
        assert [tool["function"]["name"] for tool in chat.get("tools", ())] == [
            tool["name"] for tool in recorded["body"]["tools"]
        ]
        assert "metadata" in made.dropped


def test_claude_codes_second_call_continues_from_its_first() -> None:
    for first, second in (("claude/004", "claude/005"), ("claude-lean/003", "claude-lean/004")):
        before, after = chat_of(recorded(first)), chat_of(recorded(second))
        assert after["messages"][: len(before["messages"])] == before["messages"]
        assert after["tools"] == before["tools"]
        call, result = after["messages"][len(before["messages"]) :]
        assert call["tool_calls"][0]["function"] == {
            "name": "Bash",
            "arguments": '{"command": "printf 42 > answer.txt"}',
        }
        assert result == {"role": "tool", "tool_call_id": "toolu_mock1", "content": "(Bash completed with no output)"}


def test_claude_codes_title_call_is_distinguished_from_its_work() -> None:
    title, work = chat_of(recorded("claude/003")), chat_of(recorded("claude/004"))
    assert title["response_format"]["json_schema"]["schema"]["required"] == ["title"] and "tools" not in title
    assert (purpose(title, {}), purpose(work, {})) == ("title", "agent")


def test_results_of_claude_codes_tool_search_and_search_results_are_text() -> None:
    search: dict[str, Any] = {
        "type": "search_result", "source": "https://example.com", "title": "Title", "citations": {"enabled": True},
        "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
    }  # fmt: skip
    found = [{"type": "tool_reference", "tool_name": name} for name in ("WebFetch", "WebSearch")]
    uses = [{"type": "tool_use", "id": name, "name": "ToolSearch", "input": {}} for name in "ab"]
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": found},
        {"type": "tool_result", "tool_use_id": "b", "content": [search]},
        search,
    ]
    turns: list[Any] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": uses},
        {"role": "user", "content": results},
    ]
    tools = [{"name": name, "input_schema": {}, "defer_loading": True} for name in ("WebFetch", "WebSearch")]
    made = MESSAGES.translate({"model": "m", "max_tokens": 5, "tools": tools, "messages": turns}, {})
    text = "Title\nhttps://example.com\none\ntwo"
    assert [message["content"] for message in made.chat["messages"][2:]] == ["WebFetch\nWebSearch", text, text]
    assert [tool["function"]["name"] for tool in made.chat["tools"]] == ["WebFetch", "WebSearch"]
    assert set(made.dropped) == {"tools[].defer_loading", "messages[].content[].citations"}
    for wrong in (
        {"type": "tool_reference"}, {**search, "content": "text"}, {**search, "content": [{"type": "image"}]},
    ):  # fmt: skip
        with pytest.raises(Refusal):
            chat_of({"model": "m", "max_tokens": 5, "messages": [*turns, {"role": "user", "content": [wrong]}]})


def test_images_go_behind_the_results_of_their_turn() -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QQ=="}}
    calls = [{"type": "tool_use", "id": name, "name": "look", "input": {}} for name in ("a", "b")]
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": [picture, {"type": "text", "text": "seen"}]},
        {"type": "tool_result", "tool_use_id": "b", "content": "nothing"},
        {"type": "text", "text": "Well?"},
    ]
    body = {
        "model": "m",
        "max_tokens": 5,
        "messages": [
            {"role": "user", "content": [picture, {"type": "text", "text": "Look."}]},
            {"role": "assistant", "content": calls},
            {"role": "user", "content": results},
        ],
    }
    messages = chat_of(body)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "user"]
    address = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}}
    assert messages[0]["content"] == [address, {"type": "text", "text": "Look."}]
    assert messages[4]["content"] == [address, {"type": "text", "text": "Well?"}]
    assert [messages[2]["content"], messages[3]["content"]] == ["seen", "nothing"]


@pytest.mark.parametrize(
    "source",
    [
        {"type": "text", "media_type": "text/plain", "data": "It rains."},
        {"type": "content", "content": "It rains."},
        {"type": "content", "content": [{"type": "text", "text": "It rains."}]},
    ],
)
def test_text_documents_are_text(source: dict[str, Any]) -> None:
    document = {"type": "document", "source": source, "title": "News", "context": "Of today"}
    blocks = [document, {"type": "text", "text": "So?"}]
    (message,) = chat_of({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": blocks}]})["messages"]
    assert message["content"] == "News\nOf today\nIt rains.\nSo?"


def test_thinking_and_effort_reach_the_template() -> None:
    body: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    off = chat_of({**body, "thinking": {"type": "disabled"}, "output_config": {"effort": "low"}})
    assert off["chat_template_kwargs"]["enable_thinking"] is False and off["reasoning_effort"] == "low"
    made = MESSAGES.translate({**body, "thinking": {"type": "enabled", "budget_tokens": 2000}}, {})
    assert made.chat["chat_template_kwargs"]["enable_thinking"] is True and made.dropped == ["thinking.budget_tokens"]
    assert "chat_template_kwargs" not in chat_of({**body, "thinking": {"type": "adaptive"}})


# round trip

texts = st.text(st.characters(codec="utf-8"), max_size=30)
text_values = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(texts, x, max_size=2),
    max_leaves=4,
)
spelling = st.fixed_dictionaries({"indent": st.sampled_from([None, 2]), "ensure_ascii": st.booleans()})


@st.composite
def turns(draw: st.DrawFn) -> dict[str, Any]:
    """A turn as an engine answers it: reasoning, text and calls, whose arguments are spelled as models spell them."""
    message: dict[str, Any] = {"role": "assistant", "content": draw(st.none() | text_values)}
    if (reasoning := draw(st.none() | text_values)) is not None:
        message["reasoning_content"] = reasoning
    calls = []
    for _ in range(draw(st.integers(0, 3))):
        arguments = json.dumps(draw(st.dictionaries(texts, values, max_size=3)), **draw(spelling))
        calls.append({"type": "function", "function": {"name": draw(st.sampled_from("fg")), "arguments": arguments}})
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = draw(text_values)
    return message


@examples(150)
@given(st.lists(turns(), min_size=1, max_size=4), st.data())
def test_a_conversation_that_went_through_both_ways_is_the_same(
    conversation: list[dict[str, Any]], data: st.DataObject
) -> None:
    body: dict[str, Any] = {
        "model": "m", "max_tokens": 5, "stream": True, "messages": [{"role": "user", "content": "go"}],
        "tools": [{"name": name, "input_schema": {"type": "object"}} for name in "fg"],
    }  # fmt: skip
    replay: dict[str, Any] = {}
    expected: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for number, turn in enumerate(conversation):
        for at, call in enumerate(turn.get("tool_calls", ())):
            call["id"] = f"call_{number}_{at}"
        translated = MESSAGES.translate(body, replay)
        assert translated.chat["messages"] == expected
        reply = MESSAGES.reply(translated)
        choice = {"index": 0, "message": turn, "finish_reason": "tool_calls" if turn.get("tool_calls") else "stop"}
        chat: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion", "model": "m", "choices": [choice]}
        whole = json.loads(json.dumps(reply.body(chat)))
        if data.draw(st.booleans()):
            chunks = stream_of(chat, include_usage=True)
            assembler = Assembler()
            for chunk in chunks:
                assembler.add(chunk)
            assert MESSAGES.reply(translated).body(assembler.body())["content"] == whole["content"]
            streamed = MESSAGES.reply(translated)
            assert final_message(b"".join(map(streamed.feed, chunks)) + streamed.finish()) == {
                name: whole[name] for name in ("id", "model", "content", "stop_reason", "stop_sequence", "usage")
            }
        replay |= reply.cache_entries()
        expected.append(turn)
        body["messages"].append({"role": "assistant", "content": whole["content"]})
        back: list[dict[str, Any]] = []
        for call in turn.get("tool_calls", ()):
            result = data.draw(texts)
            back.append({"type": "tool_result", "tool_use_id": call["id"], "content": result})
            expected.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not back:
            back.append({"type": "text", "text": "and?"})
            expected.append({"role": "user", "content": "and?"})
        body["messages"].append({"role": "user", "content": back})


def final_message(events: bytes) -> dict[str, Any]:
    """A message put together from its events, strictly: blocks open, fill and close in order."""
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    still_open: int | None = None
    for event in events.decode().strip().split("\n\n"):
        name, _, data = event.partition("\n")
        result = json.loads(data.removeprefix("data: "))
        assert name == f"event: {result['type']}"
        if result["type"] == "message_start":
            message = result["message"]
        elif result["type"] == "content_block_start":
            assert still_open is None and result["index"] == len(message["content"])
            still_open = result["index"]
            message["content"].append(result["content_block"])
        elif result["type"] == "content_block_delta":
            assert result["index"] == still_open
            delta, block = result["delta"], message["content"][result["index"]]
            if delta["type"] == "input_json_delta":
                inputs[result["index"]] = inputs.get(result["index"], "") + delta["partial_json"]
            else:
                field = delta["type"].removesuffix("_delta")
                block[field] += delta[field]
        elif result["type"] == "content_block_stop":
            assert result["index"] == still_open
            if still_open in inputs:
                message["content"][still_open]["input"] = input_of(inputs[still_open]) or {}
            still_open = None
        elif result["type"] == "message_delta":
            message |= result["delta"]
            message["usage"] = result["usage"]
    assert still_open is None and events.endswith(b'{"type":"message_stop"}\n\n')
    return {name: message[name] for name in ("id", "model", "content", "stop_reason", "stop_sequence", "usage")}


# whatever comes

ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    "",
    "x",
    [],
    {},
    [[]],
    [None],
    [{}],
    {"type": "text"},
    {"type": 5},
    {"text": []},
]
FULL: dict[str, Any] = {
    "model": "m", "max_tokens": 5, "stream": True, "temperature": 1, "stop_sequences": ["x"],
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"},
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "messages": [
        {"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QQ=="}},
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "text", "text": "a"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
        {"role": "system", "content": "now"},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "is_error": True, "content": [{"type": "text", "text": "r"}]}]},
    ],
}  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for name, item in inner for place in places(item, (*path, name)))]


def test_an_unexpected_value_anywhere_is_a_chat_request_or_a_refusal() -> None:
    translated = refused = 0
    for path in places(FULL)[1:]:
        for odd in ODD:
            body = json.loads(json.dumps(FULL))
            at = body
            for name in path[:-1]:
                at = at[name]
            at[path[-1]] = odd
            try:
                made = MESSAGES.translate(body, {})
            except Refusal as refusal:
                assert refusal.status == 400 and refusal.message
                refused += 1
            else:
                json.dumps(made.chat)
                MESSAGES.reply(made).body({"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]})
                translated += 1
    assert translated > 200 and refused > 200


CHUNK: dict[str, Any] = {
    "id": "chatcmpl-1", "model": "m", "usage": {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}},
    "choices": [{
        "index": 0, "finish_reason": "stop", "stop_reason": None,
        "delta": {"content": "a", "reasoning": "b", "tool_calls": [
            {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        "message": {"content": "a", "reasoning": "b", "tool_calls": [
            {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    }],
}  # fmt: skip


def test_an_unexpected_value_anywhere_in_an_answer_breaks_nothing() -> None:
    made = MESSAGES.translate(FULL, {})
    for path in places(CHUNK)[1:]:
        for odd in ODD:
            chunk = json.loads(json.dumps(CHUNK))
            at = chunk
            for name in path[:-1]:
                at = at[name]
            at[path[-1]] = odd
            reply = MESSAGES.reply(made)
            events = reply.feed(chunk) + reply.finish()
            assert final_message(events)["content"] is not None
            body = reply.body(chunk)
            json.dumps(body)
            reply.cache_entries()
