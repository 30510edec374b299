"""Anthropic's Messages through the proxy: what is recorded, and what its official client hears when things go wrong.

Engines are doubles that send what a real vLLM sent; the real ones are in `test_real_engine.py` and tests/live.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from proxy import Settings, serve
from tests.proxy.conftest import Bench, Started
from tests.proxy.fake_engine import FakeEngine, Seen, answers, replays, streams, transcript, whole
from tests.schemas import validator

GIVEN: dict[str, Any] = {"model": "my-policy", "messages": [{"role": "user", "content": "x"}], "max_tokens": 10}
PLAIN, STREAM = "vllm/chat-plain-length-nostream", "vllm/chat-plain-length-stream"
TEXT = "The two most popular colours in the world are:"


def client(bench: Bench, **options: Any) -> anthropic.AsyncAnthropic:
    options.setdefault("max_retries", 0)
    return anthropic.AsyncAnthropic(base_url=bench.proxy.base_url.removesuffix("/v1"), api_key="x", **options)


async def streamed(api: anthropic.AsyncAnthropic, **more: Any) -> Any:
    async with api.messages.stream(**{**GIVEN, **more}) as events:
        return await events.get_final_message()


def nested(status: int, message: str = "busy") -> dict[str, Any]:
    return {"error": {"message": message, "type": "x", "param": None, "code": status}}


def vllm_error(message: str, code: int) -> bytes:
    return b"data: " + json.dumps(nested(code, message)).encode() + b"\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [1, 77, 1 << 20])
async def test_text_goes_there_and_back(started: Started, stream: bool, size: int) -> None:
    answer = replays(STREAM, size=size) if stream else replays(PLAIN)
    async with FakeEngine(answer) as engine, started(engine.url) as bench, client(bench) as api:
        message = await streamed(api) if stream else await api.messages.create(**GIVEN)
        call = bench.call()
    assert [block.type for block in message.content] == ["text"] and message.content[0].text == TEXT
    assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("max_tokens", 13, 10)
    assert call.response_body == {
        name: value for name, value in message.to_dict().items() if name in call.response_body
    }
    assert call.metadata["dialect"] == "anthropic-messages" and call.request["path"] == "/v1/messages"
    assert call.metadata["call_type"] == "anthropic_messages"
    assert call.metadata["chat_response"]["choices"][0]["message"]["content"] == TEXT
    sent = engine.calls[0]
    assert sent.path == "/v1/chat/completions"
    ours = ("return_token_ids", "logprobs", "top_logprobs")
    assert call.metadata["chat_request"] == {name: value for name, value in sent.body.items() if name not in ours}
    assert call.capture is not None and call.capture.complete and call.capture.wire == "openai-chat"
    validator("llm_trajectory_line.v1").validate(json.loads(call.raw))


async def test_reasoning_is_a_thinking_block_and_goes_back_as_reasoning(started: Started) -> None:
    async with (
        FakeEngine(replays("vllm/reasoning-stream")) as engine,
        started(engine.url) as bench,
        client(bench) as api,
    ):
        message = await streamed(api)
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.content[0].thinking == "Two of the most impactful –" and message.content[0].signature
        history = [*GIVEN["messages"], {"role": "assistant", "content": [block.to_dict() for block in message.content]}]
        await streamed(api, messages=[*history, *GIVEN["messages"]])
        first, _ = bench.calls()
    reply = engine.calls[1].body["messages"][1]
    assert reply["reasoning_content"] == message.content[0].thinking and reply["content"] == message.content[1].text
    assert [block["type"] for block in first.response_body["content"]] == ["thinking", "text"]


async def test_a_tool_call_that_was_cut_is_not_a_call_to_run(started: Started) -> None:
    async with FakeEngine(replays("vllm/tool-auto-forced-stream")) as engine, started(engine.url) as bench:
        async with client(bench) as api:
            tool = {"name": "get_weather", "input_schema": {"type": "object"}}
            message = await streamed(api, tools=[tool])
        call = bench.call()
    (block,) = message.content
    assert (block.type, message.stop_reason) == ("tool_use", "max_tokens")
    (sampled,) = call.metadata["chat_response"]["choices"][0]["message"]["tool_calls"]
    assert block.id == sampled["id"] and call.response_body["content"][0]["input"] == {}
    assert sampled["function"]["arguments"].startswith("{")  # as it was sampled, cut and all


async def test_the_record_is_written_before_the_agent_sees_the_end(started: Started) -> None:
    async with FakeEngine(replays(STREAM, size=200)) as engine, started(engine.url) as bench:
        async with bench.client.stream("POST", "/messages", json={**GIVEN, "stream": True}) as answer:
            lines = b""
            async for data in answer.aiter_raw():
                before = lines.count(b"event: message_delta")
                lines += data
                if b"event: message_delta" in lines and not before:
                    assert len(bench.calls()) == 1
        assert lines.endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')


async def test_two_calls_at_once_that_arrive_in_one_chunk_and_in_pieces(started: Started) -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"content": "Both."},
        {"tool_calls": [
            {"index": 0, "id": "call_a", "type": "function", "function": {"name": "f", "arguments": '{"a": '}},
            {"index": 1, "id": "call_b", "type": "function", "function": {"name": "g", "arguments": ""}},
        ]},
        {"tool_calls": [{"index": 1, "function": {"arguments": '{"b":  "ü"}'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
    ]  # fmt: skip
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    chunks.append({**head, "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}})
    data = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in "fg"]
    async with FakeEngine(streams(data)) as engine, started(engine.url) as bench, client(bench) as api:
        message = await streamed(api, tools=tools)
        blocks = [block.to_dict() for block in message.content]
        assert message.stop_reason == "tool_use"
        assert [(block["id"], block["name"], block["input"]) for block in blocks[1:]] == [
            ("call_a", "f", {"a": 1}), ("call_b", "g", {"b": "ü"}),
        ]  # fmt: skip
        results = [{"type": "tool_result", "tool_use_id": name, "content": "ok"} for name in ("call_a", "call_b")]
        turns = [*GIVEN["messages"], {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
        await streamed(api, tools=tools, messages=turns)
    reply = engine.calls[1].body["messages"][1]
    # The agent had them parsed; the engine gets them back as the model wrote them.
    assert [call["function"]["arguments"] for call in reply["tool_calls"]] == ['{"a": 1}', '{"b":  "ü"}']
    assert [message["tool_call_id"] for message in engine.calls[1].body["messages"][2:]] == ["call_a", "call_b"]


# errors

ERRORS: dict[str, tuple[int, Any, type[anthropic.APIStatusError], int, str]] = {
    "vLLM, a wrong request": (400, nested(400), anthropic.BadRequestError, 400, "invalid_request_error"),
    "SGLang, flat": (400, {"object": "error", "message": "busy", "type": "BadRequestError", "param": None, "code": 400},
                     anthropic.BadRequestError, 400, "invalid_request_error"),
    "a word": (401, {"error": "busy"}, anthropic.AuthenticationError, 401, "authentication_error"),
    "no such model": (404, nested(404), anthropic.NotFoundError, 404, "not_found_error"),
    "too large for the engine": (413, nested(413), anthropic.APIStatusError, 413, "request_too_large"),
    "validation": (422, {"detail": [], "error": {"message": "busy"}}, anthropic.BadRequestError, 400,
                   "invalid_request_error"),
    "too many": (429, nested(429), anthropic.RateLimitError, 429, "rate_limit_error"),
    "a fault": (500, nested(500), anthropic.InternalServerError, 500, "api_error"),
    "overloaded": (503, nested(503), anthropic.InternalServerError, 529, "overloaded_error"),
    "no JSON": (500, b"busy", anthropic.InternalServerError, 500, "api_error"),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ERRORS)
async def test_an_engines_error_is_anthropics(started: Started, name: str, stream: bool) -> None:
    status, body, kind, seen, word = ERRORS[name]
    async with (
        FakeEngine(answers(status, body, retry_after="7")) as engine,
        started(engine.url, capture=False) as bench,
    ):
        async with client(bench) as api:
            with pytest.raises(kind, match="busy") as caught:
                await (streamed(api) if stream else api.messages.create(**GIVEN))
        call = bench.call()
    assert caught.value.status_code == seen
    assert caught.value.response.headers["retry-after"] == "7"
    assert caught.value.body == {"type": "error", "error": {"type": word, "message": "busy"}}
    assert (call.outcome, call.status_code, call.response_body) == ("error", seen, caught.value.body)


async def test_an_engine_that_is_not_there(started: Started) -> None:
    async with started("http://127.0.0.1:9/v1") as bench, client(bench) as api:
        with pytest.raises(anthropic.InternalServerError, match="cannot be reached") as caught:
            await api.messages.create(**GIVEN)
        call = bench.call()
    assert (caught.value.status_code, call.outcome, call.response_body["error"]["type"]) == (502, "error", "api_error")


async def test_the_clients_own_retry_answers_and_is_linked(started: Started) -> None:
    busy = answers(503, nested(503), retry_after="0")
    async with FakeEngine(busy, busy, replays(PLAIN)) as engine, started(engine.url) as bench:
        async with client(bench, max_retries=2) as api:
            assert (await api.messages.create(**GIVEN)).content[0].text == TEXT  # type: ignore[union-attr]
        calls = bench.calls()
    assert [call.outcome for call in calls] == ["error", "error", "ok"]
    assert [call.metadata["retry_of"] for call in calls] == [None, 0, 1]


async def test_an_error_mid_stream_is_an_event_and_recorded(started: Started) -> None:
    _, recorded = transcript(STREAM)
    half = recorded[: recorded.index(b"data: ", len(recorded) // 2)]
    answer = streams(half + vllm_error("out of memory", 500))
    async with FakeEngine(answer) as engine, started(engine.url) as bench, client(bench) as api:
        with pytest.raises(anthropic.APIStatusError, match="out of memory") as caught:
            await streamed(api)
        call = bench.call()
    assert caught.value.body == {"type": "error", "error": {"type": "api_error", "message": "out of memory"}}
    assert call.outcome == "truncated" and call.capture is not None
    assert call.capture.unavailable["completion_token_ids"].code == "stream_error"
    assert len(call.capture.completions[0].token_ids or ()) > 2
    assert TEXT.startswith(call.response_body["content"][0]["text"])
    assert call.response_body["error"]["message"] == "out of memory"


async def test_an_error_before_anything_was_said_has_a_status_that_clients_retry(started: Started) -> None:
    early = streams(vllm_error("no room", 503))
    async with FakeEngine(early, replays(STREAM)) as engine, started(engine.url) as bench:
        async with client(bench, max_retries=1) as api:
            assert (await streamed(api)).content[0].text == TEXT
        first, second = bench.calls()
    assert (first.outcome, first.status_code, first.response_body["error"]["type"]) == (
        "error",
        529,
        "overloaded_error",
    )
    assert (second.outcome, second.metadata["retry_of"]) == ("ok", 0)


async def test_a_stream_that_is_cut_ends_with_an_error_event(started: Started) -> None:
    _, recorded = transcript(STREAM)
    half = recorded[: recorded.index(b"data: ", len(recorded) // 2)]
    async with FakeEngine(streams(half, end=False)) as engine, started(engine.url) as bench, client(bench) as api:
        with pytest.raises(anthropic.APIStatusError, match="in the middle of its answer"):
            await streamed(api)
        call = bench.call()
    assert call.outcome == "truncated" and call.response_body["stop_reason"] is None
    assert call.capture is not None and len(call.capture.completions[0].token_ids or ()) > 2


async def test_a_stream_that_ends_without_a_finish_is_not_an_answer(started: Started) -> None:
    _, recorded = transcript(STREAM)
    half = recorded[: recorded.index(b"data: ", len(recorded) // 2)]
    async with FakeEngine(streams(half + b"data: [DONE]\n\n")) as engine, started(engine.url) as bench:
        async with client(bench) as api:
            with pytest.raises(anthropic.APIStatusError, match="broke off"):
                await streamed(api)
        assert bench.call().outcome == "truncated"


async def test_an_answer_that_is_not_a_chat(started: Started) -> None:
    for body in (b"<html>", {"choices": []}, [1]):
        async with FakeEngine(answers(200, body)) as engine, started(engine.url) as bench, client(bench) as api:
            for stream in (False, True):
                with pytest.raises(anthropic.InternalServerError, match="no chat completion"):
                    await (streamed(api) if stream else api.messages.create(**GIVEN))
            assert {call.outcome for call in bench.calls()} == {"error"}
            bench.journal.unlink()


async def test_an_agent_that_leaves_is_recorded_with_what_it_saw(started: Started) -> None:
    async def wait(seen: Seen) -> None:
        async with asyncio.timeout(5):
            await seen.gone.wait()

    _, recorded = transcript(STREAM)
    half = recorded[: recorded.index(b"data: ", len(recorded) // 2)]
    async with FakeEngine(streams(half, then=wait)) as engine, started(engine.url) as bench:
        async with bench.client.stream("POST", "/messages", json={**GIVEN, "stream": True}) as answer:
            async for data in answer.aiter_raw():
                if b"text_delta" in data:
                    break
        (call,) = await bench.recorded()
    assert call.outcome == "aborted" and call.response_body["stop_reason"] is None
    assert TEXT.startswith(call.response_body["content"][0]["text"])


async def test_pings_keep_the_connection_open_while_the_engine_is_called_unstreamed(started: Started) -> None:
    async def slow(seen: Seen) -> AsyncIterator[bytes]:
        await asyncio.sleep(0.3)
        yield whole(200, transcript(PLAIN)[1])

    async def slow_error(seen: Seen) -> AsyncIterator[bytes]:
        await asyncio.sleep(0.3)
        yield whole(503, nested(503))

    options = {"buffered": True, "keepalive": 0.05, "capture": False}
    async with FakeEngine(slow, slow, slow_error) as engine, started(engine.url, **options) as bench:
        async with client(bench) as api:
            answer = await bench.client.post("/messages", json={**GIVEN, "stream": True})
            assert answer.text.startswith('event: ping\ndata: {"type":"ping"}\n\n')
            assert (await streamed(api)).content[0].text == TEXT
            with pytest.raises(anthropic.APIStatusError, match="busy"):
                await streamed(api)
        assert [call.outcome for call in bench.calls()] == ["ok", "ok", "error"]


# what is refused here


def _message_with(block: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"model": None}, "model: Field required"),
    "no limit": ({"max_tokens": None}, "max_tokens: Field required"),
    "a limit of nothing": ({"max_tokens": 0}, "max_tokens"),
    "no messages": ({"messages": []}, "messages: at least one"),
    "a message that is none": ({"messages": ["x"]}, "messages.0"),
    "a role": ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    "a content": ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    "a text that is none": (_message_with({"type": "text"}), "messages.0.content.0.text"),
    "a PDF": (_message_with({"type": "document", "source": {"type": "base64"}}), "document"),
    "a file": (_message_with({"type": "image", "source": {"type": "file"}}), "source"),
    "an image of the assistant": ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "image"),
    "a server's tool in the history": (
        {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "server_tool_use"),
    "a tool without a schema": ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
    "a tool of Anthropic's": ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.*bash_20250124"),
    "a choice of no tool": ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
    "any of no tools": ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
    "an unknown choice": ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    "stops": ({"stop_sequences": ["", "x"]}, "stop_sequences"),
    "thinking": ({"thinking": {"type": "sideways"}}, "thinking.type"),
    "an edit of the context": ({"context_management": {"edits": [{"type": "compact"}]}}, "context_management.edits.0"),
    "a format": ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    "a task budget": ({"output_config": {"task_budget": {"total": 1}}}, "output_config.task_budget"),
    "servers of tools": ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    "a container": ({"container": "c"}, "container"),
    "a turn that ends in a call": (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
        "must end"),
}  # fmt: skip


async def test_what_cannot_be_kept_is_named_and_recorded(started: Started) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        for change, words in REFUSED.values():
            answer = await bench.client.post("/messages", json={**GIVEN, **change})
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), words
            assert re.search(words, error["message"]), (words, error["message"])
        for body in (b"[1]", b"{", b""):
            answer = await bench.client.post("/messages", content=body)
            assert answer.status_code == 400 and answer.json()["type"] == "error"
        calls = bench.calls()
        assert engine.calls == []
    assert len(calls) == len(REFUSED) + 3 and {call.outcome for call in calls} == {"error"}
    assert all(call.response_body["error"]["message"] for call in calls)
    assert all("chat_request" not in call.metadata for call in calls)
    assert {why.reason for call in calls for why in call.capture.unavailable.values()} == {"request_failed"}  # type: ignore[union-attr]


async def test_what_changes_nothing_is_left_out_and_reported(started: Started) -> None:
    more = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.3c0;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [*GIVEN["messages"], {"role": "system", "content": "Use the tools."}],
    }
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        assert (await bench.client.post("/messages", json={**GIVEN, **more})).status_code == 200
        call = bench.call()
    assert engine.calls[0].body["messages"] == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "x\nUse the tools."},
    ]  # fmt: skip
    assert "tools" not in engine.calls[0].body
    assert set(call.metadata["dropped_fields"]) == {
        "metadata", "service_tier", "thinking", "context_management", "tools.0: web_search_20250305",
        "system[]: x-anthropic-billing-header", "system[].cache_control", "messages[].role: system, sent as user",
    }  # fmt: skip


async def test_a_body_that_is_too_large(started: Started) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url, max_body_mb=1) as bench, client(bench) as api:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await api.messages.create(**{**GIVEN, "system": "x" * (2 << 20)})
    assert caught.value.body["error"]["type"] == "request_too_large"  # type: ignore[index]


# doors


async def test_keys_paths_and_probes(tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine:
        settings = Settings(upstream=[engine.url], out=tmp_path, probe=False, key="k", admin_port=0, admin_key="a")
        async with serve(settings) as proxy, httpx.AsyncClient() as http:
            root = proxy.base_url.removesuffix("/v1")
            assert proxy.admin_url is not None
            made = await http.post(
                f"{proxy.admin_url}/sessions",
                json={"name": "r1", "journal": str(tmp_path / "r1.jsonl")},
                headers={"authorization": "Bearer a"},
            )
            body = made.json()
            assert made.status_code == 201, body
            async with anthropic.AsyncAnthropic(
                base_url=body["anthropic_base_url"], api_key=body["api_key"], max_retries=0
            ) as api:
                await api.messages.create(**GIVEN)
            async with anthropic.AsyncAnthropic(
                base_url=f"{root}/s/r1", auth_token=body["api_key"], max_retries=0
            ) as api:
                await api.messages.create(**GIVEN)
            assert len((tmp_path / "r1.jsonl").read_bytes().splitlines()) == 2
            for headers in ({}, {"x-api-key": "wrong"}):
                answer = await http.post(f"{root}/v1/messages?beta=true", json=GIVEN, headers=headers)
                assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
            for path in ("", "/s/r1"):
                assert (await http.head(root + path)).status_code == 200
            missing = await http.get(root + "/v1/files", headers={"anthropic-version": "2023-06-01"})
            assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    "tail", [rb'"\ud800"}]', b'"a"}],"seed":%d' % 10**30], ids=["half a character", "a large seed"]
)
async def test_count_tokens_of_what_orjson_does_not_write(started: Started, tail: bytes) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":' + tail + b"}"
    async with FakeEngine(answers(200, {"count": 7, "tokens": [1] * 7})) as engine, started(engine.url) as bench:
        answer = await bench.client.post("/messages/count_tokens", content=body)
    assert (answer.status_code, answer.json()) == (200, {"input_tokens": 7})


async def test_count_tokens_asks_the_engines_tokenizer(started: Started) -> None:
    async with FakeEngine(answers(200, {"count": 7, "tokens": [1] * 7}), answers(404, {})) as engine:
        async with started(engine.url) as bench, client(bench) as api:
            request = {"model": "my-policy", "messages": GIVEN["messages"], "system": "s"}
            assert (await api.messages.count_tokens(**request)).input_tokens == 7
            with pytest.raises(anthropic.NotFoundError, match="counts"):
                await api.messages.count_tokens(**request)
            with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.role"):
                await api.messages.count_tokens(**{**request, "messages": [{"role": "x", "content": "x"}]})
        assert not bench.journal.exists() or bench.calls() == []
    assert engine.calls[0].path == "/tokenize"
    assert engine.calls[0].body["messages"] == [{"role": "system", "content": "s"}, *GIVEN["messages"]]
