"""Streams with several tool calls, in every order and with every kind of id that engines give: the agent gets complete,
closed calls with ids that are unique in its conversation, and the record says what the agent saw."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.chat.assemble import Assembler
from proxy.dialects.anthropic.dialect import AnthropicDialect
from proxy.dialects.base import ChatRequest, Dialect
from proxy.dialects.gemini.dialect import GeminiDialect
from proxy.dialects.responses.dialect import ResponsesDialect
from tests.examples import examples

Json = dict[str, Any]
#: A call as an agent gets it: id, name, parsed arguments.
Call = tuple[str, str, Any]


@dataclass
class Seen:
    """What an agent that acts on closed items only saw: each item in the order of the stream."""

    calls: list[Call] = field(default_factory=list)
    text: str = ""
    order: list[str] = field(default_factory=list)

    def call(self, call_id: str, name: str, arguments: Any) -> None:
        self.calls.append((call_id, name, arguments))
        self.order.append(name)

    def say(self, text: str) -> None:
        self.text += text
        if text and self.order[-1:] != ["text"]:
            self.order.append("text")


class Client(Protocol):
    """One dialect, as its agents see it."""

    dialect: Dialect

    def request(self, turns: list[list[Call]]) -> ChatRequest:
        """A request whose conversation has these calls, a list per turn, each answered."""
        ...

    def read(self, stream: bytes) -> Seen:
        """Reads a stream as strictly as the dialect's own client: nothing outside of an open item."""
        ...

    def recorded(self, body: Json) -> Seen: ...


def events(stream: bytes, end: str = "\n\n") -> list[Json]:
    blocks = stream.decode().split(end)[:-1]
    return [json.loads(next(line for line in block.split("\n") if line.startswith("data: "))[6:]) for block in blocks]


class Anthropic:
    dialect: Dialect = AnthropicDialect()

    def request(self, turns: list[list[Call]]) -> ChatRequest:
        messages: list[Json] = [{"role": "user", "content": "go"}]
        for calls in turns:
            uses = [{"type": "tool_use", "id": i, "name": n, "input": a} for i, n, a in calls]
            results = [{"type": "tool_result", "tool_use_id": i, "content": "ok"} for i, _, _ in calls]
            messages += [{"role": "assistant", "content": uses}, {"role": "user", "content": results}]
        body = {"model": "m", "max_tokens": 9, "messages": messages, "stream": True}
        return self.dialect.translate(body, {})

    def read(self, stream: bytes) -> Seen:
        seen, block, fed, next_index = Seen(), None, "", 0
        for event in events(stream):
            if event["type"] == "content_block_start":
                assert block is None and event["index"] == next_index
                block, fed = event["content_block"], ""
            elif event["type"] == "content_block_delta":
                assert block is not None and event["index"] == next_index, "outside of its block"
                delta = event["delta"]
                fed += delta.get("partial_json") or delta.get("text") or delta.get("thinking") or ""
            elif event["type"] == "content_block_stop":
                assert block is not None and event["index"] == next_index
                if block["type"] == "tool_use":
                    seen.call(block["id"], block["name"], json.loads(fed or "{}"))
                else:
                    seen.say(fed)
                block, next_index = None, next_index + 1
        assert block is None, "a block is left open"
        return seen

    def recorded(self, body: Json) -> Seen:
        seen = Seen()
        for block in body["content"]:
            if block["type"] == "tool_use":
                seen.call(block["id"], block["name"], block["input"])
            else:
                seen.say(block["text"])
        return seen


class Responses:
    dialect: Dialect = ResponsesDialect()

    def request(self, turns: list[list[Call]]) -> ChatRequest:
        items: list[Json] = [{"role": "user", "content": "go"}]
        for calls in turns:
            items += [
                {"type": "function_call", "call_id": i, "name": n, "arguments": json.dumps(a)} for i, n, a in calls
            ]
            items += [{"type": "function_call_output", "call_id": i, "output": "ok"} for i, _, _ in calls]
        return self.dialect.translate({"model": "m", "input": items, "stream": True}, {})

    def read(self, stream: bytes) -> Seen:
        fed: dict[int, str] = {}
        closed: dict[int, Json] = {}
        for event in events(stream):
            place = event.get("output_index")
            if event["type"] == "response.output_item.added":
                assert place == len(fed)
                fed[place] = ""
            elif event["type"].endswith(".delta"):
                assert place in fed and place not in closed, "outside of its item"
                fed[place] += event["delta"]
            elif event["type"] == "response.output_item.done":
                assert place in fed and place not in closed
                closed[place] = event["item"]
        assert closed.keys() == fed.keys(), "an item is left open"
        for place, item in closed.items():
            result = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            assert result == fed[place]
        return self.recorded({"output": [closed[place] for place in sorted(closed)]})

    def recorded(self, body: Json) -> Seen:
        seen = Seen()
        for item in body["output"]:
            if item["type"] == "function_call":
                seen.call(item["call_id"], item["name"], json.loads(item["arguments"] or "{}"))
            else:
                seen.say(item["content"][0]["text"])
        return seen


