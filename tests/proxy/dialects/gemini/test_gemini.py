"""Gemini's dialect through the proxy, by Google's own client: on the embedded engine, and when things go wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google import genai
from google.genai import errors, types

from sandbox.embedded_engine import EmbeddedEngine
from tests.proxy.conftest import Bench, Started
from tests.proxy.dialects.responses import client_cases
from tests.proxy.fake_engine import FakeEngine, answers, replays, streams, transcript

STEADY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 12}
TEXT = "The two most popular colours in the world are:"
WEATHER = types.Tool(
    function_declarations=[
        types.FunctionDeclaration(
            name="get_weather",
            description="The weather of a city",
            parameters_json_schema=client_cases.WEATHER["parameters"],
        )
    ]
)


def models(bench: Bench, version: str = "v1beta", tries: int = 1) -> Any:
    http = types.HttpOptions(
        base_url=bench.proxy.base_url.removesuffix("/v1"),
        api_version=version,
        retry_options=types.HttpRetryOptions(attempts=tries, initial_delay=0.01, max_delay=0.01),
    )
    return genai.Client(api_key="x", http_options=http).aio.models


def config(**more: Any) -> types.GenerateContentConfig:
    off = types.AutomaticFunctionCallingConfig(disable=True)
    return types.GenerateContentConfig(**{**STEADY, "automatic_function_calling": off, **more})


async def text_and_last(stream: Any) -> tuple[str, Any]:
    """The text of a stream, and its last event."""
    events = [event async for event in await stream]
    return "".join(event.text or "" for event in events), events[-1]


@pytest.mark.parametrize("version", ["v1beta", "v1"])
async def test_text_streamed_and_not(started: Started, engine: EmbeddedEngine, version: str) -> None:
    async with started(engine.base_url) as bench:
        api = models(bench, version)
        request = {
            "model": engine.model,
            "contents": "Name two colours.",
            "config": config(system_instruction="Be brief."),
        }
        whole = await api.generate_content(**request)
        text, last = await text_and_last(api.generate_content_stream(**request))
        calls = bench.calls()
    assert whole.text == text and len(text) > 10
    assert last.usage_metadata.total_token_count == whole.usage_metadata.total_token_count > 20
    assert [call.metadata["stream"] for call in calls] == [False, True]
    for call in calls:
        assert call.metadata["dialect"] == "gemini" and call.capture is not None and call.capture.complete
        assert call.request["path"].startswith(f"/{version}/models/")
        assert call.metadata["chat_request"]["messages"][0] == {"role": "system", "content": "Be brief."}


async def test_a_call_and_its_response(started: Started, engine: EmbeddedEngine) -> None:
    async with started(engine.base_url) as bench:
        api = models(bench)
        asked = [
            types.Content(
                role="model" if message["role"] == "assistant" else "user", parts=[types.Part(text=message["content"])]
            )
            for message in client_cases.asking("get_weather", {"city": "Paris"})
        ]
        request: dict[str, Any] = {"model": engine.model, "config": config(tools=[WEATHER], max_output_tokens=60)}
        _, last = await text_and_last(api.generate_content_stream(contents=asked, **request))
        assert last.function_calls, bench.call().response_body
        (call,) = last.function_calls
        assert (call.name, call.args) == ("get_weather", {"city": "Paris"})
        response = types.FunctionResponse(id=call.id, name=call.name, response={"output": "clear"})
        done = types.Content(role="user", parts=[types.Part(function_response=response)])
        second = await api.generate_content(contents=[*asked, last.candidates[0].content, done], **request)
        assert second.candidates
        first, then = bench.calls()
    written = first.metadata["chat_response"]["choices"][0]["message"]["tool_calls"][0]["function"]
    history = then.metadata["chat_request"]["messages"]
    assert history[3]["tool_calls"][0]["function"] == written, "letter by letter"
    assert history[4]["content"] == "clear"


async def test_an_answer_in_json(started: Started, engine: EmbeddedEngine) -> None:
    schema = types.Schema(type=types.Type.OBJECT, properties={"colour": types.Schema(type=types.Type.STRING)})
    async with started(engine.base_url) as bench:
        form = config(response_mime_type="application/json", response_schema=schema, max_output_tokens=60)
        answer = await models(bench).generate_content(model=engine.model, contents="A colour.", config=form)
    assert isinstance(json.loads(answer.text), dict)


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_have_googles_shape(started: Started, engine: EmbeddedEngine, stream: bool) -> None:
    image = types.Part(inline_data=types.Blob(mime_type="image/png", data=b"x"))
    wrong: dict[str, Any] = {
        "exceeds": {"contents": "word " * 20000},
        "image": {"contents": [types.Content(role="user", parts=[image])]},
        "candidateCount": {"contents": "x", "config": config(candidate_count=2)},
    }
    async with started(engine.base_url) as bench:
        api = models(bench, tries=3)
        for word, request in wrong.items():
            with pytest.raises(errors.ClientError, match=word) as refused:
                if stream:
                    await text_and_last(api.generate_content_stream(model=engine.model, **request))
                else:
                    await api.generate_content(model=engine.model, **request)
            assert (refused.value.code, refused.value.status) == (400, "INVALID_ARGUMENT")
        calls = bench.calls()
    assert [call.outcome for call in calls] == ["error"] * 3, "none was tried again"
    assert all(call.response_body["error"]["status"] == "INVALID_ARGUMENT" for call in calls)


async def test_a_busy_engine_is_asked_again(started: Started) -> None:
    busy = answers(503, {"error": {"message": "not now", "code": 503}})
    async with FakeEngine(busy, replays("vllm/chat-plain-length-nostream")) as fake, started(fake.url) as bench:
        answer = await models(bench, tries=3).generate_content(model="my-policy", contents="x")
        calls = bench.calls()
    assert answer.text == TEXT
    assert [call.outcome for call in calls] == ["error", "ok"]
    assert calls[0].response_body["error"]["status"] == "UNAVAILABLE"


async def test_an_answer_that_breaks_off_raises(started: Started) -> None:
    _, data = transcript("vllm/chat-plain-length-stream")
    half = data[: data.index(b'" popular"')].rsplit(b"\n\n", 1)[0] + b"\n\n"
    async with FakeEngine(streams(half, end=False)) as fake, started(fake.url) as bench:
        with pytest.raises(errors.APIError):
            await text_and_last(models(bench).generate_content_stream(model="my-policy", contents="x"))
        call = bench.call()
    assert call.outcome == "truncated" and call.capture is not None and not call.capture.complete
    assert call.response_body["candidates"][0]["content"]["parts"][0]["text"] == "The two most"


async def test_what_is_not_served_is_reported(started: Started) -> None:
    async with FakeEngine(replays("vllm/chat-plain-length-nostream")) as fake, started(fake.url) as bench:
        root = bench.proxy.base_url.removesuffix("/v1")
        for path in ("/v1beta/models/m:countTokens", "/v1beta/models/m:embedContent"):
            answer = await bench.client.post(root + path, json={})
            assert answer.status_code == 404 and answer.json()["error"]["status"] == "NOT_FOUND"
        answer = await bench.client.post(f"{root}/v1beta/models/m:generateContent", content=b"[]")
        assert answer.status_code == 400
        assert (await bench.client.get(f"{root}/v1/models/my-policy")).status_code in (200, 404)
    assert fake.calls == []
