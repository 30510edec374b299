"""The agents' side of HTTP/1.1: heads that go out alone, requests in their order, ends that are told and held to."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from proxy import connection as connections
from tests.proxy.conftest import Started
from tests.proxy.fake_engine import FakeEngine, Seen, replays
from tests.proxy.raw import connection, exchange, post, statuses, until_quiet

BODY: dict[str, Any] = {"model": "my-policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}
RAW = json.dumps(BODY).encode()
PLAIN, STREAM = "vllm/chat-plain-length-nostream", "vllm/chat-plain-length-stream"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


async def test_the_head_goes_out_while_the_first_token_is_still_to_come(started: Started) -> None:
    """An agent with a bound on the time to the head of an answer sees the engine's own."""
    more = asyncio.Event()

    async def answer(seen: Seen) -> Any:
        yield HEAD
        await more.wait()
        yield b"data: [DONE]\n\n"

    async with FakeEngine(answer) as engine, started(engine.url) as bench, connection(bench.proxy.port) as (reader, w):
        w.write(post({**BODY, "stream": True}))
        got = await until_quiet(reader)
        assert statuses(got) == [200] and got.endswith(b"\r\n\r\n") and b"[DONE]" not in got
        more.set()
        assert (await until_quiet(reader)).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_client_of_http_1_0_gets_no_chunks_and_the_end_of_the_connection(started: Started) -> None:
    async with FakeEngine(replays(STREAM)) as engine, started(engine.url) as bench:
        data = post({**BODY, "stream": True}, "connection: keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        async with connection(bench.proxy.port) as (reader, writer):
            writer.write(data)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")  # to the end
    assert b"transfer-encoding" not in head and b"connection: close" in head
    assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")


async def test_a_head_request_has_no_body(started: Started) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        got = await exchange(
            bench.proxy.port, b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n"
        )
    first, second = got.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert first.endswith(b"\r\n\r\n") and second.endswith(b'{"status":"ok"}')


async def test_what_came_whole_before_garbage_is_answered(started: Started) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        for garbage in (b"\x00\x01 nonsense\r\n\r\n", post(b"zz\r\n", "transfer-encoding: chunked")):
            async with connection(bench.proxy.port) as (reader, writer):
                writer.write(post(BODY) + garbage)
                async with asyncio.timeout(5):
                    assert statuses(await reader.read()) == [200]  # and the connection is over
        assert len(engine.calls) == 2


async def test_garbage_in_a_body_that_is_waited_for_is_400_and_no_call(started: Started) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        async with connection(bench.proxy.port) as (reader, writer):
            writer.write(post(b"5\r\n{}   \r\n", "transfer-encoding: chunked"))
            await asyncio.sleep(0.1)
            writer.write(b"nonsense\r\n")
            async with asyncio.timeout(5):
                assert statuses(await reader.read()) == [400]
        assert engine.calls == [] and bench.calls() == []


async def test_a_request_that_says_close_is_the_last_that_is_answered(started: Started) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        async with connection(bench.proxy.port) as (reader, writer):
            writer.write(post(BODY, "connection: close") + post(BODY))
            async with asyncio.timeout(5):
                got = await reader.read()
        assert statuses(got) == [200] and b"\r\nconnection: close\r\n" in got
        assert len(engine.calls) == 1


async def test_a_body_that_trickles_on_after_its_answer_ends_its_connection(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LINGER", 0.3)
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        async with connection(bench.proxy.port) as (reader, writer):
            writer.write(post(b"", "content-length: 1000", path="/v1/embeddings"))
            assert statuses(await until_quiet(reader, 0.1)) == [404]

            async def trickle() -> None:
                while True:
                    writer.write(b" ")
                    await asyncio.sleep(0.05)

            trickling = asyncio.ensure_future(trickle())
            async with asyncio.timeout(5):
                assert await reader.read() == b""
            trickling.cancel()


async def test_a_body_that_comes_whole_after_its_answer_leaves_its_connection_open(started: Started) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        async with connection(bench.proxy.port) as (reader, writer):
            writer.write(post(b"", f"content-length: {len(RAW)}", path="/v1/embeddings"))
            assert statuses(await until_quiet(reader)) == [404]
            writer.write(RAW + post(BODY))
            assert statuses(await until_quiet(reader)) == [200]


async def test_requests_of_an_agent_that_reads_no_answers_wait(started: Started) -> None:
    """Answers that nobody takes must not pile up in memory: what is not written is not asked either."""

    async def large(seen: Seen) -> Any:
        body = json.dumps({"choices": [], "x": "y" * (1 << 20)}).encode()
        yield b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)

    async with FakeEngine(large) as engine, started(engine.url) as bench:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.proxy.port, limit=1 << 12)
        writer.write(post(BODY) * 50)
        await asyncio.sleep(1)
        asked = len(engine.calls)
        assert asked < 20
        got = 0
        async with asyncio.timeout(20):
            while got < 50:
                got += (await reader.read(1 << 20)).count(b"HTTP/1.1 200")
        writer.transport.abort()
        assert len(engine.calls) == 50


async def test_the_last_answer_before_a_stop_says_that_it_is_the_last(started: Started) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def slow(seen: Seen) -> Any:
        begun.set()
        await go.wait()
        async for piece in replays(PLAIN)(seen):
            yield piece

    async with FakeEngine(slow) as engine:
        async with started(engine.url) as bench:
            reader, writer = await asyncio.open_connection("127.0.0.1", bench.proxy.port)
            writer.write(post(BODY))
            await begun.wait()
            asyncio.get_running_loop().call_later(0.2, go.set)
        async with asyncio.timeout(5):
            got = await reader.read()
        writer.close()
    assert statuses(got) == [200] and b"\r\nconnection: close\r\n" in got
