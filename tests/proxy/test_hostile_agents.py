"""Whatever an agent sends, it harms nobody but itself: no other call, no other session, no memory without bound."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture.journal.journal import JournalReader
from proxy import Settings, serve
from proxy.upstream.pool import HttpClient
from tests.proxy.conftest import Bench, Started
from tests.proxy.fake_engine import FakeEngine, Seen, answers, chunk, replays, streams, transcript, whole
from tests.proxy.http.test_decompress import bare_deflate
from tests.proxy.raw import connection, exchange, post, statuses, until_quiet

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


BODY: dict[str, Any] = {"model": "my-policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}
RAW = json.dumps(BODY).encode()
PLAIN, STREAM = "vllm/chat-plain-length-nostream", "vllm/chat-plain-length-stream"


def nested(depth: int, opening: str, closing: str) -> bytes:
    return f'{RAW.decode()[:-1]}, "extra": {opening * depth}1{closing * depth}}}'.encode()


@pytest.mark.parametrize("depth", [200, 260, 480, 990, 1100, 20_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
async def test_a_deeply_nested_request_is_answered_and_recorded(
    started: Started, depth: int, opening: str, closing: str
) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        got = await exchange(bench.proxy.port, post(nested(depth, opening, closing)))
        call = bench.call()
        assert isinstance(call.request_body, dict) and call.metadata["call"] == 0
    assert statuses(got) == [200]
    if depth < 900:
        assert call.capture is not None and call.capture.complete


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        (b',"temperature":NaN}', b'"temperature":NaN'),
        (b',"temperature":-Infinity}', b'"temperature":-Infinity'),
        (b',"user":"\\ud800"}', b'"user":"\\ud800"'),
        (b',"seed":' + b"9" * 5000 + b"}", b"9" * 5000),
        (b',"seed":' + b"9" * 30 + b"}", b'"seed":' + b"9" * 30),
        (b',"tools":[{"maximum":-' + b"9" * 20 + b"}]}", b'"maximum":-' + b"9" * 20),
    ],
)
async def test_json_that_only_python_writes_reaches_the_engine_as_it_is(
    started: Started, added: bytes, expected: bytes
) -> None:
    """NaN must not become null: the engine's own error is what the agent would have had."""
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        got = await exchange(bench.proxy.port, post(RAW[:-1] + added))
        assert bench.call().outcome == "ok"
    assert statuses(got) == [200]
    assert expected in engine.calls[0].raw


ODD: list[dict[str, Any]] = [
    {"messages": 5}, {"messages": [5, None, {"content": [5, {"text": []}]}]}, {"logprobs": [], "top_logprobs": {}},
    {"logprobs": {"a": 1}, "top_logprobs": "x"}, {"stream_options": 5, "stream": True}, {"tools": 5, "stop": {}},
    {"model": []}, {"stream": "true"}, {"stream": []}, {"n": "2"}, {"n": 10**12}, {"n": -5}, {"n": 1.5}, {"n": True},
    {"prompt": {}}, {"prompt": [[1, 2], "x", {}]}, {"prompt": [True]}, {"echo": []}, {"use_beam_search": []},
    {"return_token_ids": "yes"}, {"": {"": ""}}, {"token_capture": {"prompt_token_ids": list(range(3000))}},
]  # fmt: skip


async def test_fields_of_wrong_types_are_the_engines_to_judge(started: Started) -> None:
    error = answers(400, {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}})
    async with FakeEngine(error) as engine, started(engine.url) as bench:
        for odd in ODD:
            for path in ("/chat/completions", "/completions"):
                answer = await bench.client.post(path, json={**BODY, **odd})
                assert (answer.status_code, answer.json()["error"]["message"]) == (400, "no")
        calls = bench.calls()
        assert [call.outcome for call in calls] == ["error"] * 2 * len(ODD)
        assert [call.request_body for call in calls] == [{**BODY, **odd} for odd in ODD for _ in range(2)]
        engine.answers = [replays(PLAIN)]
        for odd in ODD:
            answer = await bench.client.post("/chat/completions", json={**BODY, **odd})
            assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]


