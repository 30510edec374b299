"""Responses to chat to responses and back: every call, argument string, id and text returns, in order."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from capture.chat.assemble import Assembler, stream_of
from proxy.dialects.responses.dialect import ResponsesDialect
from tests.examples import examples

RESPONSES = ResponsesDialect()
RUN = {"type": "function", "name": "run", "parameters": {"type": "object"}}
PATCH = {"type": "custom", "name": "apply_patch"}
TOOLS = [RUN, PATCH, {"type": "namespace", "name": "agents", "description": "", "tools": [RUN, PATCH]}]

texts = st.text(st.characters(codec="utf-8"), max_size=30)
text_values = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts, lambda x: st.lists(x, max_size=3), max_leaves=4
)
spelling = st.fixed_dictionaries({"indent": st.sampled_from([None, 2]), "ensure_ascii": st.booleans()})


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """A call as an engine answers it; its arguments spelled as models spell them, or broken."""
    name = draw(st.sampled_from(["run", "apply_patch", "agents__run", "agents__apply_patch", "unheard_of"]))
    value = {"input": draw(texts)} if "patch" in name else draw(st.dictionaries(texts, values, max_size=3))
    arguments = json.dumps(value, **draw(spelling))
    if draw(st.integers(0, 9)) == 0:
        arguments = arguments[: draw(st.integers(1, len(arguments)))]
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@st.composite
def turns(draw: st.DrawFn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": draw(st.none() | text_values)}
    reasoning = draw(st.none() | text_values)
    if reasoning is not None:
        message["reasoning"] = message["reasoning_content"] = reasoning
    made = draw(st.lists(calls(), max_size=3))
    if made:
        message["tool_calls"] = made
    elif message["content"] is None:
        message["content"] = ""  # only its end
    return message


def asked(items: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    include = ["reasoning.encrypted_content"]
    return {"model": "m", "input": items, "tools": TOOLS, "include": include, "store": False, **more}


@examples(60)
@given(st.lists(turns(), min_size=1, max_size=4), st.data())
def test_a_conversation_that_went_through_both_ways_is_the_same(
    conversation: list[dict[str, Any]], data: st.DataObject
) -> None:
    items: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    entries: dict[str, Any] = {}
    summary = data.draw(st.sampled_from([None, "auto"]))
    expected: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for number, turn in enumerate(conversation):
        for at, call in enumerate(turn.get("tool_calls", ())):
            call["id"] = f"call_{number}_{at}"
        translated = RESPONSES.translate(asked(items, reasoning={"summary": summary}), entries)
        assert translated.chat["messages"] == expected
        reply = RESPONSES.reply(translated)
        finish = "tool_calls" if turn.get("tool_calls") else "stop"
        message = {name: value for name, value in turn.items() if name != "reasoning_content"}
        choice = {"index": 0, "message": message, "finish_reason": finish}
        chat: dict[str, Any] = {"id": "x", "object": "chat.completion", "choices": [choice]}
        if data.draw(st.booleans()):
            chat = pieces_through(reply, chat, data)
        body = json.loads(json.dumps(reply.body(chat)))
        entries |= reply.cache_entries()
        expected.append(turn)
        add(items, expected, body["output"], turn, data.draw(st.booleans()))
        if data.draw(st.booleans()):
            items.append({"role": "user", "content": "and"})
            expected.append({"role": "user", "content": "and"})


def pieces_through(reply: Any, chat: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    """Streams an answer through, its arguments in pieces; the assembled body is the answer again."""
    assembler = Assembler()
    for chunk in stream_of(chat):
        for part in cut(chunk, data):
            assembler.add(part)
            reply.feed(part)
    return assembler.body()


def cut(chunk: dict[str, Any], data: st.DataObject) -> list[dict[str, Any]]:
    delta = chunk["choices"][0]["delta"]
    if "tool_calls" not in delta:
        return [chunk]
    parts = []
    for call in delta["tool_calls"]:
        arguments = call["function"]["arguments"]
        at = data.draw(st.integers(0, len(arguments)))
        first = {**call, "function": {**call["function"], "arguments": arguments[:at]}}
        rest = {"index": call["index"], "function": {"arguments": arguments[at:]}}
        parts += [first, rest]
    return [{**chunk, "choices": [{**chunk["choices"][0], "delta": {"tool_calls": [part]}}]} for part in parts]


def add(
    items: list[dict[str, Any]],
    expected: list[dict[str, Any]],
    output: list[dict[str, Any]],
    turn: dict[str, Any],
    between: bool,
) -> None:
    """The agent's history: outputs after all calls of an answer, or each right after its call."""
    outputs = []
    for item in output:
        items.append(item)
        if item["type"] in ("function_call", "custom_tool_call"):
            done = {"type": item["type"] + "_output", "call_id": item["call_id"], "output": f"did {item['call_id']}"}
            if between:
                items.append(done)
            else:
                outputs.append(done)
    items += outputs
    expected += [
        {"role": "tool", "tool_call_id": call["id"], "content": f"did {call['id']}"}
        for call in turn.get("tool_calls", ())
    ]