class Gemini:
    dialect: Dialect = GeminiDialect("m", streams=True)

    def request(self, turns: list[list[Call]]) -> ChatRequest:
        contents: list[Json] = [{"role": "user", "parts": [{"text": "go"}]}]
        for calls in turns:
            made = [{"functionCall": {"id": i, "name": n, "args": a}} for i, n, a in calls]
            answers = [{"functionResponse": {"id": i, "name": n, "response": {"output": "ok"}}} for i, n, _ in calls]
            contents += [{"role": "model", "parts": made}, {"role": "user", "parts": answers}]
        return self.dialect.translate({"contents": contents}, {})

    def read(self, stream: bytes) -> Seen:
        return self._seen([part for event in events(stream, "\r\n\r\n") for part in _parts(event)])

    def recorded(self, body: Json) -> Seen:
        return self._seen(_parts(body))

    def _seen(self, parts: list[Json]) -> Seen:
        seen = Seen()
        for part in parts:
            if "functionCall" in part:
                call = part["functionCall"]
                seen.call(call["id"], call["name"], call["args"])
            else:
                seen.say(part["text"])
        return seen


def _parts(event: Json) -> list[Json]:
    parts: list[Json] = event["candidates"][0]["content"]["parts"]
    return parts


CLIENTS: list[Client] = [Anthropic(), Responses(), Gemini()]
each_client = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: type(client).__name__)


def answer(client: Client, deltas: list[Json], turns: list[list[Call]] | None = None) -> Seen:
    """One streamed answer, checked against the body that goes to the record."""
    reply = client.dialect.reply(client.request(turns or []))
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    made = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    made.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    # An empty string where there is nothing: after the end, and as role.
    made.append({**head, "choices": [{"index": 0, "delta": {"role": "", "content": ""}, "finish_reason": ""}]})
    chat = Assembler()
    for chunk in made:
        chat.add(chunk)
    out = b"".join(reply.feed(chunk) for chunk in made) + reply.finish()
    seen, body = client.read(out), reply.body(chat.body())
    assert client.recorded(body) == seen, "the record says what the agent saw, in its order"
    assert len({call[0] for call in seen.calls}) == len(seen.calls), "ids are unique"
    for call_id, name, arguments in seen.calls:
        assert call_id and name, arguments
    return seen


def fragments(*calls: Json) -> Json:
    return {"tool_calls": list(calls)}


def opened(name: str, arguments: str = "", **fields: Any) -> Json:
    return {"type": "function", **fields, "function": {"name": name, "arguments": arguments}}


def more(arguments: str, **fields: Any) -> Json:
    return {**fields, "function": {"arguments": arguments}}


F, G = ("f", {"x": 1}), ("g", {"y": [2, "}"]})


ORDERS: dict[str, list[Json]] = {
    "alternating by index": [
        fragments(opened("f", index=0, id="a")), fragments(opened("g", index=1, id="b")),
        fragments(more('{"x":', index=0)), fragments(more('{"y":[2,', index=1)),
        fragments(more("1}", index=0)), fragments(more('"}"]}', index=1)),
    ],
    "alternating in one delta": [
        fragments(opened("f", '{"x"', index=0, id="a"), opened("g", '{"y":[2,', index=1, id="b")),
        fragments(more('"}"]}', index=1), more(":1}", index=0)),
    ],
    "the second call ends first": [
        fragments(opened("f", '{"x":', index=0, id="a")), fragments(opened("g", '{"y":[2,"}"]}', index=1, id="b")),
        fragments(more("1}", index=0)),
    ],
    "index 0 for both, other ids": [
        fragments(opened("f", '{"x":1}', index=0, id="a")), fragments(opened("g", '{"y":[2,', index=0, id="b")),
        fragments(more('"}"]}', index=0)),
    ],
    "index 0 for both, alternating by id": [
        fragments(opened("f", index=0, id="a")), fragments(opened("g", index=0, id="b")),
        fragments(more('{"x":1}', index=0, id="a")), fragments(more('{"y":[2,"}"]}', index=0, id="b")),
    ],
    "index 0 for both, no ids": [
        fragments(opened("f", '{"x":1}', index=0)), fragments(opened("g", '{"y":[2,"}"]}', index=0)),
    ],
    "neither index nor id": [fragments(opened("f", '{"x":1}'), opened("g", '{"y":[2,"}"]}'))],
    "empty ids and names later": [
        fragments(opened("f", '{"x":', index=0, id="a")),
        fragments({"index": 0, "id": "", "type": "", "function": {"name": "", "arguments": "1}"}}),
        fragments(opened("g", '{"y":[2,"}"]}', index=1, id="")),
    ],
    "one id for both": [
        fragments(opened("f", '{"x":1}', index=0, id="0"), opened("g", '{"y":[2,"}"]}', index=1, id="0")),
    ],
    "a new id in each fragment": [
        fragments(opened("f", '{"x":', index=0, id="a")), fragments(more("1}", index=0, id="a2")),
        fragments(opened("g", '{"y":[2,', index=1, id="b")), fragments(more('"}"]}', index=1, id="b2")),
    ],
    "the name after the id": [
        fragments({"index": 0, "id": "a"}), fragments(opened("f", '{"x":1}', index=0)),
        fragments({"index": 1, "id": "b"}), fragments(opened("g", '{"y":[2,"}"]}', index=1)),
    ],
    "a name in pieces": [
        fragments(opened("f", '{"x":1}', index=0, id="a")),
        {"tool_calls": [{"index": 1, "id": "b", "function": {"name": ""}}]},
        fragments(opened("g", '{"y":[2,"}"]}', index=1)),
    ],
    "text between the fragments of one call": [
        fragments(opened("f", '{"x":', index=0, id="a")), {"content": "and "}, fragments(more("1}", index=0)),
        {"content": "then"}, fragments(opened("g", '{"y":[2,"}"]}', index=1, id="b")),
    ],
    "arguments as an object": [
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": {"x": 1}}}]},
        {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "g", "arguments": {"y": [2, "}"]}}}]},
    ],
}  # fmt: skip