async def test_chunked_pipelined_and_announced_requests_are_served(started: Started) -> None:
    pieces = b"".join(chunk(RAW[at : at + 7]) for at in range(0, len(RAW), 7)) + b"0\r\n\r\n"
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        port = bench.proxy.port
        assert statuses(await exchange(port, post(pieces, "transfer-encoding: chunked"))) == [200]
        assert statuses(await exchange(port, post(BODY) * 3, 3)) == [200] * 3
        async with connection(port) as (reader, writer):
            writer.write(post(b"", "expect: 100-continue", f"content-length: {len(RAW)}"))
            assert statuses(await until_quiet(reader)) == [100]
            writer.write(RAW)
            assert statuses(await until_quiet(reader)) == [200]
        assert statuses(await exchange(port, post(BODY).replace(b"HTTP/1.1", b"HTTP/1.0"))) == [200]
        assert len(bench.calls()) == len(engine.calls) == 6
    assert {call.raw for call in engine.calls} == {engine.calls[0].raw}


@pytest.mark.parametrize(
    "data",
    [
        post(BODY, "content-length: 5", "content-length: 90"),
        post(b"5\r\nhello\r\n0\r\n\r\n", "content-length: 5", "transfer-encoding: chunked"),
        post(BODY, "x y: 1"),
        post(BODY, "x-y: a\x00b"),
        post(BODY, "x-y: a\n b"),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_smuggled_and_broken_requests_are_400_and_reach_no_engine(started: Started, data: bytes) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        assert statuses(await exchange(bench.proxy.port, data)) == [400]
        assert engine.calls == [] and bench.calls() == []
        assert (await bench.client.post("/chat/completions", json=BODY)).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/v1/models/../../metrics", "/v1/models/%2e%2e/%2e%2e/metrics", "/v1/models/a/%2E./..%2fmetrics",
     "/sessions", "/metrics", "/v1/../sessions", "/s/default/sessions", "/s/..%2f..%2fx/v1/models"],
)  # fmt: skip
async def test_no_path_leads_beyond_the_model_routes(started: Started, tmp_path: Path, path: str) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        got = await exchange(bench.proxy.port, f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    assert statuses(got) == [404]
    assert {seen.path for seen in engine.seen} <= {"/v1/models"}
    assert [path.name for path in (tmp_path / "captures").iterdir()] == ["default"]


@pytest.mark.parametrize(
    "path",
    ["/v1/models/x%20HTTP/1.1%0dx-y:%20z", "/v1/models/org%2fname%3fa=b%23c", "/v1/models/..%2f..%2fsleep"],
)
async def test_a_models_name_reaches_no_other_route_of_the_engine(started: Started, path: str) -> None:
    """Unescaped, a line end in it would be a request of the agent's own making, with the engine's key on it."""
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url, upstream_key="engine-secret") as bench:
        got = await exchange(bench.proxy.port, f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    assert statuses(got) == [404]
    assert [seen.path for seen in engine.seen] == ["/v1/models"]


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_agent_that_sends_too_much_reads_why(started: Started, chunked: bool) -> None:
    """Closing while it still sends would reset the connection before it has read the answer."""
    size = 24 << 20
    data = post(b"x" * size)
    if chunked:
        data = post(b"".join(chunk(b"x" * (1 << 20)) for _ in range(24)) + b"0\r\n\r\n", "transfer-encoding: chunked")
    async with FakeEngine(answers(200, {})) as engine, started(engine.url, max_body_mb=1) as bench:
        got = await exchange(bench.proxy.port, data)
        early = await exchange(bench.proxy.port, post(b"", f"content-length: {size}", "expect: 100-continue"))
    assert statuses(got) == statuses(early) == [413]
    assert b"--max-body-mb" in got and b"connection: close" in got


@pytest.mark.parametrize("coding", ["br", "gzip, zstd", "compress", "x"])
async def test_a_coding_that_is_not_supported_is_415_and_the_error_names_those_that_are(
    started: Started, coding: str
) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        got = await exchange(bench.proxy.port, post(RAW, f"content-encoding: {coding}"))
        assert statuses(got) == [415] and b"send gzip, deflate, zstd or none" in got and engine.calls == []


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (gzip.compress(RAW)[:-9], 400),
        (gzip.compress(RAW)[:20], 400),
        (b"no gzip at all", 400),
        (gzip.compress(RAW[:20]) + gzip.compress(RAW[20:]), 200),
        (gzip.compress(b" " * (64 << 20)), 413),
        (b"", 400),
        (zstd.compress(RAW), 200),
        (zstd.compress(RAW[:20]) + zstd.compress(RAW[20:]), 200),
        (zstd.compress(RAW)[:-1], 400),
        (b"\x28\xb5\x2f\xfd" + b"\0" * 40, 400),
        (zstd.compress(b" " * (64 << 20)), 413),
        (zlib.compress(RAW), 200),
        (bare_deflate(RAW), 200),
        (bare_deflate(RAW)[:-3], 400),
        (bare_deflate(b" " * (64 << 20)), 413),
    ],
)
async def test_compressed_bodies_are_whole_or_refused(started: Started, body: bytes, status: int) -> None:
    coding = {b"\x28\xb5": "zstd", b"\x1f\x8b": "gzip", b"no": "GZip", b"": "gzip"}.get(body[:2], "deflate")
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url, max_body_mb=4) as bench:
        got = await exchange(bench.proxy.port, post(body, f"content-encoding: {coding}"))
        assert statuses(got) == [status]
        assert len(engine.calls) == (status == 200)
    assert all(call.body["messages"] == BODY["messages"] for call in engine.calls)


