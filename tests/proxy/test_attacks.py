"""The attempt list: what someone inside a sandbox may send with a key that is good for one session, each refused.

Raw sockets, because no library would send most of it. What a container on the runner's own network reaches stands in
`tests/sandbox/rollouts/test_container_attacks.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy import OpenSession, Proxy, Settings, serve
from proxy.http.limits import Limits
from tests.proxy.conftest import Started
from tests.proxy.fake_engine import FakeEngine, Seen, answers, replays, streams, transcript
from tests.proxy.raw import connection, exchange, post, statuses, until_quiet

ENGINE_KEY, ADMIN_KEY = "sk-engine-0123456789abcdef", "admin-0123456789abcdef"
BODY: dict[str, Any] = {"model": "my-policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
RAW = json.dumps(BODY).encode()
PLAIN, STREAM = "vllm/chat-plain-length-nostream", "vllm/chat-plain-length-stream"


class TwoSessions:
    """A proxy as the runner starts one: two sessions, admin routes on a port of their own, an engine with a key."""

    def __init__(self, engine: FakeEngine, proxy: Proxy, ours: OpenSession, theirs: OpenSession, folder: Path) -> None:
        self.engine, self.proxy, self.ours, self.theirs, self.folder = engine, proxy, ours, theirs, folder
        self.key = f"authorization: Bearer {ours.api_key}"

    async def send(self, data: bytes, replies: int = 1) -> bytes:
        return await exchange(self.proxy.port, data, replies)

    async def untouched(self) -> bool:
        """Nothing reached the engine, and neither session has a call."""
        states = [await self.proxy.session_state(session.id) for session in (self.ours, self.theirs)]
        return self.engine.calls == [] and [session["calls"] for session in states] == [0, 0]


@contextlib.asynccontextmanager
async def two_sessions(tmp_path: Path, *answer: Any, **options: Any) -> AsyncIterator[TwoSessions]:
    async with FakeEngine(*(answer or (replays(PLAIN),))) as engine:
        settings = Settings(
            upstream=[engine.url], upstream_key=ENGINE_KEY, probe=False, admin_port=0, admin_key=ADMIN_KEY, **options
        )
        async with serve(settings) as proxy:
            ours = await proxy.open_session("ours", journal=tmp_path / "ours.jsonl")
            theirs = await proxy.open_session("theirs", journal=tmp_path / "theirs.jsonl")
            yield TwoSessions(engine, proxy, ours, theirs, tmp_path)


# another session, and the admin's routes


@pytest.mark.parametrize("path", ["/s/theirs/v1/chat/completions", "/s/{theirs}/v1/chat/completions"])
async def test_a_key_opens_no_session_but_its_own(tmp_path: Path, path: str) -> None:
    async with two_sessions(tmp_path) as here:
        path = path.format(theirs=here.theirs.id)
        assert statuses(await here.send(post(BODY, here.key, path=path))) == [401]
        assert statuses(await here.send(post(BODY, path=path))) == [401], "a session's name is no key"
        assert await here.untouched()


NEARLY = (
    "", "Bearer", "Bearer ", "Bearer theirs", "Bearer null", "Bearer *", "Bearer sk-capture-", "Basic OnNlY3JldA==",
    "Bearer {id}", "bearer {half}", "Bearer {key}x", "Bearer {key} {key}", "Bearer {admin}", "Bearer {engine}",
)  # fmt: skip


async def test_what_is_nearly_a_key_is_none(tmp_path: Path) -> None:
    async with two_sessions(tmp_path) as here:
        our_key = here.ours.api_key
        names = {"id": here.ours.id, "half": our_key[: len(our_key) // 2], "key": our_key, "admin": ADMIN_KEY}
        keys = [key.format(**names, engine=ENGINE_KEY) for key in NEARLY]
        got = await asyncio.gather(*(here.send(post(BODY, f"authorization: {key}")) for key in keys))
        assert [statuses(reply) for reply in got] == [[401]] * len(NEARLY)
        assert our_key.encode() not in b"".join(got) and here.theirs.api_key.encode() not in b"".join(got)
        assert await here.untouched()


ADMIN_ROUTES = (
    "GET /sessions", "POST /sessions", "DELETE /sessions/theirs", "POST /sessions/ours/policy", "GET /metrics",
    "GET /v1/../sessions", "GET /s/ours/../../metrics", "GET //metrics", "GET /v1/sessions", "GET /metrics;/v1/models",
    "GET /%6detrics", "GET /v1/%2e%2e/metrics", "GET /s/ours/sessions",
)  # fmt: skip


async def test_the_admin_routes_are_not_on_the_agents_port(tmp_path: Path) -> None:
    async with two_sessions(tmp_path) as here:
        for key in (here.key, f"authorization: Bearer {ADMIN_KEY}"):
            rest = f" HTTP/1.1\r\nhost: x\r\n{key}\r\ncontent-length: 0\r\n\r\n"
            got = await asyncio.gather(*(here.send((line + rest).encode()) for line in ADMIN_ROUTES))
            assert dict(zip(ADMIN_ROUTES, map(statuses, got), strict=True)) == {line: [404] for line in ADMIN_ROUTES}
        assert here.engine.seen == [] and await here.untouched()


async def test_a_sessions_key_opens_no_admin_route(tmp_path: Path) -> None:
    async with two_sessions(tmp_path) as here:
        for key in (here.ours.api_key, "x", ENGINE_KEY, ADMIN_KEY[:-1], ADMIN_KEY + "x"):
            async with httpx.AsyncClient(base_url=here.proxy.admin_url or "") as client:
                for method, path in (("GET", "/metrics"), ("GET", "/sessions"), ("DELETE", "/sessions/theirs")):
                    answer = await client.request(method, path, headers={"authorization": f"Bearer {key}"})
                    assert answer.status_code == 401 and "theirs" not in answer.text
        assert not (await here.proxy.session_state("theirs"))["closed"]


async def test_the_key_of_a_closed_session_opens_nothing_on_an_open_proxy_either(
    started: Started, tmp_path: Path
) -> None:
    """There any key will do, but one of ours: an agent that outlived its rollout would write into another's journal."""
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        session = await bench.proxy.open_session("one", journal=tmp_path / "one.jsonl")
        await bench.proxy.close_session(session.id)
        got = await exchange(bench.proxy.port, post(BODY, f"authorization: Bearer {session.api_key}"))
        assert statuses(got) == [401] and engine.calls == [] and bench.calls() == []


