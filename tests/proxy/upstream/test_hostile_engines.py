"""Whatever an engine answers, the agent gets what it would have got from it, and complete is not claimed for less."""

from __future__ import annotations

import asyncio
import gzip
import json
import signal
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture.journal.call import Call
from proxy.settings import AnswerLimits
from proxy.upstream.pool import HttpClient
from proxy.upstream.replicas import UNUSED
from tests.proxy.conftest import Bench, Started
from tests.proxy.fake_engine import (
    SSE_HEAD,
    Answer,
    Cut,
    FakeEngine,
    Seen,
    answers,
    chunk,
    replays,
    streams,
    transcript,
    whole,
)
from tests.proxy.raw import exchange, post, statuses
from tests.proxy.test_kill import start_proxy

CHAT: dict[str, Any] = {"model": "my-policy", "messages": [{"role": "user", "content": "Name two colours."}]}
STREAMED = {**CHAT, "stream": True}
PLAIN, STREAM = "vllm/chat-plain-length-nostream", "vllm/chat-plain-length-stream"
WHOLE, EVENTS = transcript(PLAIN)[1], transcript(STREAM)[1]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


def sends(*pieces: bytes, pause: float = 0, close: bool = False) -> Answer:
    """An engine that writes these bytes, whatever they are."""

    async def answer(seen: Seen) -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece
            if pause:
                await asyncio.sleep(pause)
        if close:
            raise Cut

    return answer


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def choice(index: Any = 0, content: str | None = "a", finish: Any = None, **more: Any) -> dict[str, Any]:
    return {"index": index, "delta": {} if content is None else {"content": content}, "finish_reason": finish, **more}


async def asked(started: Started, answer: Answer, body: dict[str, Any], **options: Any) -> tuple[httpx.Response, Call]:
    async with FakeEngine(answer) as engine, started(engine.url, **options) as bench:
        got = await bench.client.post("/chat/completions", json=body)
        return got, bench.call()


def chunks(data: bytes) -> list[Any]:
    return [json.loads(block[6:]) for block in data.split(b"\n\n") if block and b"[DONE]" not in block]


def not_complete(call: Call) -> set[str]:
    assert call.capture is not None and not call.capture.complete
    return {why.code for why in call.capture.unavailable.values()}


# HTTP