@pytest.mark.parametrize(
    "headers", [b"x-y: " + b"a" * (8 << 20), b"".join(b"x-%d: a\r\n" % n for n in range(200_000))[:-2]]
)
async def test_endless_headers_are_cut_off(started: Started, headers: bytes) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        async with connection(bench.proxy.port) as (reader, writer):
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + headers + b"\r\n\r\n")
            try:
                got = await until_quiet(reader)
            except ConnectionError:
                got = b""  # the kernel threw the answer away with what was still coming
        assert statuses(got) in ([431], [])
        assert engine.seen == []
        assert (await bench.client.post("/chat/completions", json=BODY)).status_code == 200


async def test_the_first_valid_key_decides_and_none_goes_upstream(tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, serve(Settings(upstream=[engine.url], probe=False)) as proxy:
        first = await proxy.open_session("one", journal=tmp_path / "one.jsonl")
        second = await proxy.open_session("two", journal=tmp_path / "two.jsonl")
        got = await exchange(
            proxy.port,
            post(BODY, f"authorization: Bearer {first.api_key}", f"x-api-key: {second.api_key}",
                 f"x-goog-api-key: {second.api_key}", f"proxy-authorization: Bearer {second.api_key}",
                 f"cookie: k={second.api_key}"),
        )  # fmt: skip
        assert statuses(got) == [200]
        wrong = await exchange(proxy.port, post(BODY, "authorization: Bearer \xff\xfe", "authorization: Basic eDp5"))
        assert statuses(wrong) == [401]
        assert await proxy.session_state(first.id) | {"calls": 1} == await proxy.session_state(first.id)
        assert (await proxy.session_state(second.id))["calls"] == 0
    sent = str(engine.calls[0].headers)
    assert first.api_key not in sent and second.api_key not in sent


async def test_bodies_that_trickle_and_stop_leave_nothing_behind(started: Started) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        before = len(asyncio.all_tasks())
        for cut in (10, 60, 150):
            async with connection(bench.proxy.port) as (_, writer):
                for at in range(0, cut, 10):
                    writer.write(post(BODY)[at : at + 10])
                    await writer.drain()
                    await asyncio.sleep(0.002)
        await settled(lambda: len(asyncio.all_tasks()) <= before)
        assert engine.calls == [] and bench.calls() == []


async def test_a_hundred_agents_that_leave_at_once_leak_nothing(started: Started) -> None:
    _, recorded = transcript(STREAM)
    half = recorded[: recorded.index(b'" popular"')]

    async def wait(seen: Seen) -> None:
        async with asyncio.timeout(60):
            await seen.gone.wait()

    async with FakeEngine(streams(half[: half.rindex(b"\n\n") + 2], then=wait)) as engine:
        async with started(engine.url) as bench:
            await bench.client.get("/models")
            tasks = len(asyncio.all_tasks())

            async def leaves() -> None:
                async with connection(bench.proxy.port) as (reader, writer):
                    writer.write(post({**BODY, "stream": True}))
                    await reader.readuntil(b"data: ")

            await asyncio.gather(*(leaves() for _ in range(100)))
            calls = await bench.recorded(100, seconds=20)
            assert {call.outcome for call in calls} == {"aborted"}
            assert sorted(call.number for call in calls) == list(range(100))
            await settled(lambda: len(asyncio.all_tasks()) <= tasks)
            await settled(lambda: bench.proxy.sessions.default.in_flight == 0)
            await settled(lambda: upstream(bench).open_connections <= 1)


@pytest.mark.slow
async def test_an_agent_that_reads_slowly_does_not_fill_the_proxys_memory(started: Started) -> None:
    """The engine is read no faster than the agent reads; the call still ends well."""
    piece = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * 64_000 + b'"},"finish_reason":null}]}\n\n'
    end = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    sent = 0

    async def huge(seen: Seen) -> Any:
        nonlocal sent
        yield whole(200, b"").split(b"\r\n")[0] + b"\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
        for _ in range(500):
            yield piece
            sent += len(piece)
        yield end

    async with FakeEngine(huge) as engine, started(engine.url, engine="other") as bench:
        async with connection(bench.proxy.port) as (reader, writer):
            reader._limit = 1 << 16  # type: ignore[attr-defined]
            writer.write(post({**BODY, "stream": True}))
            await reader.readuntil(b"data: ")
            await asyncio.sleep(0.5)
            taken = sent
            got = await until_quiet(reader, seconds=5, bound=60)
        await settled(lambda: bench.proxy.sessions.default.in_flight == 0)
        assert bench.call().outcome == "ok"
    assert taken < 20 << 20, "sockets hold a few MiB, the proxy about two"
    assert b"data: [DONE]" in got


async def test_a_half_closed_connection_counts_as_left(started: Started) -> None:
    async def slow(seen: Seen) -> Any:
        await asyncio.sleep(0.3)
        yield whole(200, transcript(PLAIN)[1])

    async with FakeEngine(slow) as engine, started(engine.url) as bench:
        async with connection(bench.proxy.port) as (reader, writer):
            writer.write(post(BODY))
            await settled(lambda: engine.calls)
            writer.write_eof()
            await until_quiet(reader)
        (call,) = await bench.recorded()
    assert call.outcome == "aborted"


async def test_admin_requests_of_wrong_shapes_are_a_sentence(tmp_path: Path) -> None:
    good = {"name": "n", "journal": str(tmp_path / "n.jsonl"), "upstream": "http://127.0.0.1:1/v1"}
    wrong: list[Any] = [
        {"upstream": [5]}, {"upstream": []}, {"upstream": "http://[::1"}, {"engine": "vlm"}, {"top_logprobs": -1},
        {"upstream_key": "a\r\nx: y"}, {"journal": "a\0b"}, {"name": "../x"}, {"name": 5}, {"sampling": []},
        {"upstream": "http://a b/v1"}, {"capture": 1}, {"journal": "/proc/nowhere/x.jsonl"},
    ]  # fmt: skip
    async with serve(Settings(probe=False, admin_port=0, admin_key="admin")) as proxy:
        async with httpx.AsyncClient(
            base_url=proxy.admin_url or "", headers={"authorization": "Bearer admin"}
        ) as admin:
            for fields in wrong:
                answer = await admin.post("/sessions", json={**good, **fields})
                assert answer.status_code in (400, 409), (fields, answer.text)
                assert answer.json()["error"]["message"]
            deep = await admin.post("/sessions", content=b"[" * 100_000)
            assert deep.status_code == 400
            assert (await admin.get("/sessions")).json() == {"sessions": []}


def upstream(bench: Bench) -> HttpClient:
    replica = bench.proxy.sessions.default.replica
    assert replica is not None and isinstance(replica.client, HttpClient)
    return replica.client


async def settled(is_so: Any, seconds: float = 5) -> None:
    async with asyncio.timeout(seconds):
        while not is_so():
            await asyncio.sleep(0.02)


async def test_a_session_closed_under_load_ends_its_calls_or_records_them(tmp_path: Path) -> None:
    """Every call that the engine saw has its line; the key opens nothing afterwards."""
    _, recorded = transcript(PLAIN)

    async def slow(seen: Seen) -> Any:
        await asyncio.sleep(0.01 * (seen.body["user"] % 40))
        yield whole(200, recorded)

    async with FakeEngine(slow) as engine:
        async with serve(Settings(upstream=[engine.url], probe=False, grace=0.2)) as proxy:
            session = await proxy.open_session("one", journal=tmp_path / "one.jsonl")
            async with httpx.AsyncClient(headers={"authorization": f"Bearer {session.api_key}"}) as client:
                url = proxy.base_url + "/chat/completions"
                sending = [asyncio.ensure_future(client.post(url, json={**BODY, "user": n})) for n in range(80)]
                await asyncio.sleep(0.15)
                state = await proxy.close_session(session.id)
                done = await asyncio.gather(*sending, return_exceptions=True)
                assert (await client.post(url, json=BODY)).status_code == 401
    calls = list(JournalReader(tmp_path / "one.jsonl"))
    answered = [reply for reply in done if isinstance(reply, httpx.Response) and reply.status_code == 200]
    assert {call.outcome for call in calls} <= {"ok", "aborted"}
    assert len(calls) == state["calls"] >= len(answered)
    assert len([call for call in calls if call.outcome == "ok"]) >= len(answered)
