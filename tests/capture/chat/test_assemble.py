"""Chunks to a body and back: what a stream says is what the completed answer says."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.chat.assemble import Assembler, stream_of, without_ids
from capture.chat.surrogates import SurrogateJoiner
from capture.chat.tool_calls import ToolCalls
from capture.engines import engine
from capture.engines.reader import Reader
from capture.engines.request import CaptureOptions
from capture.engines.wires import CHAT
from capture.sse import EventDecoder
from tests.examples import examples


def assemble(*deltas: dict[str, Any], **choice: Any) -> dict[str, Any]:
    made = Assembler()
    for delta in deltas:
        made.add({"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, **choice}]})
    message: dict[str, Any] = made.body()["choices"][0]["message"]
    return message


def tool(**fields: Any) -> dict[str, Any]:
    return {"tool_calls": [fields]}


def test_a_tool_call_without_index_opens_by_id_and_continues_without() -> None:
    message = assemble(
        tool(id="a", function={"name": "f", "arguments": '{"x'}),
        tool(function={"arguments": '": 1}'}),
        tool(id="b", function={"name": "g", "arguments": "{}"}),
    )
    assert [(t["id"], t["function"]) for t in message["tool_calls"]] == [
        ("a", {"name": "f", "arguments": '{"x": 1}'}),
        ("b", {"name": "g", "arguments": "{}"}),
    ]


def test_interleaved_fragments_are_merged_by_index() -> None:
    message = assemble(
        tool(index=0, id="a", function={"name": "f", "arguments": ""}),
        tool(index=1, id="b", function={"name": "g", "arguments": ""}),
        tool(index=0, function={"arguments": "1"}),
        tool(index=1, function={"arguments": "2"}),
        tool(index=0, function={"arguments": "3"}),
    )
    assert [t["function"]["arguments"] for t in message["tool_calls"]] == ["13", "2"]


def test_calls_that_all_come_as_index_0_are_separated_by_id_and_name() -> None:
    """Some hosted APIs; their fragments without an id continue the last one."""
    message = assemble(
        tool(index=0, id="a", function={"name": "f", "arguments": "{}"}),
        tool(index=0, id="b", function={"name": "g", "arguments": "{"}),
        tool(index=0, function={"arguments": "}"}),
    )
    assert [(t["id"], t["function"]) for t in message["tool_calls"]] == [
        ("a", {"name": "f", "arguments": "{}"}),
        ("b", {"name": "g", "arguments": "{}"}),
    ]


def test_a_new_id_in_every_fragment_is_still_one_call() -> None:
    """vLLM before 0.7."""
    message = assemble(
        tool(index=0, id="a", function={"name": "f", "arguments": "{"}),
        tool(index=0, id="b", function={"arguments": "}"}),
    )
    assert [t["function"] for t in message["tool_calls"]] == [{"name": "f", "arguments": "{}"}]


def test_lists_that_arrive_in_pieces_are_joined() -> None:
    message = assemble({"reasoning_details": [1]}, {"reasoning_details": [2]}, {"content": "a"})
    assert message["reasoning_details"] == [1, 2] and message["content"] == "a"


def test_a_name_that_every_fragment_repeats_is_one_name() -> None:
    message = assemble(
        tool(index=0, id="a", function={"name": "write", "arguments": "{"}),
        tool(index=0, function={"name": "write", "arguments": "}"}),
    )
    assert message["tool_calls"][0]["function"] == {"name": "write", "arguments": "{}"}


def test_reasoning_stays_under_the_name_it_came_by() -> None:
    message = assemble({"reasoning_content": "a"}, {"reasoning_content": "b"}, {"reasoning": "c"}, {"content": "d"})
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("ab", "c", "d")


def test_a_refusal_and_a_legacy_function_call_stay_in_the_message() -> None:
    message = assemble(
        {"refusal": "no"}, {"function_call": {"name": "f", "arguments": "{"}}, {"function_call": {"arguments": "}"}}
    )
    assert message["refusal"] == "no" and message["function_call"] == {"name": "f", "arguments": "{}"}


def test_a_finish_reason_in_the_last_but_one_chunk_and_a_usage_only_chunk() -> None:
    made = Assembler()
    made.add({"id": "x", "object": "chat.completion.chunk", "choices": []})
    made.add({"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop", "stop_reason": 2}]})
    made.add({"choices": [], "usage": {"completion_tokens": 1}})
    body = made.body()
    assert body["choices"][0]["finish_reason"] == "stop" and body["choices"][0]["stop_reason"] == 2
    assert body["usage"] == {"completion_tokens": 1} and body["object"] == "chat.completion"


def test_an_error_in_the_stream_is_beside_what_had_come() -> None:
    for error in ({"error": {"message": "boom"}}, {"object": "error", "message": "boom"}):
        made = Assembler()
        made.add({"choices": [{"index": 0, "delta": {"content": "a"}}]})
        made.fail(error)
        body = made.body()
        assert body["error"]["message"] == "boom" and body["choices"][0]["message"]["content"] == "a"


def test_no_ids_are_left_in_a_body_wherever_they_stand() -> None:
    nested = {"token_ids": [7], "kept": 1}
    choice = {"index": 0, "delta": {"content": "a"}, "response_token_ids": [7], "raw_output": nested,
              "provider_specific_fields": nested}  # fmt: skip
    made = Assembler()
    made.add({"choices": [choice], "prompt_token_ids": [7], "sglext": {"input_ids": [7]}})
    whole = {"choices": [{**choice, "message": nested}], "sglext": {"input_ids": [7], "other": 2}}
    for body in (made.body(), without_ids(whole)):
        assert "[7]" not in json.dumps(body)
        assert body["choices"][0]["raw_output"] == {"kept": 1}
    assert without_ids(whole)["sglext"] == {"other": 2} and whole["sglext"] == {"input_ids": [7], "other": 2}


def test_no_ids_are_left_of_a_stream_that_has_them_beside_its_choices() -> None:
    made = Assembler()
    made.add({"provider_specific_fields": {"prompt_token_ids": [1], "kept": 2}, "choices": []})
    assert made.body()["provider_specific_fields"] == {"kept": 2}


def test_ids_that_an_agent_asked_for_go_along_when_a_whole_answer_is_streamed() -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "a"}, "token_ids": [7], "finish_reason": "stop",
              "stop_reason": 2, "logprobs": {"content": [{"token": "a", "logprob": -1}]}}  # fmt: skip
    chunks = stream_of({"choices": [choice], "prompt_token_ids": [1]})
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[1], None, None]
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [part.get("token_ids") for part in parts] == [None, [7], None]
    assert [part["logprobs"] for part in parts] == [None, choice["logprobs"], None]
    assert parts[-1]["finish_reason"] == "stop" and parts[-1]["stop_reason"] == 2


def test_an_error_that_came_whole_is_streamed_as_one_event() -> None:
    assert stream_of({"error": {"message": "x"}}) == [{"error": {"message": "x"}}]


def test_a_completion_is_streamed_as_text() -> None:
    body = {"object": "text_completion", "choices": [{"index": 0, "text": "ab", "finish_reason": "length"}]}
    made = Assembler()
    for chunk in stream_of(body):
        made.add(chunk)
    assert made.body()["choices"] == [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length"}]


def test_hostile_chunks_do_not_raise() -> None:
    made = Assembler()
    for chunk in (
        {"choices": None}, {"choices": "x"}, {"choices": [None, 3, {"index": "a", "delta": []}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": [None, {"function": 3}, {"index": "x"}]}}]},
        {"choices": [{"delta": {"content": 7, "tool_calls": "no"}}]},
    ):  # fmt: skip
        made.add(chunk)  # type: ignore[arg-type]
    assert made.body()["choices"]


TEXT = st.text(max_size=12)
TOOL = st.builds(
    lambda n, a: {"id": n, "type": "function", "function": {"name": "f" + n, "arguments": a}},
    st.text("abc", min_size=1, max_size=3),
    TEXT,
)
MESSAGE = st.builds(
    lambda content, reasoning, tools: {
        "role": "assistant",
        "content": (content or None) if tools else content,
        **({"reasoning_content": reasoning} if reasoning else {}),
        **({"tool_calls": tools} if tools else {}),
    },
    TEXT,
    TEXT,
    st.lists(TOOL, max_size=3),
)


@examples(200)
@given(messages=st.lists(MESSAGE, min_size=1, max_size=3), cuts=st.lists(st.integers(1, 90), min_size=1, max_size=30))
def test_a_body_streamed_cut_anywhere_and_assembled_is_the_body(
    messages: list[dict[str, Any]], cuts: list[int]
) -> None:
    """Through the wire as the proxy has it: chunks, bytes, pieces of any size, decoder, reader, assembler."""
    body = {
        "id": "x", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [
            {"index": n, "message": message, "logprobs": None, "finish_reason": "stop"}
            for n, message in enumerate(messages)
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    }  # fmt: skip
    chunks = stream_of(body, include_usage=True)
    data = b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
    request = {"stream": True, "n": len(messages)}
    vllm = engine("vllm")
    reader = Reader(vllm, CHAT, request, vllm.ask(CHAT, request, CaptureOptions()))
    decoder = EventDecoder()
    position = turn = 0
    while position < len(data):
        size = cuts[turn % len(cuts)]
        for event in decoder.feed(data[position : position + size]):
            if event.data and event.data != b"[DONE]":
                reader.event(event.data)
        position += size
        turn += 1
    assert reader.finished
    assert reader.assembled() == body


def calls_of(*fragments: Any) -> list[tuple[Any, Any, Any]]:
    """Id, name and arguments of the calls that these deltas' `tool_calls` make."""
    message = assemble(
        *({"tool_calls": fragment if isinstance(fragment, list) else [fragment]} for fragment in fragments)
    )
    return [(c["id"], c["function"].get("name"), c["function"]["arguments"]) for c in message["tool_calls"]]