async def test_a_call_ended_by_closing_its_session_gets_an_error_in_its_dialect(tmp_path: Path) -> None:
    async def waits(seen: Seen) -> Any:
        await seen.gone.wait()
        yield b""

    async with two_sessions(tmp_path, waits, grace=0.1) as here:
        paths = ("/v1/chat/completions", "/v1/messages")
        bodies = [post({**BODY, "stream": stream}, here.key, path=path) for path in paths for stream in (False, True)]
        sending = [asyncio.ensure_future(here.send(data)) for data in bodies]
        async with asyncio.timeout(60):
            while len(here.engine.calls) < len(bodies):
                await asyncio.sleep(0.01)
        state = await here.proxy.close_session("ours")
        got = await asyncio.gather(*sending)
    assert [statuses(reply) for reply in got] == [[503], [503], [529], [529]] and state["calls"] == 4
    for reply in got:
        assert "its session was closed" in json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["message"]


# ways to another server, or to another route of this engine


TARGETS = {
    "POST http://169.254.169.254/latest/meta-data": 404, "POST http://169.254.169.254": 400,
    "POST //169.254.169.254/v1/chat/completions": 404, "CONNECT 169.254.169.254:80": 400, "CONNECT 127.0.0.1:22": 400,
    "OPTIONS *": 404, "TRACE /v1/chat/completions": 405, "POST /v1/chat/completions/../../tokenize": 404,
    "POST /v1/embeddings": 404, "POST /tokenize": 404, "POST /v1/load_lora_adapter": 404, "POST /sleep": 404,
    "POST /v1/models/x": 404, "POST /v1/chat/completions%0d%0ax-y:z": 404, "POST /v1/chat/completions%00": 404,
}  # fmt: skip


