"""The proxy measures what its engines' logprobs mean, and each call's line says it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from proxy import Proxy, Settings, serve
from proxy.upstream import probe
from tests.capture.engines.logprob_modes import PEAKED, alternatives, is_measuring
from tests.proxy.conftest import Bench, Started
from tests.proxy.fake_engine import Answer, FakeEngine, Seen, transcript, whole

USER = {"model": "my-policy", "messages": [{"role": "user", "content": "Name two colours."}], "max_tokens": 10}
CHAT = transcript("vllm/chat-plain-length-nostream")[1]


def samples(mode: str, hold: Callable[[], Any] | None = None) -> Answer:
    """Answers the calls that measure as an engine of that mode does; all others with a recorded chat."""

    async def answer(seen: Seen) -> AsyncIterator[bytes]:
        if is_measuring(seen.body):
            if hold is not None:
                await hold()
            refused = {"error": {"message": "top_logprobs is too high"}}
            yield whole(400, refused) if mode == "refuses" else whole(200, alternatives(PEAKED, mode, seen.body))
        else:
            yield whole(200, CHAT)

    return answer


async def settled(proxy: Proxy, source: str = "probe") -> dict[str, str]:
    """What the proxy says of its engine's logprobs, once that is from `source`."""
    async with asyncio.timeout(10):
        while (meaning := await proxy.logprobs()) is None or meaning["source"] != source:
            await asyncio.sleep(0.01)
    return meaning


def meanings(bench: Bench) -> list[dict[str, str]]:
    return [call.metadata["logprobs"] for call in bench.calls()]


@pytest.mark.parametrize(
    ("mode", "temperature", "truncation"),
    [("raw", "not_applied", "not_applied"), ("processed", "applied", "applied")],
)
async def test_a_call_records_what_was_measured(started: Started, mode: str, temperature: str, truncation: str) -> None:
    wanted = {"temperature": temperature, "truncation": truncation, "values": "logprobs", "source": "probe"}
    async with FakeEngine(samples(mode)) as engine, started(engine.url, measure_logprobs=True) as bench:
        assert await settled(bench.proxy) == wanted
        await bench.client.post("/chat/completions", json=USER)
    assert meanings(bench) == [wanted]
    assert len([seen for seen in engine.calls if is_measuring(seen.body)]) == 3
    assert bench.call().capture is not None and bench.call().capture.complete  # type: ignore[union-attr]


async def test_a_call_does_not_wait_for_the_measuring_and_has_the_default(started: Started) -> None:
    gate = asyncio.Event()
    async with (
        FakeEngine(samples("processed", gate.wait)) as engine,
        started(engine.url, measure_logprobs=True) as bench,
    ):
        await bench.client.post("/chat/completions", json=USER)
        gate.set()
        await settled(bench.proxy)
        await bench.client.post("/chat/completions", json=USER)
    assert [meaning["source"] for meaning in meanings(bench)] == ["engine default", "probe"]
    assert [meaning["temperature"] for meaning in meanings(bench)] == ["not_applied", "applied"]


async def test_an_engine_that_refuses_is_asked_once_and_has_its_default(started: Started) -> None:
    async with FakeEngine(samples("refuses")) as engine, started(engine.url, measure_logprobs=True) as bench:
        for _ in range(3):
            await bench.client.post("/chat/completions", json=USER)
    assert {meaning["source"] for meaning in meanings(bench)} == {"engine default"}
    assert len([seen for seen in engine.calls if is_measuring(seen.body)]) == 1


async def test_nothing_is_measured_unless_it_is_asked_for(started: Started) -> None:
    async with FakeEngine(samples("processed")) as engine, started(engine.url) as bench:
        await bench.client.post("/chat/completions", json=USER)
    assert len(engine.calls) == 1 and meanings(bench)[0]["source"] == "engine default"


async def test_logits_are_not_captured_as_logprobs(started: Started) -> None:
    """Their values alone, all below 0, do not show it."""
    async with FakeEngine(samples("raw_logits")) as engine, started(engine.url, measure_logprobs=True) as bench:
        await settled(bench.proxy)
        await bench.client.post("/chat/completions", json=USER)
    capture = bench.call().capture
    assert capture is not None and not capture.complete
    assert {name: why.code for name, why in capture.unavailable.items()} == {"logprobs": "logits_not_logprobs"}


async def test_a_replica_that_differs_is_named_in_the_log_and_in_its_calls(
    started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeEngine(samples("raw")) as first, FakeEngine(samples("processed")) as second:
        async with started(first.url, second.url, measure_logprobs=True) as bench:
            async with asyncio.timeout(10):
                while not (named := [r for r in caplog.messages if "mean something else" in r]):
                    await asyncio.sleep(0.01)
            for name in ("a", "b"):
                await bench.client.post(f"{bench.proxy.base_url[:-3]}/s/{name}/v1/chat/completions", json=USER)
    assert named == [
        "replica-1: its logprobs mean something else (temperature applied, truncation applied) than those of replica-0 "
        "(temperature not applied, truncation not applied): start both engines alike"
    ]
    lines = [
        json.loads(path.read_text())
        for path in bench.journal.parents[2].rglob("llm_trajectory.jsonl")
        if path.stat().st_size
    ]
    found = {line["metadata"]["upstream"]: line["metadata"]["logprobs"].get("differs_from") for line in lines}
    assert found == {"replica-0": None, "replica-1": "replica-0"}


async def test_an_engine_that_came_back_different_is_measured_again(started: Started) -> None:
    async with FakeEngine(samples("raw")) as engine, started(engine.url, measure_logprobs=True) as bench:
        await settled(bench.proxy)
        await engine.stop()
        assert (await bench.client.post("/chat/completions", json=USER)).status_code == 502
        engine.answers = [samples("processed")]
        await engine.start(engine.port)
        await bench.client.post("/chat/completions", json=USER)
        assert (await settled(bench.proxy))["temperature"] == "applied"


async def test_an_engine_that_comes_late_is_measured_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "RETRY_INTERVAL", 0.01)
    engine = FakeEngine(samples("temperature"))
    await engine.start()
    await engine.stop()
    async with serve(Settings(upstream=[engine.url], out=tmp_path, probe=False, measure_logprobs=True)) as proxy:
        await asyncio.sleep(0.05)
        await engine.start(engine.port)
        assert (await settled(proxy))["temperature"] == "applied"
    await engine.stop()


async def test_without_an_engine_there_is_nothing_to_say() -> None:
    async with serve(Settings(probe=False)) as proxy:
        assert await proxy.logprobs() is None
