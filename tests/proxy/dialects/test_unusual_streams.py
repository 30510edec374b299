"""Streams with odd but readable values, through the proxy: what the agent gets, and what the record holds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.proxy.conftest import Started
from tests.proxy.fake_engine import FakeEngine, streams

Json = dict[str, Any]
HI = {"role": "user", "content": "hi"}
ROUTES: dict[str, tuple[str, Json]] = {
    "chat": ("/chat/completions", {"messages": [HI]}),
    "messages": ("/messages", {"messages": [HI], "max_tokens": 9}),
    "responses": ("/responses", {"input": "hi"}),
}
HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def chunk(delta: Json, token_id: int | None = None, *, finish: str | None = None, **fields: Any) -> Json:
    choice: Json = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
    if token_id is not None:
        entry = {"token": "t", "logprob": -0.1, "bytes": None, "top_logprobs": []}
        choice |= {"token_ids": [token_id], "logprobs": {"content": [entry]}}
    return {**HEAD, "choices": [choice], **fields}


def opening(**fields: Any) -> Json:
    return chunk({"role": "assistant", "content": ""}, prompt_token_ids=[1, 2], **fields)


USAGE = {**HEAD, "choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}}
STREAMS: dict[str, tuple[list[Json], str]] = {
    "a surrogate pair in two deltas": (
        [
            opening(), chunk({"content": "a\ud83d"}, 5), chunk({"content": "\ude00b"}, 6),
            chunk({}, 7, finish="stop"), USAGE,
        ],
        "a😀b",
    ),
    'finish reason and role "" before and after the end': (
        [
            opening(finish=""), chunk({"content": "a", "role": ""}, 5, finish=""),
            chunk({"content": "b"}, 6, finish=""), chunk({"role": ""}, 7, finish="stop"),
            chunk({"role": ""}, finish=""), USAGE,
        ],
        "ab",
    ),
    'id and model "" later': (
        [
            opening(), chunk({"content": "a"}, 5, id="", model=""), chunk({"content": "b"}, 6, id="", model=""),
            chunk({}, 7, finish="stop", id="", model=""), {**USAGE, "id": "", "model": ""},
        ],
        "ab",
    ),
}  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", STREAMS)
async def test_an_unusual_stream_is_read_as_intended(started: Started, route: str, name: str) -> None:
    chunks, text = STREAMS[name]
    data = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in chunks) + b"data: [DONE]\n\n"
    path, body = ROUTES[route]
    async with FakeEngine(streams(data)) as engine, started(engine.url) as bench:
        answer = await bench.client.post(path, json={"model": "m", "stream": True, **body})
        assert answer.status_code == 200
        [call] = bench.calls()
    assert call.outcome == "ok" and call.capture is not None and call.capture.complete, call.capture
    recorded = call.response_body
    assert text in json.dumps(recorded, ensure_ascii=False) and recorded["model"] == "m"
    assert "\\ud83d" not in answer.text or route == "chat"
    if route == "chat":
        choice = recorded["choices"][0]
        assert recorded["id"] == "chatcmpl-1" and choice["message"]["role"] == "assistant"
        assert choice["finish_reason"] == "stop"
    else:
        assert recorded.get("stop_reason", recorded.get("status")) in ("end_turn", "completed")