async def test_no_request_target_leads_elsewhere(tmp_path: Path) -> None:
    async with two_sessions(tmp_path) as here:
        rest = f" HTTP/1.1\r\nhost: 169.254.169.254\r\n{here.key}\r\ncontent-length: {len(RAW)}\r\n\r\n"
        got = await asyncio.gather(*(here.send((line + rest).encode() + RAW) for line in TARGETS))
        assert {line: statuses(reply)[0] for line, reply in zip(TARGETS, got, strict=True)} == TARGETS
        assert here.engine.seen == []


async def test_an_absolute_target_a_host_a_query_and_a_models_name_change_nothing_of_where_a_call_goes(
    tmp_path: Path,
) -> None:
    async with two_sessions(tmp_path) as here:
        tries = [
            post(BODY, here.key, path="http://169.254.169.254/v1/chat/completions"),
            post(BODY, here.key, "x-forwarded-host: a").replace(b"host: proxy", b"host: 169.254.169.254"),
            post(BODY, here.key, path="/v1/chat/completions?upstream=http://169.254.169.254&x=%0d%0ay"),
            post({**BODY, "model": "http://169.254.169.254/x\r\nhost: y", "upstream": "http://a/"}, here.key),
        ]
        for data in tries:
            assert statuses(await here.send(data)) == [200]
        assert {(call.method, call.path) for call in here.engine.calls} == {("POST", "/v1/chat/completions")}
        assert {call.headers["host"] for call in here.engine.calls} == {f"127.0.0.1:{here.engine.port}"}


async def test_headers_that_mislead_gateways_are_not_forwarded(tmp_path: Path) -> None:
    names = (
        "x-original-url", "x-rewrite-url", "x-http-method-override", "x-forwarded-prefix", "x-forwarded-for",
        "x-real-ip", "forwarded", "cookie", "proxy-authorization", "te", "trailer", "x-listed", "http2-settings",
    )  # fmt: skip
    lines = [f"{name}: /sleep" for name in names]
    async with two_sessions(tmp_path) as here:
        got = await here.send(post(BODY, here.key, *lines, "connection: close, X-Listed, HTTP2-Settings"))
        assert statuses(got) == [200]
        (seen,) = here.engine.calls
    assert set(names).isdisjoint(seen.headers)
    assert seen.headers["authorization"] == f"Bearer {ENGINE_KEY}"


# one request that another reader would take for two


CHUNKED = b"0\r\n\r\nGET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n"


DOUBTFUL: list[tuple[bytes, list[str]]] = [
    (CHUNKED, ["content-length: 40", "transfer-encoding: chunked"]),
    (CHUNKED, ["transfer-encoding: chunked", "content-length: 40"]),
    (CHUNKED, ["transfer-encoding: chunked, identity"]),
    (CHUNKED, ["transfer-encoding: chunked", "transfer-encoding: identity"]),
    (CHUNKED, ["transfer-encoding : chunked"]),
    (RAW, [f"content-length: +{len(RAW)}"]), (RAW, ["content-length: -1"]), (RAW, [f"content-length: {len(RAW)}, 9"]),
    (RAW, ["content-length: 9", f"content-length: {len(RAW)}"]), (RAW, ["content-length: 0x10"]),
    (RAW, ["content-length: 99999999999999999999999"]), (RAW, ["x-a: b\rx-evil: c"]), (RAW, ["x-a: b\n c"]),
    (b"ffffffffffffffffff\r\nx", ["transfer-encoding: chunked"]), (b"-1\r\nx", ["transfer-encoding: chunked"]),
    (b"%x\n%s\n0\n\n" % (len(RAW), RAW), ["transfer-encoding: chunked"]),
    (b"%x\r\n%sXX0\r\n\r\n" % (len(RAW), RAW), ["transfer-encoding: chunked"]),
]  # fmt: skip


