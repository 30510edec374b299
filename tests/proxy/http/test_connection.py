"""The agents' side of HTTP/1.1: heads that go out alone, requests in their order, ends that are told and held to."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.http.client_request import AgentLeft, ClientRequest
from proxy.http.connection import Connection, Handler
from proxy.http.limits import Limits
from proxy.http.listener import Listener
from tests.examples import examples
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
                async with asyncio.timeout(60):
                    assert statuses(await reader.read()) == [200]  # and the connection is over
        assert len(engine.calls) == 2


async def test_garbage_in_a_body_that_is_waited_for_is_400_and_no_call(started: Started) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        async with connection(bench.proxy.port) as (reader, writer):
            writer.write(post(b"5\r\n{}   \r\n", "transfer-encoding: chunked"))
            await asyncio.sleep(0.1)
            writer.write(b"nonsense\r\n")
            async with asyncio.timeout(60):
                assert statuses(await reader.read()) == [400]
        assert engine.calls == [] and bench.calls() == []


async def test_a_request_that_says_close_is_the_last_that_is_answered(started: Started) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        async with connection(bench.proxy.port) as (reader, writer):
            writer.write(post(BODY, "connection: close") + post(BODY))
            async with asyncio.timeout(60):
                got = await reader.read()
        assert statuses(got) == [200] and b"\r\nconnection: close\r\n" in got
        assert len(engine.calls) == 1


async def test_a_body_that_trickles_on_after_its_answer_ends_its_connection(started: Started) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url, limits=Limits(linger_time=0.3)) as bench:
        async with connection(bench.proxy.port) as (reader, writer):
            writer.write(post(b"", "content-length: 1000", path="/v1/embeddings"))
            assert statuses(await until_quiet(reader, 0.1)) == [404]

            async def trickle() -> None:
                while True:
                    writer.write(b" ")
                    await asyncio.sleep(0.05)

            trickling = asyncio.ensure_future(trickle())
            async with asyncio.timeout(60):
                with suppress(ConnectionResetError):  # it wrote once more
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
        async with asyncio.timeout(60):
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
        async with asyncio.timeout(60):
            got = await reader.read()
        writer.close()
    assert statuses(got) == [200] and b"\r\nconnection: close\r\n" in got


@pytest.mark.parametrize("offer", ["upgrade: h2c", "UPGRADE: h2c"])
@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_an_offer_of_another_protocol_costs_no_body(started: Started, offer: str, size: int) -> None:
    """Java's client offers HTTP/2 with its POST; the parser would take the body for that."""
    data = post(BODY, "connection: Upgrade, HTTP2-Settings", "http2-settings: AAMA", "x-long: " + "y" * 9000, offer) * 2
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        async with connection(bench.proxy.port) as (reader, writer):
            for at in range(0, len(data), size):
                writer.write(data[at : at + size])
                if size < 10 and at % 50 == 0:
                    await asyncio.sleep(0)
            assert statuses(await until_quiet(reader)) == [200, 200]
        assert [call.body["messages"] for call in engine.calls] == [BODY["messages"]] * 2
        assert "upgrade" not in engine.calls[0].headers


@pytest.mark.parametrize("large", [70_000, 300_000])
async def test_an_agent_that_leaves_is_noticed_however_large_its_request_was(started: Started, large: int) -> None:
    async def waits(seen: Seen) -> Any:
        await asyncio.wait_for(seen.gone.wait(), 5)
        if False:
            yield

    async with FakeEngine(waits) as engine, started(engine.url) as bench:
        async with connection(bench.proxy.port) as (_, writer):
            writer.write(post({**BODY, "x": "y" * large}))
            async with asyncio.timeout(60):
                while not engine.calls:
                    await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            await engine.calls[0].gone.wait()
        assert (await bench.recorded())[0].outcome == "aborted"


async def test_one_that_asks_before_it_sends_and_is_refused_is_on_its_last_request(started: Started) -> None:
    """It need not send that body: what comes next must not be taken for one."""
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        for version, promise in ((b"1.1", [100, 200]), (b"1.0", [200])):
            data = post(BODY, "expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/" + version)
            head, end, body = data.partition(b"\r\n\r\n")
            async with connection(bench.proxy.port) as (reader, writer):
                writer.write(head + end)
                got = await reader.readuntil(b"\r\n\r\n") if 100 in promise else b""
                writer.write(body)
                assert statuses(got + await until_quiet(reader)) == promise
        got = await exchange(bench.proxy.port, head.replace(b"/v1/chat/completions", b"/v1/embeddings") + end)
        assert statuses(got) == [404] and b"connection: close" in got


