"""The official OpenAI client, in every way it calls, survives what the proxy sends, comments between events too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.proxy.conftest import Started
from tests.proxy.fake_engine import FakeEngine, Seen, answers, replays, transcript, whole

GIVEN: dict[str, Any] = {"model": "my-policy", "messages": [{"role": "user", "content": "x"}], "max_tokens": 10}
PLAIN, STREAM = "vllm/chat-plain-length-nostream", "vllm/chat-plain-length-stream"
TEXT = "The two most popular colours in the world are:"


async def slow(seen: Seen) -> AsyncIterator[bytes]:
    await asyncio.sleep(0.3)
    yield whole(200, transcript(PLAIN)[1])


@pytest.mark.parametrize("buffered", [False, True])
async def test_streams_sync_async_and_raw(started: Started, buffered: bool) -> None:
    """Buffered, comments come before the first event for as long as the engine takes."""
    answer = slow if buffered else replays(STREAM, size=50)
    async with FakeEngine(answer) as engine, started(engine.url, buffered=buffered, keepalive=0.05) as bench:
        url = bench.proxy.base_url

        def sync() -> str:
            with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as api:
                stream = api.chat.completions.create(**GIVEN, stream=True)
                return "".join(event.choices[0].delta.content or "" for event in stream)

        assert await asyncio.to_thread(sync) == TEXT
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as api:
            stream = await api.chat.completions.create(**GIVEN, stream=True, stream_options={"include_usage": True})
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 10
            raw = api.chat.completions.with_streaming_response
            async with raw.create(**GIVEN, stream=True) as reply:
                lines = [line async for line in reply.iter_lines()]
            assert lines[-2:] == ["data: [DONE]", ""]
            assert (": keep-alive" in lines) is buffered
            with pytest.raises(openai.LengthFinishReasonError) as cut:  # what the client says of a reply cut by length
                async with api.chat.completions.stream(**GIVEN) as events:
                    await events.get_final_completion()
            assert cut.value.completion.choices[0].message.content == TEXT
        calls = bench.calls()
    assert len(calls) == 4 and all(call.capture is not None and call.capture.complete for call in calls)


async def test_whole_answers_and_errors(started: Started) -> None:
    error = answers(429, {"error": {"message": "busy", "type": "rate_limit", "param": None, "code": "429"}})
    async with FakeEngine(replays(PLAIN), error) as engine, started(engine.url) as bench:
        async with openai.AsyncOpenAI(base_url=bench.proxy.base_url, api_key="x", max_retries=0) as api:
            assert (await api.chat.completions.create(**GIVEN)).choices[0].message.content == TEXT
            with pytest.raises(openai.RateLimitError, match="busy"):
                await api.chat.completions.create(**GIVEN)
            assert [model.id async for model in api.models.list()] == ["my-policy"]
            with pytest.raises(openai.NotFoundError):
                await api.embeddings.create(model="x", input="y")


async def test_a_clients_own_retry_is_recorded_as_the_retry_it_is(started: Started) -> None:
    busy = answers(503, {"error": {"message": "busy", "code": 503}}, retry_after="0")
    async with FakeEngine(busy, replays(PLAIN)) as engine, started(engine.url) as bench:
        async with openai.AsyncOpenAI(base_url=bench.proxy.base_url, api_key="x", max_retries=2) as api:
            await api.chat.completions.create(**GIVEN)
        first, second = bench.calls()
    assert (first.outcome, second.outcome, second.metadata["retry_of"]) == ("error", "ok", 0)
    assert second.request["headers"]["x-stainless-retry-count"] == "1"