async def test_a_request_of_ambiguous_length_is_400_and_closes_its_connection(tmp_path: Path) -> None:
    async with two_sessions(tmp_path) as here:
        tries = [post(body, here.key, *headers) + post(BODY, here.key) for body, headers in DOUBTFUL]
        got = await asyncio.gather(*map(here.send, tries))
        assert [statuses(reply) for reply in got] == [[400]] * len(DOUBTFUL)
        assert await here.untouched()


async def test_a_trailer_sets_no_header_and_a_second_request_needs_its_own_key(tmp_path: Path) -> None:
    chunked = b"%x\r\n%s\r\n0\r\nauthorization: Bearer %s\r\n\r\n"
    async with two_sessions(tmp_path) as here:
        body = chunked % (len(RAW), RAW, here.ours.api_key.encode())
        assert statuses(await here.send(post(body, "transfer-encoding: chunked"))) == [401]
        assert await here.untouched()
        assert statuses(await here.send(post(BODY, here.key) + post(BODY), 2)) == [200, 401]


@pytest.mark.parametrize("offer", ["h2c", "websocket", "TLS/1.3"])
async def test_an_offer_of_another_protocol_is_passed_over_and_the_body_is_kept(tmp_path: Path, offer: str) -> None:
    """Java's client offers HTTP/2 with every POST; the parser drops the body of such a request."""
    lines = ["Connection: Upgrade, HTTP2-Settings", f"Upgrade: {offer}", "HTTP2-Settings: AAMAAABkAAQAAP__"]
    async with two_sessions(tmp_path) as here:
        assert statuses(await here.send(post(BODY, here.key, *lines))) == [200]
        (seen,) = here.engine.calls
    assert seen.body["messages"] == BODY["messages"] and "upgrade" not in str(seen.headers)


# what takes too long, or too much


async def read_to_end(reader: asyncio.StreamReader, seconds: float = 5) -> bytes:
    """All that comes until the connection is over; who writes to a closed one also gets a reset."""
    got = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(seconds):
            while data := await reader.read(1 << 16):
                got += data
    return got


async def test_a_connection_that_says_nothing_is_closed(tmp_path: Path) -> None:
    async with two_sessions(tmp_path, limits=Limits(head_time=0.3)) as here, connection(here.proxy.port) as (reader, _):
        assert statuses(await read_to_end(reader)) == [408]


@pytest.mark.parametrize("first", [False, True])
async def test_headers_that_trickle_time_out(tmp_path: Path, first: bool) -> None:
    """Slowloris: a byte now and then, on a new connection and after a call that was good."""
    async with two_sessions(tmp_path, limits=Limits(head_time=0.4)) as here:

        async def trickle(start: bytes) -> bytes:
            async with connection(here.proxy.port) as (reader, writer):
                if not first:
                    writer.write(post(BODY, here.key))
                    assert b"200" in await until_quiet(reader, replies=1)
                writer.write(start)
                reply = asyncio.ensure_future(read_to_end(reader))
                while not (await asyncio.wait([reply], timeout=0.05))[0]:
                    writer.write(b"\r\n" if start == b"\r\n" else b"x")
                return reply.result()

        starts = [b"POST /v1/chat/completions HTTP/1.1\r\n", b"\r\n", b"POST /"]
        replies = await asyncio.gather(*map(trickle, starts))
        assert [statuses(reply) for reply in replies] == [[408]] * len(starts)


async def test_a_call_that_takes_long_is_not_late_whatever_trickles_in_behind_it(
    tmp_path: Path,
) -> None:

    async def slow(seen: Seen) -> Any:
        await asyncio.sleep(1)
        async for piece in replays(PLAIN)(seen):
            yield piece

    async with (
        two_sessions(tmp_path, slow, limits=Limits(head_time=0.2)) as here,
        connection(here.proxy.port) as (reader, writer),
    ):
        writer.write(post(BODY, here.key) + b"\r\n")
        assert statuses(await until_quiet(reader)) == [200]


