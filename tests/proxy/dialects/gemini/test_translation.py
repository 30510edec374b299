"""Gemini requests as chat requests, chat answers as Gemini's; pure."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from google.genai import types
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParams
from pydantic import TypeAdapter

from capture.chat.assemble import stream_of
from proxy.dialects.base import ChatRequest, ReplyTranslator
from proxy.dialects.gemini.dialect import GeminiDialect
from proxy.errors import Refusal
from tests.examples import examples
from tests.proxy.dialects.responses.test_round_trip import turns

CHAT: TypeAdapter[Any] = TypeAdapter(CompletionCreateParams)
RECORDED = Path(__file__).parents[1] / "transcripts/gemini"
GEMINI = GeminiDialect("my-policy", streams=True)
HI = [{"role": "user", "parts": [{"text": "hi"}]}]
RUN = {"functionDeclarations": [{"name": "run", "description": "Runs.", "parametersJsonSchema": {"type": "object"}}]}


def translated(earlier: dict[str, Any] | None = None, **body: Any) -> ChatRequest:
    made = GEMINI.translate({"contents": HI, **body}, earlier or {})
    CHAT.validate_python(made.chat)
    return made


def fields(**body: Any) -> dict[str, Any]:
    made = translated(**body)
    usual = ("model", "messages", "stream", "stream_options")
    return {name: value for name, value in made.chat.items() if name not in usual}


def replying(**body: Any) -> ReplyTranslator:
    return GEMINI.reply(translated(**body))


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each checked against Google's own model of it."""
    events = []
    for block in data.decode().split("\r\n\r\n")[:-1]:
        event = json.loads(block.removeprefix("data: "))
        if "error" not in event:
            types.GenerateContentResponse.model_validate(event)
        events.append(event)
    return events


def test_the_path_says_which_model_and_whether_it_streams() -> None:
    for path, query, streams in (
        ("/v1beta/models/org/m:streamGenerateContent", b"alt=sse", True),
        ("/v1/models/org/m:generateContent", b"", False),
    ):
        called = GeminiDialect().for_call(path, query)
        assert (called.model, called.streams) == ("org/m", streams)
    for path, query, status in (
        ("/v1beta/models/m:countTokens", b"", 404),
        ("/v1beta/models/m", b"", 404),
        ("/v1beta/models/m:streamGenerateContent", b"", 400),
    ):
        with pytest.raises(Refusal) as refused:
            GeminiDialect().for_call(path, query)
        assert refused.value.status == status


@pytest.mark.parametrize("name", [path.stem for path in sorted(RECORDED.iterdir())])
def test_what_gemini_cli_sends_is_a_chat_request(name: str) -> None:
    body = json.loads((RECORDED / f"{name}.json").read_text())
    made = GEMINI.translate(body, {})
    CHAT.validate_python(made.chat)
    roles = [message["role"] for message in made.chat["messages"]]
    assert roles == ["system", "user"] + (["assistant", "tool"] if name == "after-a-call" else [])
    assert len(made.chat["tools"]) == len(body["tools"][0]["functionDeclarations"])
    assert (made.chat["temperature"], made.chat["top_p"], made.chat["top_k"]) == (1, 0.95, 64)
    assert made.dropped == []


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({"generationConfig": {"maxOutputTokens": 5, "stopSequences": ["x"], "seed": 1, "candidateCount": 1}},
         {"max_tokens": 5, "stop": ["x"], "seed": 1}),
        ({"generationConfig": {"responseMimeType": "application/json"}}, {"response_format": {"type": "json_object"}}),
        ({"generationConfig": {"responseMimeType": "application/json", "responseSchema": {
            "type": "OBJECT", "properties": {"a": {"type": "STRING", "nullable": True}, "type": {"type": "ARRAY",
            "items": {"type": "INTEGER"}, "minItems": "1"}}, "propertyOrdering": ["a"]}}},
         {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": {
             "type": "object", "properties": {"a": {"type": ["string", "null"]}, "type": {
                 "type": "array", "items": {"type": "integer"}, "minItems": 1}}}}}}),
        ({"generationConfig": {"thinkingConfig": {"thinkingLevel": "HIGH"}}}, {"reasoning_effort": "high"}),
        ({"generationConfig": {"thinkingConfig": {"thinkingBudget": 0}}}, {"reasoning_effort": "none"}),
        ({"generationConfig": {"thinkingConfig": {"thinkingBudget": -1}}}, {}),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, {}),
    ],
)  # fmt: skip
def test_fields_that_are_kept(body: dict[str, Any], chat: dict[str, Any]) -> None:
    assert fields(**body) == chat