def fragment(name: str | None = None, arguments: str | None = None, **fields: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {**fields, "function": {key: value for key, value in function.items() if value is not None}}


@pytest.mark.parametrize("empty", ["", None])
def test_an_empty_value_replaces_nothing_that_came_before(empty: str | None) -> None:
    made = Assembler()
    call = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}
    more = {"index": 0, "id": empty, "type": empty, "function": {"name": empty, "arguments": "}"}}
    for delta, finish in (
        ({"role": "assistant", "tool_calls": [call]}, empty),
        ({"role": empty, "tool_calls": [more]}, "tool_calls"),
        ({"role": empty, "content": empty}, empty),
    ):
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "stop_reason": "x" if finish else empty}
        made.add({"id": "c" if finish else empty, "model": "m" if finish else empty, "choices": [choice], "usage": {}})
    body = made.body()
    choice = body["choices"][0]
    assert (body["id"], body["model"], choice["finish_reason"], choice["stop_reason"]) == ("c", "m", "tool_calls", "x")
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }


def test_calls_without_ids_under_one_index_are_separated_by_name_and_by_whole_arguments() -> None:
    for missing in ({}, {"id": None}, {"id": ""}):
        assert [call[1:] for call in calls_of(
            fragment("f", '{"a":', index=0, **missing), fragment(None, "1}", index=0, **missing),
            fragment("g", "", index=0, **missing), fragment(None, "{}", index=0, **missing),
            fragment("g", '{"b": 2}', index=0, **missing),
        )] == [("f", '{"a":1}'), ("g", "{}"), ("g", '{"b": 2}')]  # fmt: skip


