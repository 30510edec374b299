"""The Responses dialect through the proxy: by OpenAI's own client on the embedded engine, and when things go wrong."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from capture.journal.call import Call
from sandbox.embedded_engine import EmbeddedEngine
from tests.proxy.conftest import Bench, Started
from tests.proxy.dialects.responses.client_cases import CASES, STEADY
from tests.proxy.fake_engine import FakeEngine, Seen, answers, replays, streams, transcript
from tests.schemas import validator

GIVEN: dict[str, Any] = {"model": "my-policy", "input": "x", "max_output_tokens": 10}
TEXT = "The two most popular colours in the world are:"


def client(bench: Bench, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=bench.proxy.base_url, api_key="x", **{"max_retries": 0, **options})


@pytest.mark.parametrize("name", CASES)
async def test_openais_client_on_the_embedded_engine(started: Started, engine: EmbeddedEngine, name: str) -> None:
    async with started(engine.base_url, engine="llamacpp") as bench, client(bench) as api:
        await CASES[name](api, engine.model)
        for call in bench.calls():
            validator("llm_trajectory_line.v1").validate(json.loads(call.raw))
            if call.metadata["dialect"] == "openai-responses" and call.outcome == "ok":
                assert call.capture is not None and call.capture.complete, call.capture and call.capture.unavailable
                assert call.response_body["object"] == "response"
                assert call.metadata["chat_request"]["messages"]


async def test_arguments_that_are_not_json_are_the_requests_own_fault(started: Started, engine: EmbeddedEngine) -> None:
    """llama.cpp answers 500, at which OpenAI's client would call again; vLLM takes them for an empty object."""
    values: Any = [
        {"role": "user", "content": "x"},
        {"type": "function_call", "call_id": "c", "name": "run", "arguments": "{bad"},
        {"type": "function_call_output", "call_id": "c", "output": "no such file"},
    ]
    async with started(engine.base_url) as bench, client(bench, max_retries=2) as api:
        with pytest.raises(openai.BadRequestError, match="arguments"):
            await api.responses.create(model=engine.model, input=values, **STEADY)
        (call,) = bench.calls()
    assert (call.outcome, call.response["status_code"]) == ("error", 400)
    assert call.response_body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_record_contains_what_the_agent_said_and_saw(started: Started, stream: bool) -> None:
    name = "vllm/chat-plain-length-" + ("stream" if stream else "nostream")
    async with FakeEngine(replays(name)) as fake, started(fake.url) as bench, client(bench) as api:
        response: Any = None
        if stream:
            async for event in await api.responses.create(**GIVEN, stream=True, user="u"):
                response = getattr(event, "response", response)
        else:
            response = await api.responses.create(**GIVEN, user="u")
        call = bench.call()
    assert response.output_text == TEXT
    assert call.response_body == json.loads(json.dumps({**response.to_dict(), **nulls(call, response)}))
    assert call.request_body["input"] == "x" and call.request["path"] == "/v1/responses"
    assert call.metadata["dialect"] == "openai-responses"
    assert call.metadata["dropped_fields"] == ["user"]
    assert call.metadata["chat_request"]["messages"] == [{"role": "user", "content": "x"}]
    assert call.metadata["chat_request"]["max_tokens"] == 10
    assert call.metadata["chat_response"]["choices"][0]["message"]["content"] == TEXT
    assert fake.calls[0].path == "/v1/chat/completions"
    assert call.capture is not None and call.capture.complete and call.capture.wire == "openai-chat"


def nulls(call: Call, response: Any) -> dict[str, Any]:
    """What the client leaves out of a body when it writes it again."""
    return {name: value for name, value in call.response_body.items() if name not in response.to_dict()}


async def test_text_comes_as_the_engine_streams_it_and_the_end_after_the_record(started: Started) -> None:
    lines: list[int] = []
    journal: Any = None

    async def look(seen: Seen) -> None:
        lines.append(journal.read_bytes().count(b"\n") if journal.exists() else 0)

    _, data = transcript("vllm/chat-plain-length-stream")
    async with FakeEngine(streams(data, size=200, pause=0.01, then=look)) as fake, started(fake.url) as bench:
        journal = bench.journal
        async with bench.client.stream("POST", "/responses", json={**GIVEN, "stream": True}) as answer:
            arrived = [piece async for piece in answer.aiter_raw()]
        assert bench.call().outcome == "ok"
    assert len(arrived) > 5, "piece by piece"
    assert b"output_item.done" in arrived[-1] and b"response.incomplete" in arrived[-1]
    assert not any(b"response.incomplete" in piece for piece in arrived[:-1])


