"""Chat chunks as the events of a response: OpenAI's own models take every one, OpenAI's client puts them together."""

from __future__ import annotations

import json
from typing import Any, get_args

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from capture.chat.assemble import Assembler, stream_of
from proxy.dialects.base import ReplyTranslator
from proxy.dialects.responses.dialect import ResponsesDialect
from proxy.dialects.responses.tools import FreeText, as_arguments, free_text
from tests.proxy.fake_engine import transcript

#: OpenAI's model of each kind of event.
EVENTS: dict[str, Any] = {
    get_args(model.model_fields["type"].annotation)[0]: model for model in get_args(get_args(ResponseStreamEvent)[0])
}
RESPONSES = ResponsesDialect()
RUN = {"type": "function", "name": "run", "parameters": {"type": "object"}}
PATCH = {"type": "custom", "name": "apply_patch"}
AGENTS = {"type": "namespace", "name": "agents", "description": "", "tools": [RUN]}
USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 4}}


def replying(**body: Any) -> ReplyTranslator:
    return RESPONSES.reply(RESPONSES.translate({"model": "my-policy", "input": "hi", "stream": True, **body}, {}))


def chunks(*deltas: dict[str, Any], finish: str | None = "stop") -> list[dict[str, Any]]:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": "served"}
    made = [{**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}]
    made += [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    if finish is not None:
        made.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        made.append({**head, "choices": [], "usage": USAGE})
    return made


def fragment(index: int, arguments: str = "", name: str | None = None, call_id: str | None = None) -> dict[str, Any]:
    function = {"arguments": arguments, **({"name": name} if name else {})}
    return {"tool_calls": [{"index": index, "function": function, **({"id": call_id} if call_id else {})}]}


def events(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each checked against OpenAI's own model of it and for its number."""
    found: list[dict[str, Any]] = []
    for block in data.decode().split("\n\n")[:-1]:
        name, _, result = block.partition("\n")
        event = json.loads(result.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        result = result.replace("context_length_exceeded", "invalid_prompt")  # sent, not listed
        EVENTS[event["type"]].model_validate(json.loads(result[6:]))
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def streamed(reply: ReplyTranslator, answer_chunks: list[dict[str, Any]]) -> bytes:
    """A stream as the relay makes it, with the record taken before the end."""
    data = b"".join(reply.feed(chunk) for chunk in answer_chunks)
    whole = reply.body(assembled(answer_chunks))
    data += reply.finish()
    assert events(data)[-1]["response"] == whole
    Response.model_validate(whole)
    return data


def assembled(answer_chunks: list[dict[str, Any]]) -> dict[str, Any]:
    assembler = Assembler()
    for chunk in answer_chunks:
        assembler.add(chunk)
    return assembler.body()


def put_together(data: bytes) -> Any:
    """What OpenAI's client makes of a stream."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=data)

    with (
        openai.OpenAI(api_key="x", http_client=httpx.Client(transport=httpx.MockTransport(answer))) as api,
        api.responses.stream(model="my-policy", input="hi", tools=[RUN, PATCH, AGENTS]) as stream,  # type: ignore[list-item]
    ):
        for _ in stream:
            pass
        return stream.get_final_response()


def kinds(data: bytes) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events(data)]


def test_text_comes_as_it_is_sampled() -> None:
    reply = replying()
    first, *rest = chunks({"content": "Hel"}, {"content": "lo"})
    opened = events(reply.feed(first))
    assert [event["type"] for event in opened] == ["response.created", "response.in_progress"]
    assert opened[0]["response"]["status"] == "in_progress"
    pieces = [reply.feed(chunk) for chunk in rest]
    assert b'"delta":"Hel"' in pieces[0] and b'"delta":"lo"' in pieces[1]
    assert pieces[1].count(b"event: ") == 1
    assert pieces[2:] == [b"", b""], "what ends the answer waits for `end`"
    assert b"response.completed" in reply.finish()


def test_the_whole_sequence_of_a_text() -> None:
    data = streamed(replying(), chunks({"content": "Hel"}, {"content": "lo"}))
    assert kinds(data) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    response = put_together(data)
    assert (response.output_text, response.status, response.model) == ("Hello", "completed", "served")
    assert response.usage.to_dict() == {
        "input_tokens": 7, "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 12,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("summary", [False, True])
def test_reasoning_is_an_item_of_its_own_and_comes_back(name: str, summary: bool) -> None:
    asked: dict[str, Any] = {"include": ["reasoning.encrypted_content"]}
    if summary:
        asked["reasoning"] = {"summary": "auto"}
    data = streamed(replying(**asked), chunks({name: "let me "}, {name: "think"}, {"content": "42"}))
    part = "reasoning_summary" if summary else "reasoning"
    assert f"{part}_text.delta" in kinds(data) and f"{part}_text.done" in kinds(data)
    reasoning, message = put_together(data).to_dict()["output"]
    shown = reasoning["summary"] if summary else reasoning["content"]
    assert [item["text"] for item in shown] == ["let me think"]
    for fields in ({}, {"summary": [], "content": None}):
        back = RESPONSES.translate({"model": "m", "input": [{**reasoning, **fields}, message]}, {})
        assert back.chat["messages"] == [
            {"role": "assistant", "content": "42", "reasoning": "let me think", "reasoning_content": "let me think"}
        ]


def test_reasoning_that_continues_after_text_is_another_item() -> None:
    data = streamed(replying(), chunks({"reasoning": "a"}, {"content": "b"}, {"reasoning": "c"}, {"content": "d"}))
    output = put_together(data).to_dict()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "reasoning", "message"]
    (turn,) = RESPONSES.translate({"model": "m", "input": output}, {}).chat["messages"]
    assert (turn["reasoning"], turn["content"]) == ("ac", "bd")


def test_calls_in_parallel() -> None:
    answer_chunks = chunks(
        {"content": "I run"},
        fragment(0, name="run", call_id="call_1"),
        fragment(0, '{"a"'),
        fragment(0, ": 1}"),
        fragment(1, '{"b":', name="agents__run", call_id="call_2"),
        fragment(1, " 2}"),
        fragment(0, " "),
        finish="tool_calls",
    )
    data = streamed(replying(tools=[RUN, AGENTS]), answer_chunks)
    message, first, second = put_together(data).to_dict()["output"]
    assert message["content"][0]["text"] == "I run"
    assert (first["call_id"], first["name"], first["arguments"]) == ("call_1", "run", '{"a": 1} ')
    assert (second["call_id"], second["name"], second["namespace"]) == ("call_2", "run", "agents")
    assert second["arguments"] == '{"b": 2}'
    assert first["parsed_arguments"] == {"a": 1} or "parsed_arguments" in first


def test_a_custom_call_is_streamed_as_its_text() -> None:
    arguments = as_arguments('*** Begin\n"é😀"\\n\t')
    pieces = [fragment(0, argument) for argument in arguments]
    data = streamed(
        replying(tools=[PATCH]),
        chunks(fragment(0, name="apply_patch", call_id="c"), *pieces, finish="tool_calls"),
    )
    deltas = [event["delta"] for event in events(data) if event["type"] == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 10 and "".join(deltas) == '*** Begin\n"é😀"\\n\t'
    (item,) = put_together(data).to_dict()["output"]
    assert (item["type"], item["input"], item["call_id"]) == ("custom_tool_call", '*** Begin\n"é😀"\\n\t', "c")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\u00e9\\ud83d\\ude00\\n\\/"}', "aé😀\n/"),
        (' {\n"input"\t:"a"} ', "a"),
        ('{"input": "cut of', "cut of"),
        ('{"input": "cut in an escape \\u00', "cut in an escape "),
        ('{"input": "no \\uZZZZ escape"}', "no \\uZZZZ escape"),
        ('{"input": "half \\ud83d"}', "half \ud83d"),
        ('{"patch": "other name"}', "other name"),
        ('{"a": "x", "input": "y"}', "y"),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("*** no JSON", "*** no JSON"),
        ('{"inp', '{"inp'),
        ("", ""),
    ],
)
def test_free_text_is_found_in_whatever_a_model_writes(arguments: str, text: str) -> None:
    assert free_text(arguments) == text
    reading = FreeText()
    assert "".join(reading.feed(argument) for argument in arguments) + reading.rest() == text


def test_a_refusal_is_a_part_of_its_own() -> None:
    data = streamed(replying(), chunks({"refusal": "I "}, {"refusal": "will not"}))
    assert kinds(data)[4:7] == ["refusal.delta", "refusal.delta", "refusal.done"]
    (message,) = put_together(data).to_dict()["output"]
    assert message["content"] == [{"type": "refusal", "refusal": "I will not"}]


@pytest.mark.parametrize(
    ("finish", "status", "reason"),
    [("length", "incomplete", "max_output_tokens"), ("content_filter", "incomplete", "content_filter")],
)
def test_an_answer_that_was_cut_is_incomplete(finish: str, status: str, reason: str) -> None:
    answer_chunks = chunks({"content": "a"}, fragment(0, '{"a', name="run", call_id="c"), finish=finish)
    last = events(streamed(replying(tools=[RUN]), answer_chunks))[-1]
    assert last["type"] == f"response.{status}"
    assert last["response"]["incomplete_details"] == {"reason": reason}
    assert [item["status"] for item in last["response"]["output"]] == ["completed", "incomplete"]


def test_an_answer_that_is_only_its_end_is_an_empty_message() -> None:
    """So that the turn is in what comes back, as it is in the sampled tokens."""
    output = put_together(streamed(replying(), chunks())).to_dict()["output"]
    assert output[0]["content"][0]["text"] == ""
    assert RESPONSES.translate({"model": "m", "input": output}, {}).chat["messages"] == [
        {"role": "assistant", "content": ""}
    ]


def test_an_engine_that_aborts_fails_the_response() -> None:
    last = events(streamed(replying(), chunks({"content": "a"}, finish="abort")))[-1]
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")


def test_a_failure_mid_stream_raises_in_the_client_and_is_a_failed_response() -> None:
    reply = replying()
    answer_chunks = chunks({"content": "a"}, finish=None)
    data = b"".join(reply.feed(chunk) for chunk in answer_chunks) + reply.error_event(502, "the engine broke off")
    assert kinds(data)[-2:] == ["error", "failed"]
    failed = events(data)[-1]["response"]
    assert failed["error"] == {"code": "server_error", "message": "the engine broke off"}
    assert failed["output"][0]["content"][0]["text"] == "a"
    with pytest.raises(openai.APIError, match="the engine broke off"):
        put_together(data)
    assert reply.body(assembled(answer_chunks))["status"] == "failed"


def test_a_failure_as_the_first_event_is_a_whole_stream() -> None:
    data = replying().error_event(400, "This model's maximum context length is 4096 tokens.")
    assert kinds(data) == ["created", "in_progress", "error", "failed"]
    assert events(data)[-1]["response"]["error"]["code"] == "context_length_exceeded", "Codex acts on it"


def test_what_had_come_of_an_answer_that_broke_off_is_recorded() -> None:
    reply = replying()
    answer_chunks = chunks({"content": "a"}, fragment(0, '{"x', name="run", call_id="c"), finish=None)
    for chunk in answer_chunks:
        reply.feed(chunk)
    body = reply.body(assembled(answer_chunks))
    assert (body["status"], body["output"][0]["content"][0]["text"]) == ("incomplete", "a")
    assert body["output"][1]["arguments"] == '{"x'


def test_a_quiet_stream_is_kept_open_by_events() -> None:
    reply = replying()
    data = (
        reply.ping() + reply.ping() + b"".join(reply.feed(chunk) for chunk in chunks({"content": "a"})) + reply.finish()
    )
    assert kinds(data)[:3] == ["created", "in_progress", "in_progress"]
    assert put_together(data).output_text == "a"


ODD: dict[str, list[dict[str, Any]]] = {
    "no id": [fragment(0, "{}", name="run")],
    "an id twice": [fragment(0, "{}", "run", "c"), fragment(1, "{}", "run", "c")],
    "every index 0": [fragment(0, "{}", "run", "c"), fragment(0, "{}", "run", "d")],
    "a name that comes late": [fragment(0, '{"a"', call_id="c"), fragment(0, ": 1}"), fragment(0, name="run")],
    "a name that never comes": [fragment(0, "{}", call_id="c")],
    "the old way": [{"function_call": {"name": "run", "arguments": "{}"}}],
    "an object for arguments": [{"tool_calls": [{"id": "c", "function": {"name": "run", "arguments": {"a": 1}}}]}],
    "text after the call": [fragment(0, "{}", "run", "c"), {"content": "and more"}],
    "a tool nobody offered": [fragment(0, "{}", "other", "c")],
    "lone surrogates": [{"content": "\ud83d"}, fragment(0, '{"a": "\ud83d"}', "run", "c")],
    "strangers": [{"content": 5}, {"tool_calls": ["x", {"function": 1}]}, {"reasoning": ["x"]}],
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_any_engine_stream_is_a_response_that_the_client_accepts(name: str) -> None:
    data = streamed(replying(tools=[RUN]), chunks(*ODD[name], finish="tool_calls"))
    assert events(data)[-1]["type"] == "response.completed"
    if name != "lone surrogates":  # which no client's JSON reader takes
        assert put_together(data).status == "completed"
    calls = [item for item in events(data)[-1]["response"]["output"] if item["type"] == "function_call"]
    assert len({item["call_id"] for item in calls}) == len(calls)


def test_chunks_that_are_not_chunks_are_passed_over() -> None:
    reply = replying()
    for chunk in ({}, {"choices": None}, {"choices": [5]}, {"choices": [{"delta": 1}]}):
        reply.feed(chunk)
    assert b"response.incomplete" in reply.finish()


@pytest.mark.parametrize("asks", [False, True])
def test_logprobs_are_sent_if_requested(asks: bool) -> None:
    entry = {
        "token": "a",
        "bytes": [97],
        "logprob": -0.5,
        "top_logprobs": [{"token": "a", "logprob": -0.5}],
    }  # no bytes
    answer_chunks = chunks({"content": "a"})
    answer_chunks[1]["choices"][0]["logprobs"] = {"content": [entry]}
    include = ["message.output_text.logprobs"] if asks else []
    data = streamed(replying(include=include, top_logprobs=1), answer_chunks)
    values = [event["logprobs"] for event in events(data) if event["type"] == "response.output_text.delta"]
    assert [len(value) for value in values] == [1 if asks else 0]
    assert len(put_together(data).output[0].content[0].logprobs) == (1 if asks else 0)


RECORDED = ["chat-plain-length-stream", "tool-auto-forced-stream", "tool-required-stream", "reasoning-stream"]


@pytest.mark.parametrize("name", RECORDED)
def test_the_same_answer_streamed_and_not(name: str) -> None:
    """Recorded from vLLM: what it streamed, and the same as one body, are one response."""
    lines = transcript(f"vllm/{name}")[1].decode().split("\n\n")
    answer_chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    reply = replying(tools=[RUN])
    streamed(reply, answer_chunks)
    asked = replying(tools=[RUN])
    assert steady(asked.body(assembled(answer_chunks))) == steady(reply.body(assembled(answer_chunks)))


def steady(body: dict[str, Any]) -> Any:
    return json.loads(
        json.dumps({**body, "id": ""}), object_hook=lambda item: {k: v for k, v in item.items() if k != "id"}
    )


def test_stream_of_a_whole_answer_is_the_same_response() -> None:
    """What the relay makes of an engine that has to be called unstreamed."""
    call = {"id": "c", "type": "function", "function": {"name": "apply_patch", "arguments": '{"input": "x"}'}}
    message = {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [call]}
    choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
    body = {"id": "x", "created": 5, "model": "m", "object": "chat.completion", "usage": USAGE, "choices": [choice]}
    reply, whole = replying(tools=[PATCH]), replying(tools=[PATCH])
    data = streamed(reply, stream_of(body, include_usage=True))
    assert steady(events(data)[-1]["response"]) == steady(whole.body(body))


@pytest.mark.parametrize(
    ("status", "engine", "wanted", "code"),
    [
        (400, {"error": {"message": "This model's maximum context length is 8 tokens", "param": "input_tokens"}},
         400, "context_length_exceeded"),
        (400, {"object": "error", "message": "longer than the model's context length (8)"},
         400, "context_length_exceeded"),
        (400, {"error": {"message": "request (9010 tokens) exceeds the available context size (4096 tokens)"}},
         400, "context_length_exceeded"),
        (500, {"error": {"message": "image input is not supported - hint: x"}}, 400, "unsupported_image_media_type"),
        (500, {"error": {"message": "Failed to parse tool call arguments as JSON: x"}}, 400, None),
        (500, {"error": {"message": "out of memory"}}, 500, "server_error"),
        (401, {"error": "Unauthorized"}, 401, "invalid_api_key"),
        (404, {"error": {"message": "no such model"}}, 404, "not_found"),
        (429, None, 429, "rate_limit_exceeded"),
        (413, None, 413, "request_too_large"),
        (503, "<html>", 503, "server_error"),
    ],
)  # fmt: skip
def test_errors_have_openais_shape_and_the_status_that_its_client_acts_on(
    status: int, engine: Any, wanted: int, code: str | None
) -> None:
    got, body = RESPONSES.error(status, "what the proxy says", engine)
    error = json.loads(body)["error"]
    assert (got, error["code"]) == (wanted, code)
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
