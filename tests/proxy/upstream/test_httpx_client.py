"""The client for https upstreams, against a real TLS server with a certificate made here."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.errors import UpstreamBroke, UpstreamTimeout, UpstreamUnreachable
from proxy.settings import Timeouts
from proxy.upstream.httpx_client import HostedClient
from tests.proxy.conftest import Started
from tests.proxy.fake_engine import SSE_HEAD, Cut, FakeEngine, Seen, answers, chunk, streams

CHAT: dict[str, Any] = {"model": "gpt", "messages": [{"role": "user", "content": "hi"}]}
BODY = {
    "id": "x", "object": "chat.completion", "model": "gpt", "created": 1,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}  # fmt: skip
EVENTS = (
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"Hi"},"finish_reason":null}]}\n\n: ping\n\n'
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder


class TlsEngine(FakeEngine):
    """The same double, behind TLS."""

    def __init__(self, folder: Path, *replies: Any) -> None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        super().__init__(*replies, engine="none", tls=tls)

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}/v1"


@pytest.fixture
def trusted(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert.pem"))
    return certificate


@asynccontextmanager
async def client(engine: TlsEngine, **bounds: float) -> AsyncIterator[HostedClient]:
    hosted = HostedClient(f"https://localhost:{engine.port}", Timeouts(**bounds))
    try:
        yield hosted
    finally:
        await hosted.close()


async def test_a_whole_answer_is_recorded_with_text_and_usage(started: Started, trusted: Path) -> None:
    async with TlsEngine(trusted, answers(200, BODY)) as engine, started(engine.url, upstream_key="sk-api") as bench:
        got = await bench.client.post("/chat/completions", json=CHAT, headers={"authorization": "Bearer agent"})
        call = bench.call()
    assert got.json() == BODY
    assert engine.calls[0].body == CHAT and engine.calls[0].headers["authorization"] == "Bearer sk-api"
    assert call.response_body == BODY and call.metadata["engine"] == "other" and call.capture is not None
    assert {why.reason for why in call.capture.unavailable.values()} == {"provider_api_unsupported"}


async def test_a_stream_is_passed_on_as_it_comes(started: Started, trusted: Path) -> None:
    release = asyncio.Event()

    async def wait(seen: Seen) -> None:
        await release.wait()

    async def answer(seen: Seen) -> AsyncIterator[bytes]:
        yield SSE_HEAD + chunk(EVENTS[:100])
        await wait(seen)
        yield chunk(EVENTS[100:]) + b"0\r\n\r\n"

    async with TlsEngine(trusted, answer) as engine, started(engine.url) as bench:
        got = b""
        async with bench.client.stream("POST", "/chat/completions", json={**CHAT, "stream": True}) as reply:
            async with asyncio.timeout(10):
                async for data in reply.aiter_raw():
                    got += data
                    release.set()
        call = bench.call()
    assert got == EVENTS and call.outcome == "ok"
    assert call.response_body["choices"][0]["message"]["content"] == "Hi"


async def test_an_agent_that_leaves_closes_the_connection_to_the_api(started: Started, trusted: Path) -> None:
    async def wait(seen: Seen) -> None:
        async with asyncio.timeout(10):
            await seen.gone.wait()

    async with TlsEngine(trusted, streams(EVENTS[:100], then=wait)) as engine, started(engine.url) as bench:
        async with bench.client.stream("POST", "/chat/completions", json={**CHAT, "stream": True}) as reply:
            async for data in reply.aiter_raw():
                if b"Hi" in data:
                    break
        (call,) = await bench.recorded()
        async with asyncio.timeout(5):
            await engine.calls[0].gone.wait()
    assert call.outcome == "aborted"


async def test_an_api_that_cannot_be_reached_or_trusted_is_502_and_names_no_address(
    started: Started, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    async with TlsEngine(certificate, answers(200, BODY)) as engine:
        for url in (engine.url, "https://localhost:9/v1"):
            async with started(url) as bench:
                got = await bench.client.post("/chat/completions", json=CHAT)
                assert got.status_code == 502 and "localhost" not in got.text + bench.journal.read_text()
    assert engine.calls == []


@pytest.mark.parametrize("status", [307, 401, 429])
async def test_an_error_of_the_api_is_passed_on_without_our_key(started: Started, trusted: Path, status: int) -> None:
    record = {"error": {"message": "Incorrect API key provided: sk-api-0123456789", "code": status}}
    async with TlsEngine(trusted, answers(status, record, location="https://elsewhere.example/v1")) as engine:
        async with started(engine.url, upstream_key="sk-api-0123456789") as bench:
            got = await bench.client.post("/chat/completions", json=CHAT, follow_redirects=False)
            text = got.text + str(got.headers) + bench.journal.read_text()
    assert got.status_code == (502 if status == 307 else status)
    assert "sk-api-0123456789" not in text and "elsewhere" not in text


async def test_each_wait_has_its_own_bound(trusted: Path) -> None:
    async def silent(seen: Seen) -> AsyncIterator[bytes]:
        await asyncio.sleep(20)
        yield b""

    async def stalls(seen: Seen) -> AsyncIterator[bytes]:
        yield SSE_HEAD + chunk(EVENTS[:100])
        await asyncio.sleep(20)

    body = json.dumps(CHAT).encode()
    async with TlsEngine(trusted, silent) as engine, client(engine, first_byte=0.3, idle=20) as api:
        with pytest.raises(UpstreamTimeout, match="begin"):
            await api.send("POST", "/v1/chat/completions", [], body)
    async with TlsEngine(trusted, stalls) as engine, client(engine, first_byte=20, idle=0.3) as api:
        answer = await api.send("POST", "/v1/chat/completions", [], body)
        async with asyncio.timeout(5):
            with pytest.raises(UpstreamTimeout, match="nothing more"):
                await answer.read()
        answer.close()


async def test_a_connection_that_breaks_is_distinguished_from_one_that_never_was(trusted: Path) -> None:
    async def dies(seen: Seen) -> AsyncIterator[bytes]:
        raise Cut
        yield b""

    async def breaks(seen: Seen) -> AsyncIterator[bytes]:
        yield SSE_HEAD + chunk(EVENTS[:100])
        raise Cut

    async with TlsEngine(trusted, dies) as engine, client(engine) as api:
        with pytest.raises(UpstreamBroke, match="before an answer"):
            await api.send("POST", "/v1/chat/completions", [], b"{}")
        assert len(engine.calls) == 1, "a call that was sent is not sent again"
    async with TlsEngine(trusted, breaks) as engine, client(engine) as api:
        answer = await api.send("POST", "/v1/chat/completions", [], b"{}")
        with pytest.raises(UpstreamBroke, match="in the middle"):
            await answer.read()
        answer.close()
    with pytest.raises(UpstreamUnreachable):
        async with client(engine) as api:
            await api.send("GET", "/v1/models", [], b"")


async def test_keys_of_netrc_and_cookies_of_the_api_are_not_used(
    started: Started, trusted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this machine's user has for the host is no business of an agent's call."""
    (tmp_path / ".netrc").write_text("machine localhost login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    async with TlsEngine(trusted, answers(200, BODY, set_cookie="session=1")) as engine, started(engine.url) as bench:
        for _ in range(2):
            got = await bench.client.post("/chat/completions", json=CHAT)
            assert isinstance(got, httpx.Response) and "set-cookie" not in got.headers
    for seen in engine.calls:
        assert "authorization" not in seen.headers and "cookie" not in seen.headers