def half(name: str = "vllm/chat-plain-length-stream") -> bytes:
    _, data = transcript(name)
    return data[: data.index(b'" popular"')].rsplit(b"\n\n", 1)[0] + b"\n\n"


BROKEN: dict[str, Any] = {
    "the engine's connection is cut": lambda: streams(half(), end=False),
    "the engine's stream ends too early": lambda: streams(half()),
    "the engine says an error in mid-stream": lambda: streams(
        half() + b'data: {"error": {"message": "out of memory", "code": 500}}\n\ndata: [DONE]\n\n'
    ),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_an_answer_that_breaks_off_is_a_failed_response(started: Started, name: str) -> None:
    async with FakeEngine(BROKEN[name]()) as fake, started(fake.url) as bench, client(bench, max_retries=2) as api:
        events = []
        with pytest.raises(openai.APIError):
            async for event in await api.responses.create(**GIVEN, stream=True):
                events.append(event)
        raw = await bench.client.post("/responses", json={**GIVEN, "stream": True})
        first, _ = bench.calls()
    assert "response.output_text.delta" in [event.type for event in events]
    assert len(fake.calls) == 2, "no client calls again in mid-stream"
    last = json.loads(raw.text.rstrip().rsplit("data: ", 1)[1])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    assert first.outcome == "truncated"
    assert first.response_body["status"] == "failed"
    assert first.capture is not None and not first.capture.complete
    assert first.capture.completions[0].token_ids, "what had come is kept"


@pytest.mark.parametrize(("status", "tries"), [(503, 3), (429, 3), (400, 1), (401, 1), (404, 1)])
async def test_the_client_calls_again_where_that_can_help(started: Started, status: int, tries: int) -> None:
    failing = answers(status, {"error": {"message": "not now", "type": "x", "code": status}}, retry_after="0")
    ok = replays("vllm/chat-plain-length-nostream")
    async with FakeEngine(*[failing] * 2, ok) as fake, started(fake.url) as bench, client(bench, max_retries=2) as api:
        if tries == 3:
            assert (await api.responses.create(**GIVEN)).output_text == TEXT
        else:
            with pytest.raises(openai.APIStatusError, match="not now") as error:
                await api.responses.create(**GIVEN)
            assert error.value.status_code == status
        calls = bench.calls()
    assert len(calls) == tries
    assert [call.outcome for call in calls] == ["error"] * (tries - 1) + ["ok" if tries == 3 else "error"]
    assert all(set(call.response_body["error"]) == {"message", "type", "param", "code"} for call in calls[: tries - 1])


async def test_a_request_that_is_refused_is_recorded(started: Started) -> None:
    async with FakeEngine(replays("vllm/chat-plain-length-nostream")) as fake, started(fake.url) as bench:
        answer = await bench.client.post("/responses", json={**GIVEN, "background": True})
        call = bench.call()
    assert fake.calls == []
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "background"
    assert (call.outcome, call.response_body, call.request_body["background"]) == ("error", answer.json(), True)


@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"', b""])
async def test_a_body_that_is_not_an_object_is_a_400(started: Started, body: bytes) -> None:
    async with FakeEngine(replays("vllm/chat-plain-length-nostream")) as fake, started(fake.url) as bench:
        answer = await bench.client.post("/responses", content=body)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


async def test_an_engine_that_is_away_is_a_502_that_names_no_address(started: Started) -> None:
    async with started("http://127.0.0.1:9/v1") as bench:
        answer = await bench.client.post("/responses", json=GIVEN)
    assert answer.status_code == 502 and answer.json()["error"]["type"] == "server_error"
    assert "127.0.0.1" not in answer.text


async def test_answers_are_not_kept_to_be_fetched(started: Started) -> None:
    async with FakeEngine(replays("vllm/chat-plain-length-nostream")) as fake, started(fake.url) as bench:
        tried = [
            ("GET", "/responses/resp_1"), ("DELETE", "/responses/resp_1"), ("POST", "/responses/resp_1/cancel"),
            ("GET", "/responses/resp_1/input_items"), ("GET", "/responses"), ("POST", "/responses/compact"),
        ]  # fmt: skip
        for method, path in tried:
            answer = await bench.client.request(method, path)
            assert answer.status_code == (405 if path == "/responses" else 404)
            assert "POST /v1/responses" in answer.json()["error"]["message"]
            assert fake.calls == []


async def test_a_websocket_is_refused_so_that_agents_fall_back(started: Started) -> None:
    headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13", "sec-websocket-key": "x"}
    async with started("http://127.0.0.1:9/v1") as bench, httpx.AsyncClient() as plain:
        answer = await plain.get(f"{bench.proxy.base_url}/responses", headers=headers)
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