CHUNKED_BODY = "transfer-encoding: chunked"
SLOW_BODIES: dict[str, tuple[bytes, list[str], bytes]] = {
    "trickles": (b"", ["content-length: 1000"], b" "),
    "stops in its middle": (RAW[:9], ["content-length: 1000"], b""),
    "never begins": (b"", ["content-length: 9"], b""),
    "never begins, after 100 Continue": (b"", ["content-length: 9", "expect: 100-continue"], b""),
    "trickles in chunks of one byte": (b"", [CHUNKED_BODY], b"1\r\n \r\n"),
    "stops in a chunk": (b"9\r\nabc", [CHUNKED_BODY], b""),
    "stops in a chunk's length": (b"1\r\n{\r\n1", [CHUNKED_BODY], b""),
    "trickles in a chunk's extension": (b"1\r\n{\r\n1;x=", [CHUNKED_BODY], b"y"),
    "trickles in trailers": (b"2\r\n{}\r\n0\r\nx: ", [CHUNKED_BODY], b"y"),
    "stops in gzip": (gzip.compress(RAW)[:30], ["content-length: 900", "content-encoding: gzip"], b""),
    "stops in zstd": (b"\x28\xb5\x2f\xfd", ["content-length: 900", "content-encoding: zstd"], b""),
}


async def test_a_body_that_is_too_slow_is_408_and_no_call(tmp_path: Path) -> None:
    async with two_sessions(tmp_path, limits=Limits(body_time=0.4, linger_time=0.2)) as here:

        async def send_slowly(start: bytes, headers: list[str], more: bytes) -> bytes:
            async with connection(here.proxy.port) as (reader, writer):
                writer.write(post(start, here.key, *headers))
                reply = asyncio.ensure_future(read_to_end(reader))
                while not reply.done():
                    writer.write(more)
                    await asyncio.wait([reply], timeout=0.05)
                return reply.result()

        replies = await asyncio.gather(*(send_slowly(*body) for body in SLOW_BODIES.values()))
        for name, reply in zip(SLOW_BODIES, replies, strict=True):
            assert [status for status in statuses(reply) if status != 100] == [408], name
            assert b"connection: close" in reply, name
        assert await here.untouched()


async def test_an_agent_that_reads_nothing_is_dropped_and_the_engine_stopped(
    tmp_path: Path,
) -> None:
    piece = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * 64_000 + b'"},"finish_reason":null}]}\n\n'
    async with two_sessions(tmp_path, streams(piece * 2000, size=len(piece)), limits=Limits(unread_time=0.5)) as here:
        async with connection(here.proxy.port) as (reader, writer):
            reader._limit = 1 << 16  # type: ignore[attr-defined]
            writer.write(post({**BODY, "stream": True}, here.key))
            async with asyncio.timeout(60):
                while not (tmp_path / "ours.jsonl").read_bytes().endswith(b"\n"):
                    await asyncio.sleep(0.05)
        line = json.loads((tmp_path / "ours.jsonl").read_bytes())
    assert line["metadata"]["outcome"] == "aborted"


# what comes back, and what is written down


async def test_an_engines_folded_header_does_not_split_the_answer(tmp_path: Path) -> None:
    async def folds(seen: Seen) -> Any:
        data = transcript(PLAIN)[1]
        yield b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-a: b\r\n set-cookie: stolen=1\r\nx-c: d\re\r\n"
        yield b"content-length: %d\r\n\r\n%s" % (len(data), data)

    async with two_sessions(tmp_path, folds) as here:
        head = (await here.send(post(BODY, here.key))).partition(b"\r\n\r\n")[0]
    assert b"\r\nset-cookie" not in head and b"\n set-cookie" not in head and b"\re" not in head.replace(b"\r\n", b"")