@each_client
@pytest.mark.parametrize("order", ORDERS)
def test_each_call_comes_complete_whatever_the_order_and_the_ids(client: Client, order: str) -> None:
    seen = answer(client, ORDERS[order])
    assert [call[1:] for call in seen.calls] == [F, G]
    assert seen.text == ("and then" if "text" in order else "")


@each_client
@pytest.mark.parametrize("given_id", [None, "", "0", "call_1"])
def test_ids_are_unique_over_the_turns_of_a_conversation(client: Client, given_id: str | None) -> None:
    turns: list[list[Call]] = []
    for _ in range(3):
        seen = answer(client, [fragments(opened("f", '{"x":1}', index=0, id=given_id))], turns)
        turns.append(seen.calls)
    ids = [call[0] for calls in turns for call in calls]
    assert len(set(ids)) == 3 and (ids[0] == given_id if given_id else given_id not in ids)


@each_client
def test_an_engines_own_id_comes_back_as_it_was(client: Client) -> None:
    seen = answer(client, ORDERS["alternating by index"])
    assert [call[0] for call in seen.calls] == ["a", "b"]
    chat = client.request([seen.calls]).chat["messages"]
    assert [call["id"] for call in chat[1]["tool_calls"]] == ["a", "b"]


@each_client
def test_calls_of_a_complete_answer_are_distinguished_by_their_place(client: Client) -> None:
    for fields in ({}, {"index": 0}, {"index": 0, "id": ""}):
        calls = [opened("f", '{"x":1}', **fields), opened("f", '{"x":1}', **fields)]
        choice = {"index": 0, "message": {"content": None, **fragments(*calls)}, "finish_reason": "tool_calls"}
        body = client.dialect.reply(client.request([])).body({"id": "c", "model": "m", "choices": [choice]})
        seen = client.recorded(body)
        assert [call[1:] for call in seen.calls] == [F, F] and len({call[0] for call in seen.calls}) == 2


@each_client
def test_a_surrogate_pair_that_two_deltas_share_is_one_character(client: Client) -> None:
    halves = [{"content": "a\ud83d"}, {"content": "\ude00b"}, {"content": "\ud83d"}]
    in_arguments = [fragments(opened("f", '{"x":"\ud83d', index=0, id="a")), fragments(more('\ude00"}', index=0))]
    seen = answer(client, [*halves, *in_arguments])
    assert seen.text == "a😀b\ufffd" and seen.calls[0][2] == {"x": "😀"}


values = st.recursive(
    st.none() | st.integers(-99, 99) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@each_client
@examples(150)
@given(st.data())
def test_any_interleaving_of_any_calls(client: Client, data: st.DataObject) -> None:
    """Each call is cut anywhere; the pieces of different calls, and of text, are mixed in any order."""
    inputs = data.draw(st.lists(st.dictionaries(st.text(max_size=3), values, max_size=3), min_size=1, max_size=4))
    ids = data.draw(st.sampled_from([[None] * 4, [""] * 4, ["x"] * 4, ["a", "b", "c", "d"]]))
    queues: list[list[Json]] = []
    for index, given_input in enumerate(inputs):
        text = json.dumps(given_input)
        cut = data.draw(st.integers(0, len(text)))
        queues.append([
            fragments(opened(f"tool{index}", index=index, **({} if ids[index] is None else {"id": ids[index]}))),
            *(fragments(more(part, index=index)) for part in (text[:cut], text[cut:])),
        ])  # fmt: skip
    queues.append([{"content": "one "}, {"content": "two"}][: data.draw(st.integers(0, 2))])
    deltas: list[Json] = []
    opened_calls = 0
    while any(queues):
        ready = [at for at, queue in enumerate(queues) if queue and (at <= opened_calls or at == len(inputs))]
        at = data.draw(st.sampled_from(ready))
        opened_calls = max(opened_calls, at + 1) if at < len(inputs) else opened_calls
        deltas.append(queues[at].pop(0))
    seen = answer(client, deltas)
    assert sorted((call[1], json.dumps(call[2])) for call in seen.calls) == [
        (f"tool{index}", json.dumps(given_input)) for index, given_input in enumerate(inputs)
    ]
