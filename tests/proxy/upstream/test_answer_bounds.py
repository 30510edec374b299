"""What one answer of an engine may cost: bytes of its head, of one event, seconds until its head is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from proxy.settings import AnswerLimits
from tests.proxy.conftest import Started
from tests.proxy.fake_engine import SSE_HEAD, Answer, FakeEngine, Seen, answers, chunk, whole

CHAT = {"model": "my-policy", "messages": [{"role": "user", "content": "hi"}]}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


def endless(first: bytes, piece: bytes, pause: float = 0) -> Answer:
    """Sends `piece` again and again, until nobody listens."""

    async def answer(seen: Seen) -> AsyncIterator[bytes]:
        yield first
        while True:
            yield piece
            await asyncio.sleep(pause)

    return answer


ENDLESS_HEADS = {
    "header lines": (HEAD, b"x-a: " + b"b" * 1000 + b"\r\n"),
    "one header's value": (HEAD + b"x: ", b"v" * 4096),
    "one header's name": (HEAD, b"v" * 4096),
    "interim answers": (b"", b"HTTP/1.1 102 Processing\r\n\r\n" * 100),
    "interim headers": (b"HTTP/1.1 103 Early Hints\r\n", b"link: " + b"a" * 1000 + b"\r\n"),
    "a reason": (b"HTTP/1.1 200 ", b"O" * 4096),
}
ENDLESS_FRAMES = {
    "chunk extensions": (HEAD + b"transfer-encoding: chunked\r\n\r\n3;", b"a=b;" * 1000),
    "trailers": (HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n", b"x-a: " + b"b" * 1000 + b"\r\n"),
}


@pytest.mark.parametrize("name", [*ENDLESS_HEADS, *ENDLESS_FRAMES])
async def test_what_is_not_a_body_is_bounded(started: Started, name: str) -> None:
    first, piece = {**ENDLESS_HEADS, **ENDLESS_FRAMES}[name]
    async with FakeEngine(endless(first, piece)) as engine, started(engine.url) as bench:
        answer = await bench.client.post("/chat/completions", json=CHAT)
        call = bench.call()
    assert answer.status_code == 502
    assert call.outcome == "error"


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (b"", b"H"),
        (HEAD, b"x: y\r\n"),
        (HEAD + b"x: ", b"v"),
        (b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
)
async def test_a_head_that_trickles_has_one_deadline(started: Started, first: bytes, piece: bytes) -> None:
    async def answer(seen: Seen) -> AsyncIterator[bytes]:
        yield first
        for letter in b"TTP/1.1 200 OK" if piece == b"H" else [0] * 200:
            yield piece if piece != b"H" else (b"H" if letter == 0 else bytes([letter]))
            await asyncio.sleep(0.1)

    began = time.monotonic()
    async with FakeEngine(answer) as engine, started(engine.url, first_byte_timeout=0.4, idle_timeout=60) as bench:
        got = await bench.client.post("/chat/completions", json=CHAT)
    assert got.status_code in (502, 504)
    assert time.monotonic() - began < 15  # 200 pieces take 20 s


@pytest.mark.parametrize("stream", [True, False])
async def test_one_event_without_an_end_is_bounded(started: Started, stream: bool) -> None:
    engine = FakeEngine(endless(SSE_HEAD + chunk(b"data: "), chunk(b"x" * 65536)))
    async with engine, started(engine.url, answer_limits=AnswerLimits(event=1 << 20)) as bench:
        await bench.client.post("/chat/completions", json={**CHAT, "stream": stream})
        (call,) = await bench.recorded()
    assert call.outcome in ("error", "truncated")
    assert call.capture is not None and not call.capture.complete


async def test_a_large_head_and_a_large_event_within_the_bounds_are_taken(started: Started) -> None:
    body = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "x" * (2 << 20)}}]}
    headers = {f"x-{number}": "v" * 1000 for number in range(100)}
    async with FakeEngine(answers(200, body, **headers)) as engine, started(engine.url) as bench:
        answer = await bench.client.post("/chat/completions", json=CHAT)
    assert answer.status_code == 200 and answer.headers["x-99"] == "v" * 1000


async def test_interim_answers_before_the_answer_are_accepted(started: Started) -> None:
    async def answer(seen: Seen) -> AsyncIterator[bytes]:
        yield b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n"
        yield whole(200, {"choices": []})

    async with FakeEngine(answer) as engine, started(engine.url) as bench:
        assert (await bench.client.post("/chat/completions", json=CHAT)).status_code == 200