async def test_no_text_of_an_agent_or_an_engine_starts_a_new_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    evil = (
        "no\r\n2026-01-01 00:00:00 INFO agents: http://evil/v1 \x1b[2J\x1b]0;owned\x07 \u2028\x9b31m return_token_ids"
    )
    refusal = answers(400, {"error": {"message": evil, "type": "BadRequestError", "code": 400}})
    caplog.set_level(logging.DEBUG)
    async with two_sessions(tmp_path, refusal, replays(PLAIN)) as here:
        body = {**BODY, "model": evil}
        assert statuses(await here.send(post(body, here.key, "user-agent: a\tb"))) == [200]
        await here.send(f"GET /{'%0d%0aINFO%20x%1b[2J'} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        state = await here.proxy.session_state("ours")
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("proxy")]
    assert any("refused" in text for text in logged), "the engine's sentence is logged"
    for text in [*logged, str(state["last_error"])]:
        assert all(sign.isprintable() for sign in text), text
    lines = (tmp_path / "ours.jsonl").read_bytes().splitlines()
    assert len(lines) == 1 and json.loads(lines[0])["request"]["body"]["model"] == evil


async def test_the_engines_key_and_address_are_never_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Answers, errors, streams, headers, journals, metrics, states and the log, of an engine that repeats it."""
    caplog.set_level(logging.DEBUG)
    _, recorded = transcript(STREAM)
    first = recorded[: recorded.index(b"\n\n") + 2]
    async with two_sessions(tmp_path) as here:
        address = f"127.0.0.1:{here.engine.port}"
        leak = {"error": {"message": f"Bearer {ENGINE_KEY} is bad at http://{address}/v1", "code": 401}}
        event = b"data: " + json.dumps(leak).encode() + b"\n\n"
        here.engine.answers = [
            answers(401, leak, x_leak=ENGINE_KEY, server=address), answers(500, ENGINE_KEY.encode()),
            answers(307, leak, location=f"http://{address}/"), streams(first + event), streams(event),
            streams(first, end=False), answers(400, leak), answers(400, leak), answers(200, leak),
        ]  # fmt: skip
        got = [await here.send(post({**BODY, "stream": n % 2 == 1}, here.key)) for n in range(9)]
        got.append(await here.send(f"GET /v1/models HTTP/1.1\r\nhost: x\r\n{here.key}\r\n\r\n".encode()))
        here.engine.server.close()
        async with httpx.AsyncClient(base_url=here.proxy.admin_url or "") as client:
            headers = {"authorization": f"Bearer {ADMIN_KEY}"}
            got += [(await client.get(path, headers=headers)).content for path in ("/metrics", "/sessions")]
    everything = b"".join(got) + (tmp_path / "ours.jsonl").read_bytes()
    logged = "".join(record.getMessage() for record in caplog.records if record.name.startswith("proxy"))
    for secret in (ENGINE_KEY, address, here.ours.api_key, ADMIN_KEY):
        assert secret.encode() not in everything, secret
        assert secret not in logged, secret


# a proxy that asks for no key


@pytest.mark.parametrize("origin", ["https://evil.example", "http://evil.example:8100", "null", "http://[::1"])
async def test_a_web_page_of_another_site_cannot_use_an_open_proxy(started: Started, origin: str) -> None:
    """A browser on this machine sends such a POST for any page; its Origin is the page's even where DNS is bent."""
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        for path in ("/v1/chat/completions", "/s/made-by-a-page/v1/chat/completions"):
            got = await exchange(
                bench.proxy.port, post(BODY, f"origin: {origin}", "content-type: text/plain", path=path)
            )
            assert statuses(got) == [403] and b"--key" in got
        assert engine.calls == [] and len(list(bench.proxy.sessions)) == 1


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1", "vscode-file://vscode-app"])
async def test_a_page_of_this_machine_and_an_editors_window_may(started: Started, origin: str) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        assert statuses(await exchange(bench.proxy.port, post(BODY, f"origin: {origin}"))) == [200]
        assert len(engine.calls) == 1