def test_tools_and_their_choice() -> None:
    other = {"functionDeclarations": [{"name": "b", "parameters": {"type": "OBJECT", "properties": {}}}]}
    config = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["b"]}}
    made = translated(tools=[RUN, other, {"googleSearch": {}}], toolConfig=config, safetySettings=[{"x": 1}])
    function = {"name": "b", "parameters": {"type": "object", "properties": {}}}
    assert made.chat["tools"] == [{"type": "function", "function": function}]
    assert made.chat["tool_choice"] == "required"
    assert made.dropped == ["safetySettings", "tools[2].googleSearch"]


REFUSED: dict[str, dict[str, Any]] = {
    "cachedContent": {"cachedContent": "x"},
    "contents": {"contents": []},
    "contents[0].parts": {"contents": ["hi"]},
    "contents[0].role": {"contents": [{"role": "system", "parts": []}]},
    "contents[0].parts[0]": {"contents": [{"parts": [{"fileData": {"fileUri": "x"}}]}]},
    "contents[0].parts[0].inlineData": {"contents": [{"parts": [{"inlineData": {"mimeType": "video/x", "data": ""}}]}]},
    "contents[0].parts[0].functionResponse": {"contents": [{"parts": [{"functionResponse": {"name": "run"}}]}]},
    "contents[0].parts[0].thoughtSignature": {
        "contents": [{"role": "model", "parts": [{"text": "x", "thoughtSignature": "AAAA"}]}]
    },
    "generationConfig.candidateCount": {"generationConfig": {"candidateCount": 2}},
    "generationConfig.responseModalities": {"generationConfig": {"responseModalities": ["IMAGE"]}},
    "generationConfig.speechConfig": {"generationConfig": {"speechConfig": {}}},
    "generationConfig.responseMimeType": {"generationConfig": {"responseMimeType": "text/x.enum"}},
    "generationConfig": {"generationConfig": 5},
    "tools": {"tools": {}},
    "tools[0].functionDeclarations[0].name": {"tools": [{"functionDeclarations": [{}]}]},
    "toolConfig.functionCallingConfig.mode": {
        "tools": [RUN], "toolConfig": {"functionCallingConfig": {"mode": "SOMETIMES"}}
    },
    "fieldOf2030": {"fieldOf2030": 1},
}  # fmt: skip