def test_calls_of_one_delta_without_index_and_id_are_calls_of_their_own() -> None:
    assert [call[1:] for call in calls_of([fragment("f", ""), fragment("f", ""), fragment("g", "{}")])] == [
        ("f", ""), ("f", ""), ("g", "{}"),
    ]  # fmt: skip


def test_fragments_that_alternate_under_one_index_go_to_the_call_of_their_id() -> None:
    assert calls_of(
        fragment("f", "", index=0, id="a"), fragment("g", "", index=0, id="b"),
        fragment(None, "{1", index=0, id="a"), fragment(None, "{2", index=0, id="b"),
        fragment(None, "}", index=0, id="a"), fragment(None, "}", index=0, id="b"),
    ) == [("a", "f", "{1}"), ("b", "g", "{2}")]  # fmt: skip


def test_the_same_id_under_two_indexes_is_two_calls() -> None:
    assert calls_of(fragment("f", "{}", index=0, id="0"), fragment("g", "{}", index=1, id="0")) == [
        ("0", "f", "{}"),
        ("0", "g", "{}"),
    ]


def test_an_id_that_comes_late_belongs_to_the_open_call() -> None:
    assert calls_of(fragment("f", "{", index=0), fragment(None, "}", index=0, id="a")) == [("a", "f", "{}")]


def test_a_surrogate_pair_that_two_deltas_share_is_one_character() -> None:
    made = Assembler()
    for half in ("\ud83d", "\ude00"):
        delta = {"content": half, "reasoning": half, **tool(index=0, id="a", function={"name": "f", "arguments": half})}
        made.add({"choices": [{"index": 0, "delta": delta}]})
    message = made.body()["choices"][0]["message"]
    assert message["content"] == message["reasoning"] == message["tool_calls"][0]["function"]["arguments"] == "😀"
    text = Assembler()
    for half in ("\ud83d", "\ude00", "\ud83d"):
        text.add({"object": "text_completion", "choices": [{"index": 0, "text": half}]})
    assert text.body()["choices"][0]["text"] == "😀\ud83d", "a lone half is what the engine sent"


@given(st.text(max_size=20), st.integers(1, 6))
def test_surrogates_are_joined_wherever_a_text_is_cut(text: str, size: int) -> None:
    units = [chr(unit) for unit in memoryview(text.encode("utf-16-le", "surrogatepass")).cast("H")]
    joiner = SurrogateJoiner()
    pieces = [joiner.feed("".join(units[at : at + size])) for at in range(0, len(units), size)]
    assert "".join(pieces) + joiner.flush() == text


@given(st.recursive(st.none() | st.text(max_size=8), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_the_end_of_arguments_is_found_wherever_they_are_cut(value: Any) -> None:
    text = json.dumps({"a": value})
    for size in (1, 2, 3, len(text)):
        calls = ToolCalls()
        for at in range(0, len(text), size):
            [(call, _)] = calls.add([fragment("f" if at == 0 else None, text[at : at + size], index=0)])
            assert call.is_whole() == (at + size >= len(text))


def test_calls_of_a_completed_answer_stream_by_their_place() -> None:
    """Some engines leave out index and id there, or give every call the same."""
    for fields in ({}, {"index": None}, {"index": 0, "id": ""}):
        calls = [fragment("f", "{}", **fields), fragment("f", "{}", **fields)]
        choice = {"index": 0, "message": {"role": "assistant", "tool_calls": calls}, "finish_reason": "tool_calls"}
        made = Assembler()
        for chunk in stream_of({"object": "chat.completion", "choices": [choice]}):
            made.add(chunk)
        assert len(made.body()["choices"][0]["message"]["tool_calls"]) == 2
