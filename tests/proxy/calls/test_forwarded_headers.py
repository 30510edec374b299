"""Which of an agent's headers reach the engine, beside the engine's key."""

from __future__ import annotations

import pytest

from tests.proxy.conftest import Started
from tests.proxy.fake_engine import FakeEngine, replays

PLAIN = "vllm/chat-plain-length-nostream"
CHAT = {"model": "my-policy", "messages": [{"role": "user", "content": "hi"}]}
#: Names that gateways, routers and servers read the way of a request, its sender or its key from.
STEERING = (
    "x-prefiller-host-port", "x-gateway-destination-endpoint", "x-envoy-original-dst-host", "x-envoy-original-path",
    "x-envoy-retry-on", "x-original-host", "x-original-uri", "x-host", "x-http-destinationurl", "x-smg-target-worker",
    "x-smg-routing-key", "x-data-parallel-rank", "x-user-id", "x-forwarded-client-cert", "x-remote-user", "api-key",
    "x-auth-token", "x_forwarded_for", "transfer_encoding", "content_length", "openai-organization", "openai-project",
    "x-amz-target", "x-ms-client-principal", "host_", "x-anything-new",
)  # fmt: skip


@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_headers_that_steer_gateways_are_not_forwarded(started: Started, method: str) -> None:
    path = "/chat/completions" if method == "POST" else "/models"
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url, upstream_key="engine-secret") as bench:
        headers = dict.fromkeys(STEERING, "10.6.6.6:80")
        answer = await bench.client.request(method, path, json=CHAT if method == "POST" else None, headers=headers)
    assert answer.status_code == 200
    for seen in engine.seen:
        assert set(STEERING).isdisjoint(seen.headers)
    assert engine.seen[-1].headers["authorization"] == "Bearer engine-secret"


async def test_headers_that_engines_read_are_forwarded(started: Started) -> None:
    read = {"traceparent": "00-1-2-01", "x-request-id": "r", "accept-language": "de", "anthropic-beta": "b"}
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        await bench.client.post("/chat/completions", json=CHAT, headers={**read, "x-mine": "1"})
        assert read.items() <= engine.calls[0].headers.items() and "x-mine" not in engine.calls[0].headers


async def test_a_setting_adds_headers_to_forward(started: Started) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url, forward_header=["X-Mine"]) as bench:
        await bench.client.post("/chat/completions", json=CHAT, headers={"x-mine": "1", "x-other": "2"})
        await bench.client.get("/models", headers={"x-mine": "1", "connection": "x-mine, keep-alive"})
    assert engine.calls[0].headers["x-mine"] == "1" and "x-other" not in engine.calls[0].headers
    assert "x-mine" not in engine.seen[-1].headers  # named as a header of one connection