@pytest.mark.parametrize(
    "data",
    [b"\x00\xff garbage \r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"SSH-2.0-x\r\n", HEAD + b"content-length: -5\r\n\r\n{}",
     HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}", HEAD[:30], b"HTTP/1.1 101 Switching\r\nupgrade: x\r\n"
     b"connection: upgrade\r\n\r\n", HEAD + b"content-length: 99999\r\n\r\n" + WHOLE,
     HEAD + b"content-encoding: br\r\ncontent-length: 2\r\n\r\n{}"],
)  # fmt: skip
async def test_what_is_not_a_whole_http_answer_is_502_and_no_second_call(
    started: Started, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeEngine(sends(data, close=True)) as engine, started(engine.url) as bench:
        got = await bench.client.post("/chat/completions", json=CHAT)
        call = bench.call()
        assert len(engine.calls) == 1
    assert got.status_code == call.status_code == 502 and call.outcome == "error"
    assert got.json()["error"]["message"] and "callback" not in got.text
    assert call.capture is not None
    details = {why.detail for why in call.capture.unavailable.values()}
    assert details == {got.json()["error"]["message"]}, "what happened, not a 502 that no engine answered"
    assert not [record for record in caplog.records if record.exc_info and "protocol" in record.getMessage()]


@pytest.mark.parametrize(
    "pieces",
    [
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n", whole(200, WHOLE)),
        tuple(whole(200, WHOLE)[at : at + 1] for at in range(len(whole(200, WHOLE)))),
        (HEAD + b"transfer-encoding: Chunked\r\n\r\n%x;a=b\r\n%s\r\n0\r\nx-t: 1\r\n\r\n" % (len(WHOLE), WHOLE),),
        (whole(200, WHOLE) + b"surplus",),
        (whole(200, WHOLE) + whole(200, b'{"stolen": true}'),),
        (whole(200, gzip.compress(WHOLE[:99]) + gzip.compress(WHOLE[99:]), content_encoding="gzip"),),
    ],
    ids=["interim", "trickle", "extensions", "surplus", "second-answer", "gzip-members"],
)
async def test_unusual_but_whole_answers_are_captured(started: Started, pieces: tuple[bytes, ...]) -> None:
    async with FakeEngine(sends(*pieces)) as engine, started(engine.url) as bench:
        for _ in range(3):
            got = await bench.client.post("/chat/completions", json=CHAT)
            assert got.status_code == 200 and got.json()["id"] == json.loads(WHOLE)["id"]
        assert all(call.capture is not None and call.capture.complete for call in bench.calls())
        assert "link" not in got.headers


async def test_an_answer_without_a_length_ends_with_its_connection(started: Started) -> None:
    got, call = await asked(started, sends(HEAD + b"connection: close\r\n\r\n", WHOLE, close=True), CHAT)
    assert got.status_code == 200 and call.capture is not None and call.capture.complete


async def test_a_reset_is_not_an_end_even_if_only_the_connection_shows_it(started: Started) -> None:
    """An answer without a length ends with its connection: with an orderly close, not with a reset."""

    async def resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + b"connection: close\r\n\r\n" + WHOLE[:200])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    server = await asyncio.start_server(resets, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, started(f"http://127.0.0.1:{port}/v1", engine="other") as bench:
        got = await bench.client.post("/chat/completions", json=CHAT)
        assert got.status_code == 502 and bench.call().outcome == "error"


async def test_chunks_that_break_off_are_not_an_end_however_the_header_is_written(started: Started) -> None:
    head = HEAD.replace(b"application/json", b"text/event-stream") + b"transfer-encoding: CHUNKED\r\n\r\n"
    async with FakeEngine(sends(head, chunk(EVENTS[:900]), close=True)) as engine, started(engine.url) as bench:
        with pytest.raises(httpx.RemoteProtocolError):
            await bench.client.post("/chat/completions", json=STREAMED)
        (call,) = await bench.recorded()
    assert call.outcome == "truncated"


@pytest.mark.parametrize(
    "data", [gzip.compress(WHOLE)[:-20], gzip.compress(WHOLE)[:50], b"plain", gzip.compress(WHOLE) + b"rubbish"]
)
async def test_a_broken_compressed_answer_is_502(started: Started, data: bytes) -> None:
    got, call = await asked(started, answers(200, data, content_encoding="gzip"), CHAT)
    assert got.status_code == 502 and "compressed" in got.text
    assert call.outcome == "error"


async def test_a_compressed_bomb_is_refused_before_it_fills_the_memory(started: Started) -> None:
    bomb, limits = gzip.compress(b" " * (64 << 20)), AnswerLimits(size=8 << 20)
    got, call = await asked(started, answers(200, bomb, content_encoding="gzip"), CHAT, answer_limits=limits)
    assert got.status_code == 502 and "larger than 8 MiB" in got.text
    assert call.outcome == "error"


@pytest.mark.parametrize("status", [301, 307, 308])
async def test_a_redirect_names_no_address_to_the_agent(started: Started, status: int) -> None:
    async with FakeEngine() as engine:
        location = f"http://127.0.0.1:{engine.port}/v1/chat/completions/"
        engine.answers = [answers(status, {"to": location}, location=location)]
        async with started(engine.url) as bench:
            got = await bench.client.post("/chat/completions", json=CHAT, follow_redirects=False)
            assert bench.call().outcome == "error"
            assert f":{engine.port}" not in bench.journal.read_text() + got.text + str(got.headers)
    assert got.status_code == 502 and "--upstream" in got.text


@pytest.mark.parametrize("status", [204, 201, 429, 500, 503])
async def test_other_statuses_are_passed_on(started: Started, status: int) -> None:
    body = b"" if status == 204 else b'{"error": "busy"}'
    got, call = await asked(started, answers(status, body, retry_after="7"), CHAT)
    assert (got.status_code, got.content, got.headers["retry-after"]) == (status, body, "7")
    assert call.status_code == status and call.outcome == "error"


async def test_an_engine_that_repeats_our_key_or_its_address_leaks_neither(started: Started) -> None:
    secret = "sk-engine-0123456789"
    async with FakeEngine() as engine:
        address = f"127.0.0.1:{engine.port}"
        record = {"error": {"message": f"key {secret} refused at http://{address}/v1", "code": 401}}
        echo = {"x_served_by": f"{address} {secret}"}
        in_stream = EVENTS[:900].rpartition(b"\n\n")[0] + b"\n\ndata: " + json.dumps(record).encode() + b"\n\n"
        engine.answers = [
            answers(401, record, **echo), answers(200, record, **echo), streams(in_stream + b"data: [DONE]\n\n"),
            answers(400, record, **echo), answers(400, record, **echo), replays(PLAIN),
        ]  # fmt: skip
        async with started(engine.url, upstream_key=secret, admin_port=0, admin_key="admin") as bench:
            seen = ""
            for body in (CHAT, CHAT, STREAMED, CHAT, CHAT):
                got = await bench.client.post("/chat/completions", json=body)
                seen += got.text + str(got.headers)
            models = await bench.client.get("/models")
            async with httpx.AsyncClient(base_url=bench.proxy.admin_url or "") as admin:
                for path in ("/sessions", "/sessions/default", "/metrics"):
                    seen += (await admin.get(path, headers={"authorization": "Bearer admin"})).text
            seen += models.text + bench.journal.read_text()
    assert secret not in seen and address not in seen
    assert "refused at" in seen


# streams


@pytest.mark.parametrize("end", ["\r\n", "\r"])
async def test_other_line_ends_comments_and_no_space_are_understood(started: Started, end: str) -> None:
    result = b": hello\n\n:data: [DONE]\n\nid: 7\nretry: 3\n" + EVENTS.replace(b"data: ", b"data:")
    got, call = await asked(started, streams(result.replace(b"\n", end.encode()), size=11), STREAMED)
    assert call.outcome == "ok" and call.capture is not None and call.capture.complete
    assert got.content.startswith(f": hello{end}{end}:data: [DONE]{end}{end}".encode())
    assert got.content.count(b"[DONE]") == 2


async def test_keep_alive_comments_of_the_engine_reach_the_agent_between_chunks(started: Started) -> None:
    data = EVENTS.replace(b"\n\n", b"\n\n: ping\n\n")
    got, call = await asked(started, streams(data, size=50), STREAMED)
    assert got.content.count(b": ping\n\n") == data.count(b": ping\n\n")
    assert call.capture is not None and call.capture.complete


async def test_nothing_after_done_is_waited_for(started: Started) -> None:
    """A client closes at [DONE]; an engine that lingers after it must not hold the agent up."""

    async def lingers(seen: Seen) -> None:
        await asyncio.sleep(20)

    async with FakeEngine(streams(EVENTS, then=lingers)) as engine, started(engine.url) as bench:
        async with asyncio.timeout(5):
            got = await bench.client.post("/chat/completions", json=STREAMED)
        call = bench.call()
    assert got.content.endswith(b"data: [DONE]\n\n")
    assert call.outcome == "ok" and call.capture is not None and call.capture.complete


async def test_a_reset_after_done_is_an_ok_call(started: Started) -> None:
    got, call = await asked(started, streams(EVENTS, end=False), STREAMED)
    assert got.content.endswith(b"data: [DONE]\n\n")
    assert call.outcome == "ok" and call.capture is not None and call.capture.complete


@pytest.mark.parametrize("added", [b"data: [DONE]\n\n", event(choices=[choice(content="late")]), b"data: {}\n\n"])
async def test_events_after_done_do_no_harm(started: Started, added: bytes) -> None:
    got, call = await asked(started, streams(EVENTS + added), STREAMED)
    assert got.content.endswith(b"data: [DONE]\n\n" + added) and call.outcome == "ok"


async def test_content_after_its_finish_reason_is_kept(started: Started) -> None:
    data = event(choices=[choice(finish="stop")]) + event(choices=[choice(content="b")]) + b"data: [DONE]\n\n"
    got, call = await asked(started, streams(data, size=5), STREAMED)
    assert chunks(got.content) == chunks(data)
    assert call.response_body["choices"][0]["message"]["content"] == "ab"


@pytest.mark.parametrize("index", [-1, 10**9, 2**80, "0", None, True, 1.0, []])
async def test_choices_of_any_index_are_passed_on(started: Started, index: Any) -> None:
    data = event(choices=[choice(index)]) + event(choices=[choice(index, None, "stop")]) + b"data: [DONE]\n\n"
    got, call = await asked(started, streams(data), STREAMED)
    assert json.loads(got.content.split(b"\n\n")[0][6:])["choices"][0]["delta"] == {"content": "a"}
    assert call.outcome == "ok"
    not_complete(call)


WEIRD: list[Any] = [
    None, 5, "x", [], [1], [[[]]], {"choices": None}, {"choices": {}}, {"choices": [None, 5, [], {}]},
    {"choices": [{"delta": None}]}, {"choices": [{"delta": {"tool_calls": [None, {"function": None}, {"index": []}]}}]},
    {"choices": [choice(token_ids={"a": 1}, logprobs=[])]}, {"choices": [choice(token_ids=[-1, 1.5, True, None])]},
    {"choices": [choice(token_ids=[2**70], logprobs={"content": [{"token": "a", "logprob": "x"}]})]},
    {"choices": [choice(logprobs={"content": [None, 5, {"logprob": float("nan")}], "tokens": 5})], "usage": []},
    {"choices": [choice()], "usage": {"completion_tokens": "9", "prompt_tokens": 2**80}}, {"usage": {"x": None}},
    {"error": None}, {"error": "plain words"}, {"error": ["x"]}, {"object": "error", "message": None},
    {"choices": [], "sglext": {"input_ids": "x", "output_ids": {"0": [1]}}}, {"choices": [choice(finish={"a": 1})]},
    {"choices": [choice(token_ids=[1], finish="stop")], "prompt_token_ids": [2**70], "x": float("inf")},
]  # fmt: skip


@pytest.mark.parametrize("weird", WEIRD, ids=range(len(WEIRD)))
async def test_json_of_any_shape_reaches_the_agent_and_is_not_called_complete(started: Started, weird: Any) -> None:
    text = json.dumps(weird)
    async with FakeEngine(answers(200, text.encode())) as engine, started(engine.url) as bench:
        got = await bench.client.post("/chat/completions", json=CHAT)
        assert got.status_code == 200 and type(json.loads(got.content)) is type(weird)
        engine.answers = [streams(f"data: {text}\n\ndata: [DONE]\n\n".encode())]
        got = await bench.client.post("/chat/completions", json=STREAMED)
        assert got.content.endswith(b"data: [DONE]\n\n")
        for call in bench.calls():
            not_complete(call)


@pytest.mark.parametrize("depth", [260, 600, 990, 5000])
async def test_deeply_nested_answers_reach_the_agent_and_are_recorded(started: Started, depth: int) -> None:
    deep = b'{"choices":[{"index":0,"message":{"content":"a"},"x":' + b"[" * depth + b"]" * depth + b"}]}"
    async with FakeEngine(answers(200, deep)) as engine, started(engine.url) as bench:
        assert (await bench.client.post("/chat/completions", json=CHAT)).content == deep
        engine.answers = [streams(b"data: " + deep + b"\n\ndata: [DONE]\n\n")]
        assert deep in (await bench.client.post("/chat/completions", json=STREAMED)).content
        engine.answers = [answers(400, b'{"error":' + deep + b"}")]
        assert (await bench.client.post("/chat/completions", json=CHAT)).status_code == 400
        for call in bench.calls():
            assert isinstance(call.response, dict)
            not_complete(call)


async def test_more_choices_than_asked_for_are_kept(started: Started) -> None:
    got, call = await asked(started, replays("vllm/chat-n2-stream"), STREAMED)
    assert len(call.response_body["choices"]) == 2 and got.content.count(b'"finish_reason":"length"') == 2


async def test_an_event_of_eight_mebibytes_passes(started: Started) -> None:
    data = event(choices=[choice(content="x" * (8 << 20))]) + event(choices=[choice(content=None, finish="stop")])
    got, call = await asked(started, streams(data + b"data: [DONE]\n\n", size=30_000), STREAMED)
    assert (chunks(got.content) == chunks(data)) and call.outcome == "ok"


async def test_a_whole_answer_to_a_streamed_call_and_a_stream_to_a_whole_one(started: Started) -> None:
    got, call = await asked(started, replays(PLAIN), STREAMED)
    assert got.headers["content-type"] == "application/json" and got.json()["choices"][0]["message"]["content"]
    assert call.capture is not None and call.capture.complete


async def test_a_stream_to_a_whole_call_keeps_what_the_agent_did_not_ask_for(started: Started) -> None:
    got, call = await asked(started, replays(STREAM), CHAT)
    assert got.headers["content-type"].startswith("text/event-stream")
    assert b'"token_ids":[' not in got.content and b'"logprob":' not in got.content
    assert call.capture is not None and call.capture.complete


@pytest.mark.parametrize("answer", [answers(200, b"[1]"), answers(200, b"no json\r\n\r\nat all"), replays(STREAM)])
@pytest.mark.parametrize("wait", [0.0, 0.25])
async def test_an_unstreamed_call_for_an_agent_that_streams_survives_any_answer(
    started: Started, answer: Answer, wait: float
) -> None:
    """Also where comments have begun the reply: a second head would be a fault of ours."""

    async def late(seen: Seen) -> AsyncIterator[bytes]:
        await asyncio.sleep(wait)
        async for piece in answer(seen):
            yield piece

    async with FakeEngine(late) as engine, started(engine.url, buffered=True, keepalive=0.1) as bench:
        got = await bench.client.post("/chat/completions", json=STREAMED)
        bench.call()
    assert got.status_code == 200
    if wait:
        assert got.content.startswith(b": keep-alive\n\n")
        assert all(block.startswith((b":", b"data:")) for block in got.content.strip().split(b"\n\n"))


@pytest.mark.parametrize("answer", [answers(500, b'{\n"error":\r\n"x"}'), sends(HEAD, close=True)])
async def test_a_failure_after_comments_is_one_error_event(started: Started, answer: Answer) -> None:
    async def late(seen: Seen) -> AsyncIterator[bytes]:
        await asyncio.sleep(0.25)
        async for piece in answer(seen):
            yield piece

    async with FakeEngine(late) as engine, started(engine.url, buffered=True, keepalive=0.1) as bench:
        got = await bench.client.post("/chat/completions", json=STREAMED)
        assert bench.call().outcome == "error"
    last = got.content.strip().split(b"\n\n")[-1]
    assert json.loads(last.removeprefix(b"data: "))["error"]


# connections


@pytest.mark.parametrize("answer", [PLAIN, STREAM])
async def test_one_connection_serves_one_call_after_another(started: Started, answer: str) -> None:
    body = STREAMED if answer == STREAM else CHAT
    async with FakeEngine(replays(answer)) as engine, started(engine.url, engine="other") as bench:
        for _ in range(5):
            assert (await bench.client.post("/chat/completions", json=body)).status_code == 200
        assert len(engine.calls) == 5 and engine.connections == 1


async def test_a_connection_that_the_engine_says_it_closes_is_not_used_again(started: Started) -> None:
    closes = answers(200, WHOLE, connection="close")
    async with FakeEngine(closes) as engine, started(engine.url, engine="other") as bench:
        for _ in range(3):
            assert (await bench.client.post("/chat/completions", json=CHAT)).status_code == 200
        assert len(engine.calls) == engine.connections == 3


@pytest.mark.parametrize("after", [0.0, 0.001, 0.01, 0.05])
async def test_kept_connections_that_close_at_any_moment_lose_no_call(started: Started, after: float) -> None:
    async with FakeEngine(answers(200, WHOLE), keep=after) as engine, started(engine.url, engine="other") as bench:
        for number in range(40):
            got = await bench.client.post("/chat/completions", json=CHAT)
            assert got.status_code == 200
            await asyncio.sleep(after * (0.9 + number % 5 / 20))
        assert len(engine.calls) == len(bench.calls()) == 40


async def test_a_call_on_a_kept_connection_that_was_read_is_not_made_again(started: Started) -> None:
    async def dies(seen: Seen) -> AsyncIterator[bytes]:
        raise Cut
        yield b""

    async with FakeEngine(replays(PLAIN), dies) as engine, started(engine.url) as bench:
        statuses = [(await bench.client.post("/chat/completions", json=CHAT)).status_code for _ in range(2)]
        assert statuses == [200, 502] and len(engine.calls) == 2 and engine.connections == 1


async def test_a_call_that_a_reused_connection_took_seconds_to_lose_is_not_sent_again(started: Started) -> None:
    async def dies(seen: Seen) -> AsyncIterator[bytes]:
        await asyncio.sleep(0.3)
        raise Cut
        yield b""

    async with FakeEngine(replays(PLAIN), dies) as engine, started(engine.url) as bench:
        pool_of(bench).closed_unread_within = 0.1
        statuses = [(await bench.client.post("/chat/completions", json=CHAT)).status_code for _ in range(2)]
        assert statuses == [200, 502] and len(engine.calls) == 2


async def test_an_answer_that_never_ends_ends_with_its_agent(started: Started) -> None:
    gone = asyncio.Event()

    async def endless(seen: Seen) -> AsyncIterator[bytes]:
        try:
            yield SSE_HEAD
            while not seen.gone.is_set():
                yield chunk(event(choices=[choice()]))
                await asyncio.sleep(0.005)
        finally:
            gone.set()

    async with FakeEngine(endless) as engine, started(engine.url, engine="other") as bench:
        async with bench.client.stream("POST", "/chat/completions", json=STREAMED) as got:
            async for data in got.aiter_raw():
                if b'"a"' in data:
                    break
        (call,) = await bench.recorded()
        async with asyncio.timeout(5):
            await gone.wait()
    assert call.outcome == "aborted"


async def test_two_engines_of_hostile_answers_leave_no_connection(started: Started) -> None:
    async with FakeEngine(sends(b"garbage\r\n\r\n")) as engine, started(engine.url) as bench:
        await asyncio.gather(*(bench.client.post("/chat/completions", json=CHAT) for _ in range(50)))
        assert open_connections(bench) <= 1


@pytest.mark.parametrize("calls_go_on", [False, True])
async def test_connections_of_a_burst_are_closed_even_if_no_call_follows(started: Started, calls_go_on: bool) -> None:
    arrived = 0

    async def together(seen: Seen) -> AsyncIterator[bytes]:
        nonlocal arrived
        arrived += 1
        async with asyncio.timeout(20):
            while arrived < 30:
                await asyncio.sleep(0.01)
        yield whole(200, WHOLE)

    async with FakeEngine(together) as engine, started(engine.url) as bench:
        pool_of(bench).idle_expiry = 0.3
        burst = await asyncio.gather(*(bench.client.post("/chat/completions", json=CHAT) for _ in range(30)))
        assert {got.status_code for got in burst} == {200}
        async with asyncio.timeout(20):
            while open_connections(bench) > calls_go_on:
                if calls_go_on:
                    await bench.client.post("/chat/completions", json=CHAT)
                await asyncio.sleep(0.02)


def pool_of(bench: Bench) -> HttpClient:
    assert bench.proxy.sessions.defaults is not None
    client = bench.proxy.sessions.defaults.replicas.all[0].client
    assert isinstance(client, HttpClient)
    return client


def open_connections(bench: Bench) -> int:
    return pool_of(bench).open_connections


async def test_direct_and_through_the_proxy_the_headers_are_the_same(started: Started) -> None:
    """But for those of one connection, and those that say where the engine is."""
    extra = {"x_request_id": "7", "date": "Mon, 01 Jan 2029 00:00:00 GMT", "server": "uvicorn", "set_cookie": "a=b"}
    async with FakeEngine(answers(200, WHOLE, **extra)) as engine, started(engine.url) as bench:
        direct = await exchange(engine.port, post(CHAT))
        through = await exchange(bench.proxy.port, post(CHAT))
    assert statuses(direct) == statuses(through) == [200]

    def headers(data: bytes) -> list[bytes]:
        lines = data.split(b"\r\n\r\n")[0].split(b"\r\n")[1:]
        return [line for line in lines if not line.startswith((b"content-length", b"set-cookie"))]

    assert headers(through) == headers(direct)


@pytest.mark.parametrize("how", ["unreachable", "broke off", "silent"])
async def test_an_engine_that_comes_back_as_another_is_recorded_as_what_it_is(started: Started, how: str) -> None:
    """Its version, what it samples with and what was learned of it are the record's; none of the old one's may stay."""
    async with FakeEngine(replays(PLAIN)) as first, started(first.url) as bench:
        assert (await bench.client.post("/chat/completions", json=CHAT)).status_code == 200
        replica = bench.proxy.sessions.default.replica  # type: ignore[union-attr]
        assert replica is not None
        replica.buffered.add("openai-chat")
        port = first.port
        if how == "broke off":
            first.answers = [sends(HEAD + b"content-length: 99\r\n\r\n{", close=True)]
            assert (await bench.client.post("/chat/completions", json=CHAT)).status_code == 502
        await first.stop()
        if how == "unreachable":
            assert (await bench.client.post("/chat/completions", json=CHAT)).status_code == 502
        if how == "silent":
            replica.used_at -= UNUSED
        second = FakeEngine(replays("sglang/chat-sglext-length-nostream"), engine="sglang")
        await second.start(port)
        try:
            await bench.client.post("/chat/completions", json=CHAT)
            call = bench.calls()[-1]
        finally:
            await second.stop()
        assert (call.engine, call.outcome) == ("sglang", "ok")
        assert call.capture is not None and call.capture.complete and replica.buffered == set()


@pytest.mark.slow
async def test_a_proxy_that_stood_still_reads_what_came_meanwhile_before_it_blames_the_engine(tmp_path: Path) -> None:
    """A machine that is suspended, or has no CPU to give: the engine sent in time, the proxy's clock ran on."""
    async with FakeEngine(replays(STREAM, size=400, pause=0.15)) as engine:
        proxy, base_url = start_proxy(engine.url, tmp_path, "--idle-timeout", "1.5")
        try:
            async with httpx.AsyncClient(base_url=base_url, timeout=30) as client:
                sending = asyncio.ensure_future(client.post("/chat/completions", json=STREAMED))
                while not engine.calls:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.3)
                proxy.send_signal(signal.SIGSTOP)
                await asyncio.sleep(3)
                proxy.send_signal(signal.SIGCONT)
                got = await sending
        finally:
            proxy.send_signal(signal.SIGCONT)
            proxy.kill()
            proxy.communicate()
    assert got.content.endswith(b"data: [DONE]\n\n") and b'"error"' not in got.content