# however the bytes come


REQUESTS = (
    post(BODY), post(RAW, "x-a: b", path="/v1/completions"), b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
    post(b"3\r\nabc\r\n4;x=y\r\ndefg\r\n0\r\nx-trailer: 1\r\n\r\n", "transfer-encoding: chunked"),
    post(b"z" * 100_000), b"\r\n" + post(b""),
)  # fmt: skip


class Wire(asyncio.Transport):
    """A double of a connection's transport: what was written, and whether reading is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reading = True
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def pause_reading(self) -> None:
        assert self.reading and not self.closed
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading and not self.closed
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close


async def echo(agent: ClientRequest) -> None:
    try:
        body = await agent.body(1 << 20)
    except AgentLeft:
        return
    names = b",".join(sorted(name for name, _ in agent.headers))
    agent.answer(200, [], b"%s %s %s %d %s" % (agent.method.encode(), agent.target, names, len(body), body[:9]))


async def replies(pieces: list[bytes]) -> tuple[bytes, bool]:
    """What a connection writes in reply to `pieces`, each given when it reads, and whether it is over then."""
    wire, tasks = Wire(), set[asyncio.Task[None]]()
    connected = Connection(echo, set(), tasks, Limits())
    connected.connection_made(wire)
    for piece in pieces:
        connected.data_received(piece)
        async with asyncio.timeout(60):
            while not (wire.reading or wire.closed):
                await asyncio.sleep(0)
        if wire.closed:
            break
    for _ in range(30):  # more turns of the loop than an answer takes
        await asyncio.sleep(0)
    connected.connection_lost(None)
    await asyncio.gather(*tasks)
    return wire.written, wire.closed


async def slow(agent: ClientRequest) -> None:
    await asyncio.sleep(0.02)
    await echo(agent)


async def refused(agent: ClientRequest) -> None:
    agent.answer(404, [], b"")


@asynccontextmanager
async def connected(handler: Handler) -> AsyncIterator[tuple[Connection, Wire]]:
    wire, tasks = Wire(), set[asyncio.Task[None]]()
    conn = Connection(handler, set(), tasks, Limits())
    conn.connection_made(wire)
    yield conn, wire
    conn.connection_lost(None)
    await asyncio.gather(*tasks)


async def turns(count: int = 30) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def test_garbage_behind_an_answer_that_came_early_is_the_end_and_no_second_answer() -> None:
    async with connected(refused) as (conn, wire):
        conn.data_received(post(b"", "transfer-encoding: chunked"))
        await turns()
        conn.data_received(b"nonsense\r\n")
        assert statuses(wire.written) == [404] and wire.closed


async def test_a_head_without_end_behind_a_request_does_not_take_its_answer() -> None:
    async with connected(slow) as (conn, wire):
        conn.data_received(GET + b"GET / HTTP/1.1\r\nhost: x\r\n")
        for _ in range(40):
            if wire.reading:
                conn.data_received(b"x-y: " + b"z" * 8000 + b"\r\n")
        await asyncio.sleep(0.05)
        await turns()
        assert statuses(wire.written) == [200] and wire.closed


@pytest.mark.parametrize("framing", [b"0\r\nx: ", b"5;x=", b"0000"])
async def test_trailers_and_chunks_without_end_are_cut_off(framing: bytes) -> None:
    """The parser keeps a trailer as long as it grows; what counts as body has another bound."""
    async with connected(echo) as (conn, wire):
        conn.data_received(post(b"3\r\nabc\r\n" + framing, "transfer-encoding: chunked"))
        sent = 0
        while not wire.closed and sent < 4 << 20:
            conn.data_received(b"0" * 60_000)
            sent += 60_000
            await turns()
        assert statuses(wire.written) == [431] and sent < 400_000


async def test_a_request_of_very_many_headers_is_refused() -> None:
    async with connected(echo) as (conn, wire):
        conn.data_received(post(b"", *["a:b"] * 900))
        await turns()
        conn.data_received(post(b"", *["a:b"] * 1100))
        await turns()
        assert statuses(wire.written) == [200, 431] and wire.closed


async def test_more_requests_are_read_only_when_none_waits() -> None:
    """Each answer let another piece be read, of thousands of requests, while the others waited."""
    async with connected(slow) as (conn, wire):
        conn.data_received(GET * 5)
        answers = 0
        while answers < 5:
            await asyncio.sleep(0.002)
            answers = len(statuses(wire.written))
            assert wire.reading == (answers >= 4)


async def test_of_very_many_requests_at_once_the_first_are_answered() -> None:
    async with connected(echo) as (conn, wire):
        conn.data_received(GET * 200)
        await turns(1000)
        assert statuses(wire.written) == [200] * 200 and not wire.closed
        conn.data_received(GET * 10_000)
        await turns(1000)
        assert statuses(wire.written) == [200] * 201 and wire.written.count(b"connection: close") == 1 and wire.closed


async def test_a_closed_connection_whose_last_bytes_nobody_reads_ends() -> None:
    """On real sockets: closing waits for what is written, without end if the client never reads it."""
    open_connections: set[Connection] = set()

    async def much(agent: ClientRequest) -> None:
        agent.answer(200, [], b"x" * (60 << 20) if agent.target == b"/much" else b"y" * 20_000)

    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(much, open_connections, set(), Limits(unread_time=0.3)), "127.0.0.1", 0
    )
    async with server, connection(server.sockets[0].getsockname()[1]) as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /much HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        async with asyncio.timeout(60):
            while not open_connections or next(iter(open_connections)).has_room:
                await asyncio.sleep(0.01)
        (conn,) = open_connections
        conn.resume_writing()  # as if so much had been taken that the rest is little
        async with asyncio.timeout(60):
            while open_connections:
                await asyncio.sleep(0.01)


async def test_an_answer_that_is_still_being_read_when_the_proxy_stops_comes_whole() -> None:
    async def much(agent: ClientRequest) -> None:
        agent.answer(200, [], b"x" * (16 << 20))

    listener = Listener(much)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        await listener.listen([listening])
        async with connection(listening.getsockname()[1]) as (reader, writer):
            writer.write(GET)
            got = await reader.read(100)
            closing = asyncio.ensure_future(listener.close(60))
            await asyncio.sleep(0.1)
            assert not closing.done()
            while data := await reader.read(1 << 20):
                got += data
            await asyncio.wait_for(closing, 60)
    assert got.endswith(b"\r\n\r\n" + b"x" * (16 << 20)) and not listener.connections


async def test_a_stop_ends_what_waits_for_its_turn() -> None:
    async def streams(agent: ClientRequest) -> None:
        agent.start(200, [])
        await asyncio.sleep(0.02)
        agent.end(b"all")

    async with connected(streams) as (conn, wire):
        conn.data_received(GET * 3)
        await turns()
        conn.shutdown()
        await asyncio.sleep(0.05)
        assert statuses(wire.written) == [200] and wire.closed


@pytest.mark.parametrize("data", [post(b"x" * 100, "connection: close"), post(b"", "content-length: 9"), GET * 3])
async def test_a_connection_that_is_lost_anywhere_leaves_no_garbage(data: bytes) -> None:
    """What only the collector frees stays for as long as that does not run: a piece of a body each."""
    gc.collect()
    gc.disable()
    try:
        for at in range(1, len(data) + 1):
            async with connected(echo) as (conn, _):
                conn.data_received(data[:at])
                await turns(3)
            await turns(3)
        del conn
        assert [each for each in gc.get_objects() if isinstance(each, Connection)] == []
    finally:
        gc.enable()


@examples(100)
@given(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=5), st.lists(st.integers(0, 1 << 20), max_size=8))
async def test_requests_are_answered_the_same_wherever_their_bytes_are_split(
    requests: list[bytes], cuts: list[int]
) -> None:
    data = b"".join(requests)
    at = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    whole = await replies(requests)
    assert whole[0].count(b"HTTP/1.1 200") == len(requests)
    assert await replies([data[start:end] for start, end in pairwise(at)]) == whole


@examples(200)
@given(st.sampled_from(REQUESTS), st.integers(0, 400), st.binary(min_size=1, max_size=6), st.lists(st.integers(0, 999)))
async def test_any_input_is_answered_or_refused(data: bytes, at: int, put: bytes, cuts: list[int]) -> None:
    """A byte that is wrong anywhere: an answer of HTTP, or the end of the connection, and no fault of ours."""
    data = data[:at] + put + data[at + len(put) :]
    places = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    written, _ = await replies([data[start:end] for start, end in pairwise(places)])
    assert set(statuses(written)) <= {200, 400, 417, 501, 505}
