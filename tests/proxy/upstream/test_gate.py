"""Engines are paused while a trainer changes weights: calls wait at the proxy, and nothing breaks by that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture.journal.call import Call
from capture.journal.journal import JournalReader
from proxy import Proxy, Settings, serve
from tests.proxy.conftest import Started
from tests.proxy.fake_engine import SSE_HEAD, FakeEngine, Seen, chunk, replays, transcript, whole

CHAT: dict[str, Any] = {"model": "my-policy", "messages": [{"role": "user", "content": "Name two colours."}]}
PLAIN, STREAM = "vllm/chat-plain-length-nostream", "vllm/chat-plain-length-stream"
GEMINI = {"contents": [{"role": "user", "parts": [{"text": "Name two colours."}]}]}
#: What each dialect asks, whole and streamed.
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "responses": ("/v1/responses", {"model": "m", "input": "Name two colours."}),
    "responses stream": ("/v1/responses", {"model": "m", "input": "Name two colours.", "stream": True}),
    "messages": ("/v1/messages", {**CHAT, "max_tokens": 10}),
    "messages stream": ("/v1/messages", {**CHAT, "max_tokens": 10, "stream": True}),
    "gemini": ("/v1beta/models/m:generateContent", GEMINI),
    "gemini stream": ("/v1beta/models/m:streamGenerateContent?alt=sse", GEMINI),
}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def held(proxy: Proxy, calls: int) -> None:
    """Returns when so many calls wait."""
    await until(lambda: proxy.sessions.default is not None and proxy.sessions.default.replicas.gate.waiting == calls)


async def test_calls_wait_while_engines_are_paused_and_are_made_to_the_version_they_resume_with(
    started: Started,
) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url, policy_version="7") as bench:
        assert (await bench.client.post("/chat/completions", json=CHAT)).status_code == 200
        assert await bench.proxy.pause(5) == 0
        waiting = [asyncio.ensure_future(bench.client.post("/chat/completions", json=CHAT)) for _ in range(3)]
        await held(bench.proxy, 3)
        assert len(engine.calls) == 1 and not any(call.done() for call in waiting)
        await bench.proxy.resume("8")
        assert [got.status_code for got in await asyncio.gather(*waiting)] == [200] * 3
        calls = bench.calls()
    assert [call.metadata["policy_version"] for call in calls] == ["7", "8", "8", "8"]
    assert all(call.metadata["policy_version_end"] is None and call.capture.complete for call in calls if call.capture)
    assert "held_ms" not in calls[0].metadata
    assert all(0 < call.metadata["held_ms"] <= call.metadata["ttft_ms"] for call in calls[1:])


@pytest.mark.parametrize("request_of", REQUESTS)
async def test_a_paused_call_of_any_dialect_is_whole_and_a_stream_gets_keep_alives(
    started: Started, request_of: str
) -> None:
    path, body = REQUESTS[request_of]
    streamed = "stream" in request_of
    engine_answers = replays(STREAM if streamed else PLAIN)
    async with FakeEngine(engine_answers) as engine, started(engine.url, keepalive=0.01) as bench:
        root = bench.proxy.base_url.removesuffix("/v1")
        direct = await bench.client.post(root + path, json=body)
        await bench.proxy.pause(0)
        if streamed:
            async with bench.client.stream("POST", root + path, json=body) as answer:
                pieces = answer.aiter_bytes()
                first = await anext(pieces)  # while it is held
                assert first and len(engine.calls) == 1
                await bench.proxy.resume()
                text = (first + b"".join([piece async for piece in pieces])).decode()
            assert (answer.status_code, len(engine.calls)) == (200, 2)
            kept = [event for event in direct.text.split("\n\n")[-3:] if event]
            assert kept[-1].split('"')[0] in text, "the end of the reply came"
        else:
            waiting = asyncio.ensure_future(bench.client.post(root + path, json=body))
            await held(bench.proxy, 1)
            await bench.proxy.resume()
            assert (await waiting).status_code == direct.status_code == 200
        calls = bench.calls()
    assert [call.outcome for call in calls] == ["ok", "ok"]
    assert all(call.capture is not None and call.capture.complete for call in calls)


async def test_a_pause_waits_for_calls_in_flight_and_says_how_many_are_left(started: Started) -> None:
    go_on = asyncio.Event()

    async def slow(seen: Seen) -> AsyncIterator[bytes]:
        await go_on.wait()
        yield whole(200, transcript(PLAIN)[1])

    async with FakeEngine(slow) as engine, started(engine.url, policy_version="7") as bench:
        running = asyncio.ensure_future(bench.client.post("/chat/completions", json=CHAT))
        await until(lambda: len(engine.calls) == 1)
        assert await bench.proxy.pause(0.05) == 1
        pausing = asyncio.ensure_future(bench.proxy.pause(10))
        await asyncio.sleep(0)
        go_on.set()
        assert await pausing == 0
        assert (await running).status_code == 200, "it ends as it would have"
        await bench.proxy.resume("8")
        (call,) = bench.calls()
    assert (call.metadata["policy_version"], call.metadata["policy_version_end"]) == ("7", None)


async def test_an_agent_that_leaves_while_its_call_is_paused_leaves_nothing_to_train_on(started: Started) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        await bench.proxy.pause(0)
        with pytest.raises(httpx.ReadTimeout):
            await bench.client.post("/chat/completions", json=CHAT, timeout=0.1)
        (call,) = await bench.recorded()
        await bench.proxy.resume()
        assert (await bench.client.post("/chat/completions", json=CHAT)).status_code == 200
        assert len(engine.calls) == 1
    assert call.outcome == "aborted" and call.metadata["held_ms"] >= 90
    assert call.capture is not None and {why.code for why in call.capture.unavailable.values()} == {"never_sent"}


async def test_what_an_engine_is_waited_for_does_not_count_while_it_is_paused(started: Started) -> None:
    """A trainer may freeze calls in flight (vLLM's `pause?mode=keep`): silence is then no fault of the engine's."""
    frozen, thawed = asyncio.Event(), asyncio.Event()

    async def frozen_twice(seen: Seen) -> AsyncIterator[bytes]:
        """Before its first byte, and in the middle of its stream."""
        data = transcript(STREAM)[1]
        await freeze()
        yield SSE_HEAD + chunk(data[:700])
        await freeze()
        yield chunk(data[700:]) + chunk(b"")

    async def freeze() -> None:
        frozen.set()
        await thawed.wait()
        thawed.clear()

    timeouts = {"first_byte_timeout": 0.3, "idle_timeout": 0.3}
    async with FakeEngine(frozen_twice) as engine, started(engine.url, **timeouts) as bench:
        call = asyncio.ensure_future(bench.client.post("/chat/completions", json={**CHAT, "stream": True}))
        for _ in range(2):
            await asyncio.wait_for(frozen.wait(), 10)
            frozen.clear()
            assert await bench.proxy.pause(0) == 1
            await asyncio.sleep(0.5)  # longer than either time-out
            await bench.proxy.resume()
            thawed.set()
        assert (await call).text.rstrip().endswith("[DONE]")
        (recorded,) = bench.calls()
        assert recorded.outcome == "ok"
        late = await bench.client.post("/chat/completions", json={**CHAT, "stream": True})
        assert late.status_code == 504 and "within 0.3 s" in late.text, "without a pause it does count"


async def test_a_proxy_that_stops_while_its_engines_are_paused_refuses_what_waits_at_once(tmp_path: Path) -> None:
    settings = Settings(upstream=["http://127.0.0.1:1/v1"], out=tmp_path, probe=False, grace=30)
    async with httpx.AsyncClient(timeout=20) as client:
        async with serve(settings) as proxy:
            await proxy.pause(0)
            call = asyncio.ensure_future(client.post(f"{proxy.base_url}/chat/completions", json=CHAT))
            await held(proxy, 1)
        answer = await call
    assert answer.status_code == 503 and "is being stopped while its engines are paused" in answer.text
    (line,) = JournalReader(tmp_path / "default/trajectory/llm_trajectory.jsonl")
    assert line.capture is not None and line.capture.unavailable["logprobs"].code == "refused_by_proxy"


async def test_questions_that_are_not_calls_wait_too(started: Started) -> None:
    """An engine that is being started again has no /v1/models, and an agent that asks first would give up."""
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        await bench.proxy.pause(0)
        named = bench.proxy.base_url.replace("/v1", "/s/unopened/v1")
        asked = [asyncio.ensure_future(bench.client.get(f"{base}/models")) for base in (bench.proxy.base_url, named)]
        await held(bench.proxy, 2)
        assert engine.seen == []
        await bench.proxy.resume()
        assert [got.status_code for got in await asyncio.gather(*asked)] == [200, 200]


@asynccontextmanager
async def admin_of(engine: FakeEngine, out: Path) -> AsyncIterator[tuple[Proxy, httpx.AsyncClient]]:
    settings = Settings(upstream=[engine.url], out=out, probe=False, admin_port=0, admin_key="admin")
    async with serve(settings) as proxy:
        headers = {"authorization": "Bearer admin"}
        async with httpx.AsyncClient(base_url=proxy.admin_url or "", headers=headers, timeout=20) as admin:
            yield proxy, admin


async def test_the_admin_routes_pause_and_resume(tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, admin_of(engine, tmp_path) as (proxy, admin):
        for body, words in (
            ({"wait": "soon"}, "`wait` is a number of seconds"), ({"wait": -1}, "`wait` is"), ({"wait": 1e9}, "3600"),
            ({"wait": True}, "`wait` is"), ([], "not a JSON object"),
        ):  # fmt: skip
            refused = await admin.post("/pause", json=body)
            assert refused.status_code == 400 and words in refused.json()["error"]["message"]
        assert (await admin.post("/pause", headers={"authorization": "Bearer x"})).status_code == 401
        assert (await admin.post("/pause")).json() == {"in_flight": 0}
        call = asyncio.ensure_future(admin.post(f"{proxy.base_url}/chat/completions", json=CHAT))
        await held(proxy, 1)
        assert "capture_held_calls 1.0" in (await admin.get("/metrics")).text
        assert (await admin.post("/pause", json={"wait": 1})).json() == {"in_flight": 0}, "twice is as once"
        assert (await admin.post("/resume", json={"version": True})).status_code == 400
        assert not call.done()
        assert (await admin.post("/resume", json={"version": 8})).json() == {"paused": False}
        assert (await call).status_code == 200
        assert (await admin.post("/resume")).status_code == 200
        (line,) = calls_of(tmp_path)
    assert line.metadata["policy_version"] == "8"


def calls_of(out: Path) -> list[Call]:
    return list(JournalReader(out / "default/trajectory/llm_trajectory.jsonl"))