async def test_a_gateway_whose_engine_is_still_loading_does_not_pass_for_an_engine(started: Started) -> None:
    """Nothing that it answers meanwhile says what the engine is; the first call that is answered is captured."""
    async with FakeEngine(answers(502, b"<html>Bad Gateway</html>"), replays(PLAIN)) as engine:
        side, engine._side = engine._side, lambda path: whole(502, b"<html>Bad Gateway</html>")  # type: ignore[method-assign]
        async with started(engine.url) as bench:
            assert (await bench.client.post("/chat/completions", json=CHAT)).status_code == 502
            engine._side = side  # type: ignore[method-assign]
            assert (await bench.client.post("/chat/completions", json=CHAT)).status_code == 200
            call = bench.calls()[-1]
    assert call.engine == "vllm" and call.capture is not None and call.capture.complete


async def test_a_call_stays_with_its_own_engine_when_its_session_moves_to_another(started: Started) -> None:
    """Calls of a session overlap: one that finds the engine down must not make another's error name its address."""
    asked, moved = asyncio.Event(), asyncio.Event()

    async def late(seen: Seen) -> AsyncIterator[bytes]:
        asked.set()
        await moved.wait()
        yield whole(500, {"error": {"message": f"no room at 127.0.0.1:{first_engine.port}", "code": 500}})

    async with (
        FakeEngine(late) as first_engine,
        FakeEngine(replays(PLAIN)) as second_engine,
        started(first_engine.url, second_engine.url) as bench,
    ):
        first = asyncio.ensure_future(bench.client.post("/chat/completions", json=CHAT))
        await asked.wait()
        session = bench.proxy.sessions.default
        assert session is not None and session.replica is not None
        session.replica.down = True
        assert (await bench.client.post("/chat/completions", json=CHAT)).status_code == 200
        moved.set()
        answer = await first
        calls = bench.calls()
    assert answer.status_code == 500 and "no room at ***" in answer.text
    assert {call.metadata["call"]: call.metadata["upstream"] for call in calls} == {0: "replica-0", 1: "replica-1"}
    assert f":{first_engine.port}" not in bench.journal.read_text()


async def test_an_agent_that_leaves_while_a_refusal_is_read_leaves_no_connection_behind(started: Started) -> None:
    refusing = asyncio.Event()

    async def half(seen: Seen) -> AsyncIterator[bytes]:
        yield b"HTTP/1.1 400 X\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
        refusing.set()
        await seen.gone.wait()

    async with FakeEngine(half) as engine, started(engine.url) as bench:
        call = asyncio.ensure_future(bench.client.post("/chat/completions", json=CHAT))
        await refusing.wait()
        await asyncio.sleep(0.05)
        call.cancel()
        [recorded] = await bench.recorded()
        async with asyncio.timeout(5):
            while open_connections(bench):
                await asyncio.sleep(0.01)
    assert recorded.outcome == "aborted"
