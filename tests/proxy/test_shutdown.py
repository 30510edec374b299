"""SIGTERM under load: what is in flight ends within the grace or is recorded as aborted; exit 0, no traceback."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture.journal.journal import JournalReader
from tests.proxy.fake_engine import Answer, FakeEngine, Seen, replays, streams, transcript
from tests.proxy.test_kill import start_proxy

BODY: dict[str, Any] = {"model": "my-policy", "messages": [{"role": "user", "content": "x"}]}
STREAM = "vllm/chat-plain-length-stream"


async def stopped(
    tmp_path: Path, answer: Answer, *options: str, calls: int = 40, after: float = 0.1, signals: int = 1, **body: Any
) -> tuple[list[Any], list[Any], str, float]:
    """Answers (or errors) that agents got, the journal's calls, what stderr said, the seconds of the stop."""
    async with FakeEngine(answer) as engine:
        proxy, base_url = start_proxy(engine.url, tmp_path, *options)
        try:
            limits = httpx.Limits(max_connections=calls)
            async with httpx.AsyncClient(base_url=base_url, timeout=30, limits=limits) as client:
                sending = [
                    asyncio.ensure_future(client.post("/chat/completions", json={**BODY, **body, "user": str(n)}))
                    for n in range(calls)
                ]
                while len(engine.calls) < calls:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(after)
                began = time.monotonic()
                for _ in range(signals):
                    proxy.send_signal(signal.SIGTERM)
                    await asyncio.sleep(0.05)
                got = await asyncio.gather(*sending, return_exceptions=True)
                result = await asyncio.to_thread(proxy.communicate, timeout=30)
                seconds = time.monotonic() - began
        finally:
            proxy.kill()
    assert proxy.returncode == 0
    assert "Traceback" not in result[1], result[1]
    reader = JournalReader(tmp_path / "default/trajectory/llm_trajectory.jsonl")
    recorded = list(reader)
    assert reader.problems == []
    return got, recorded, result[1], seconds


def slow(seconds: float) -> Answer:
    async def wait(seen: Seen) -> None:
        await asyncio.sleep(seconds)

    _, recorded = transcript(STREAM)
    half = recorded[: recorded.index(b'" popular"')]
    return streams(half[: half.rindex(b"\n\n") + 2], then=wait)


async def test_calls_in_flight_end_and_are_recorded(tmp_path: Path) -> None:
    answer = replays(STREAM, size=400, pause=0.05)
    got, recorded, result, seconds = await stopped(tmp_path, answer, "--grace", "10", stream=True)
    ended = [answer for answer in got if isinstance(answer, httpx.Response) and b"[DONE]" in answer.content]
    assert len(ended) == 40, "each call that had begun ends"
    assert [call.outcome for call in recorded] == ["ok"] * 40
    assert all(call.capture is not None and call.capture.complete for call in recorded)
    assert "stopping" in result and "stopped: 40 calls recorded, 40 complete" in result and seconds < 9


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("signals", [1, 3])
async def test_calls_that_do_not_end_within_the_grace_are_recorded_as_aborted(
    tmp_path: Path, streamed: bool, signals: int
) -> None:
    got, recorded, _, seconds = await stopped(
        tmp_path, slow(30), "--grace", "1", stream=streamed, signals=signals, calls=20
    )
    assert all(isinstance(answer, httpx.HTTPError) or answer.status_code != 200 for answer in got)
    assert [call.outcome for call in recorded] == ["aborted"] * 20
    assert seconds < 6, "the grace is waited for once"
    if streamed:
        assert all(call.capture.completions[0].token_ids for call in recorded), "what had come is kept"


async def test_a_stop_with_nothing_to_do_is_quick_also_with_idle_connections(tmp_path: Path) -> None:
    got, recorded, result, seconds = await stopped(
        tmp_path, replays("vllm/chat-plain-length-nostream"), calls=10, after=0.8
    )
    assert len(recorded) == 10 and all(answer.status_code == 200 for answer in got)
    assert seconds < 3 and "10 complete" in result


async def test_a_stop_while_no_engine_answers_the_probe_is_quick(tmp_path: Path) -> None:
    async with FakeEngine() as gone:
        url = gone.url
    proxy, _ = start_proxy(url, tmp_path, "--probe")
    await asyncio.sleep(0.3)
    proxy.send_signal(signal.SIGINT)
    _, stderr = await asyncio.to_thread(proxy.communicate, timeout=10)
    assert proxy.returncode == 0 and "Traceback" not in stderr
