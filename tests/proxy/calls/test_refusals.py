"""Calls that were not answered: whose refusal it was, and whether anything can have been sampled."""

from __future__ import annotations

from typing import Any

import pytest

from capture.record import FIELDS
from tests.proxy.conftest import Started
from tests.proxy.fake_engine import FakeEngine, answers, replays, streams

CHAT: dict[str, Any] = {"model": "my-policy", "messages": [{"role": "user", "content": "hi"}]}

REFUSED = {
    "Messages without max_tokens": ("/messages", {"model": "m", "messages": CHAT["messages"]}),
    "Messages with an unknown block": (
        "/messages", {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "x"}]}]}
    ),
    "Messages of no object": ("/messages", [1]),
    "Responses with an unknown item": ("/responses", {"model": "m", "input": [{"type": "x"}]}),
    "Responses in the background": ("/responses", {"model": "m", "input": "hi", "background": True}),
    "Gemini without contents": ("/v1beta/models/m:generateContent", {"contents": "x"}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_a_refusal_of_the_proxys_own_has_its_own_code(started: Started, name: str) -> None:
    path, body = REFUSED[name]
    async with FakeEngine(replays("vllm/chat-plain-length-nostream")) as engine, started(engine.url) as bench:
        root = bench.proxy.base_url.removesuffix("/v1")
        answer = await bench.client.post(root + path if path.startswith("/v1beta") else path, json=body)
        assert 400 <= answer.status_code < 500 and engine.calls == []
        call = bench.call()
    assert call.outcome == "error" and call.capture is not None
    assert {why.code for why in call.capture.unavailable.values()} == {"refused_by_proxy"}
    assert all("did not send this request" in why.detail for why in call.capture.unavailable.values())


VLLM = "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens"
SGLANG = "The input (5000 tokens) is longer than the model's context length (4096 tokens)."
LLAMACPP = "the request exceeds the available context size, try increasing it"
#: Of vLLM's input processor and SGLang's scheduler, where their front has let the prompt through.
LATER = [
    "The decoder prompt (length 5000) is longer than the maximum model length of 4096. Make sure that ...",
    "Input length (5000 tokens) exceeds the maximum allowed length (4090 tokens). Use a shorter input or enable ...",
    "Multimodal prompt is too long after expanding multimodal tokens. After expanding 10 => 5000 >= 4090.",
    "Request prompt exceeds the KV memory budget: input_len=5000.",
]
#: A request in each dialect, and the path it is sent to.
TOO_LONG: dict[str, dict[str, Any]] = {
    "/chat/completions": CHAT,
    "/completions": {"model": "my-policy", "prompt": "hi", "max_tokens": 9},
    "/messages": {**CHAT, "max_tokens": 9},
    "/responses": {"model": "my-policy", "input": "hi"},
    "/v1beta/models/my-policy:generateContent": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
}


@pytest.mark.parametrize("status", [400, 413, 500])
@pytest.mark.parametrize("message", [VLLM, SGLANG, LLAMACPP, *LATER])
@pytest.mark.parametrize("path", ["/chat/completions", "/messages"])
async def test_a_prompt_that_no_longer_fits_is_named(started: Started, message: str, status: int, path: str) -> None:
    await assert_named(started, message, status, path)


@pytest.mark.parametrize("message", [VLLM, SGLANG, LLAMACPP, *LATER])
@pytest.mark.parametrize("path", TOO_LONG)
async def test_a_prompt_that_no_longer_fits_is_named_in_every_dialect(
    started: Started, message: str, path: str
) -> None:
    await assert_named(started, message, 400, path)


async def assert_named(started: Started, message: str, status: int, path: str) -> None:
    error = {"error": {"message": message, "type": "BadRequestError", "code": status}}
    async with FakeEngine(answers(status, error)) as engine, started(engine.url) as bench:
        root = bench.proxy.base_url.removesuffix("/v1")
        answer = await bench.client.post(root + path if path.startswith("/v1beta") else path, json=TOO_LONG[path])
        assert answer.status_code == (400 if "completions" not in path else status), "no client makes the call again"
        call = bench.call()
    assert call.capture is not None and set(call.capture.unavailable) == set(FIELDS)
    assert {why.code for why in call.capture.unavailable.values()} == {"prompt_too_long"}


@pytest.mark.parametrize("path", ["/chat/completions", "/messages"])
async def test_a_prompt_that_no_longer_fits_is_named_inside_a_stream(started: Started, path: str) -> None:
    data = b'data: {"object":"error","message":"' + SGLANG.encode() + b'","code":400}\n\ndata: [DONE]\n\n'
    async with FakeEngine(streams(data)) as engine, started(engine.url) as bench:
        await bench.client.post(path, json={**CHAT, "max_tokens": 9, "stream": True})
        call = bench.call()
    assert call.capture is not None
    assert {why.code for why in call.capture.unavailable.values()} == {"prompt_too_long"}


@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/responses"])
async def test_also_after_a_chunk_that_only_opens_the_message(started: Started, path: str) -> None:
    opened = (
        b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    )
    error = b'data: {"error":{"message":"' + LATER[1].encode() + b'","code":400}}\n\ndata: [DONE]\n\n'
    async with FakeEngine(streams(opened + error)) as engine, started(engine.url) as bench:
        await bench.client.post(path, json={**TOO_LONG[path], "stream": True})
        call = bench.call()
    assert call.capture is not None and call.capture.completions == []
    assert {why.code for why in call.capture.unavailable.values()} == {"prompt_too_long"}


async def test_a_context_that_is_full_in_mid_reply_is_no_prompt_that_is_too_long(started: Started) -> None:
    text = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"so far"},"finish_reason":null}]}\n\n'
    error = b'data: {"error":{"message":"' + LLAMACPP.encode() + b'","code":500}}\n\n'
    async with FakeEngine(streams(text + error)) as engine, started(engine.url) as bench:
        await bench.client.post("/chat/completions", json={**CHAT, "stream": True})
        call = bench.call()
    assert call.capture is not None
    assert {why.code for why in call.capture.unavailable.values()} == {"stream_error"}


@pytest.mark.parametrize("status", [400, 404, 500, 503])
async def test_other_errors_of_the_engine_are_the_engines(started: Started, status: int) -> None:
    error = {"error": {"message": "no", "type": "x", "code": status}}
    async with FakeEngine(answers(status, error)) as engine, started(engine.url) as bench:
        await bench.client.post("/chat/completions", json=CHAT)
        call = bench.call()
    assert call.capture is not None
    assert {why.code for why in call.capture.unavailable.values()} == {"upstream_http_error"}