@pytest.mark.parametrize("field", REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(field: str) -> None:
    with pytest.raises(Refusal) as refused:
        translated(**REFUSED[field])
    assert refused.value.message.startswith(f"`{field}`")
    status, body = GEMINI.error(refused.value.status, refused.value.message)
    assert (status, json.loads(body)["error"]["status"]) == (400, "INVALID_ARGUMENT")


def test_names_with_underscores_are_the_same_names() -> None:
    schema = {"type": "OBJECT", "properties": {"a_b": {"type": "STRING", "max_length": "3"}}}
    made = translated(
        system_instruction={"parts": [{"text": "be brief"}]},
        contents=[{"parts": [{"inline_data": {"mime_type": "image/png", "data": "eA=="}}]}],
        tools=[{"function_declarations": [{"name": "run_it", "parameters": schema}]}],
        generation_config={"max_output_tokens": 3},
    )
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}
    assert made.chat["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": [image]}]
    parameters = {"type": "object", "properties": {"a_b": {"type": "string", "maxLength": 3}}}
    assert made.chat["tools"] == [{"type": "function", "function": {"name": "run_it", "parameters": parameters}}]
    assert made.chat["max_tokens"] == 3
    args = {"some_name": {"other_name": 1}}
    history = [*HI, {"role": "model", "parts": [{"function_call": {"name": "run", "args": args}}]}]
    written = translated(contents=history).chat["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(written) == args


def test_a_stream() -> None:
    reply = replying(generationConfig={"thinkingConfig": {"includeThoughts": True}})
    call = {"id": "c", "type": "function", "function": {"name": "run", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "reasoning": "hm", "content": "I run", "tool_calls": [call]}
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    chat = {
        "model": "served",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": usage,
    }
    events = events_of(b"".join(reply.feed(chunk) for chunk in stream_of(chat, include_usage=True)) + reply.finish())
    parts = [part for event in events for part in event["candidates"][0]["content"]["parts"]]
    assert parts[0] == {"text": "hm", "thought": True}
    assert parts[1].pop("thoughtSignature") and parts[1] == {"text": "I run"}
    assert parts[2:] == [{"functionCall": {"id": "c", "name": "run", "args": {"a": 1}}}]
    assert events[-1]["candidates"][0]["finishReason"] == "STOP"
    counts = {"promptTokenCount": 7, "candidatesTokenCount": 5, "totalTokenCount": 12}
    assert events[-1]["usageMetadata"] == counts and events[-1]["modelVersion"] == "served"
    whole = reply.body(chat)
    types.GenerateContentResponse.model_validate(whole)
    assert whole["responseId"] == events[0]["responseId"] and whole["usageMetadata"] == counts
    assert [set(part) - {"thoughtSignature"} for part in whole["candidates"][0]["content"]["parts"]] == [
        {"text", "thought"}, {"text"}, {"functionCall"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("finish", "arguments", "reason"),
    [("length", '{"a', "MAX_TOKENS"), ("tool_calls", '{"a', "MALFORMED_FUNCTION_CALL"), ("stop", "", "STOP")],
)
def test_arguments_that_are_not_an_object_are_not_a_call(finish: str, arguments: str, reason: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "run", "arguments": arguments}}
    chat = {"choices": [{"index": 0, "message": {"tool_calls": [call]}, "finish_reason": finish}]}
    candidate = replying().body(chat)["candidates"][0]
    assert candidate["finishReason"] == reason
    assert ("functionCall" in candidate["content"]["parts"][0]) is (reason == "STOP")
    assert (candidate.get("finishMessage") or arguments).endswith(f"{arguments})" if "MAL" in reason else arguments)


def test_a_failure_and_a_ping() -> None:
    reply = replying()
    ping, failed = events_of(reply.ping() + reply.error_event(503, "busy"))
    assert "candidates" not in ping
    assert failed == {"error": {"code": 503, "message": "busy", "status": "UNAVAILABLE"}}
    assert GEMINI.error(500, "x", {"error": {"message": "image input is not supported"}})[0] == 400


@examples(40)
@given(st.lists(turns(), min_size=1, max_size=4), st.booleans())
def test_a_conversation_that_went_through_both_ways_is_the_same(
    conversation: list[dict[str, Any]], thoughts: bool
) -> None:
    contents: list[dict[str, Any]] = list(HI)
    expected: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    replay: dict[str, Any] = {}
    config = {"thinkingConfig": {"includeThoughts": thoughts}}
    for number, turn in enumerate(conversation):
        calls = [call for call in turn.pop("tool_calls", ()) if is_object(call["function"]["arguments"])]
        for at, call in enumerate(calls):
            call["id"] = f"call_{number}_{at}"
        turn |= {"tool_calls": calls} if calls else {}
        if not calls and turn["content"] is None:
            turn["content"] = ""
        made = translated(replay, contents=contents, generationConfig=config)
        assert made.chat["messages"] == expected
        reply = GEMINI.reply(made)
        message = {name: value for name, value in turn.items() if name != "reasoning_content"}
        chat = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        body = json.loads(json.dumps(reply.body(chat)))
        replay |= reply.cache_entries()
        contents.append(body["candidates"][0]["content"])
        expected.append(turn)
        answers = []
        for call in calls:
            name = call["function"]["name"]
            answers.append({"functionResponse": {"id": call["id"], "name": name, "response": {"output": "did"}}})
            expected.append({"role": "tool", "tool_call_id": call["id"], "content": "did"})
        contents.append({"role": "user", "parts": [*answers, {"text": "go on"}]})
        expected.append({"role": "user", "content": "go on"})


def is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


BODIES = [json.loads(path.read_text()) for path in sorted(RECORDED.iterdir())]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from(["model", "OBJECT", "run"]),
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(st.sampled_from("text parts functionCall name args thought type".split()), below, max_size=3)
    ),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return ([path] if path else []) + [place for name, item in below for place in places(item, (*path, name))]


@examples(80)
@given(st.data())
def test_an_unexpected_value_anywhere_is_a_chat_request_or_a_refusal(data: st.DataObject) -> None:
    body = copy.deepcopy(data.draw(st.sampled_from(BODIES)))
    *way, last = data.draw(st.sampled_from(places(body)))
    place = body
    for name in way:
        place = place[name]
    place[last] = data.draw(values)
    try:
        GEMINI.translate(body, {})
    except Refusal as refusal:
        assert refusal.status == 400 and refusal.message.startswith("`")
