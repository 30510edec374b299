"""The same request direct and through the proxy, on real engines: the same answer, and the direct call's own tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture.journal.call import Call
from capture.journal.journal import JournalReader
from proxy import Settings, serve
from tests.live.conftest import LiveEngine

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
USER = {"role": "user", "content": "Name two colours."}
ASK_WEATHER = {"role": "user", "content": "What is the weather in Paris? Use the tool."}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "colour",
        "schema": {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]},
    },
}

CHAT: dict[str, dict[str, Any]] = {
    "plain": {"messages": [USER], "max_tokens": 12},
    "to its own end": {"messages": [{"role": "user", "content": "Capital of France? One word."}], "max_tokens": 64},
    "a system prompt": {"messages": [{"role": "system", "content": "Be brief."}, USER], "max_tokens": 12},
    "n=2": {"messages": [USER], "max_tokens": 8, "n": 2},
    "a stop string": {"messages": [USER], "max_tokens": 40, "stop": ["world are"]},
    "length cut": {"messages": [USER], "max_tokens": 1},
    "tools auto": {"messages": [ASK_WEATHER], "max_tokens": 40, "tools": [WEATHER]},
    "tools required": {"messages": [ASK_WEATHER], "max_tokens": 40, "tools": [WEATHER], "tool_choice": "required"},
    "a named tool": {
        "messages": [ASK_WEATHER],
        "max_tokens": 40,
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    },
    "guided JSON": {"messages": [USER], "max_tokens": 24, "response_format": SCHEMA},
    "logprobs asked for": {"messages": [USER], "max_tokens": 6, "logprobs": True, "top_logprobs": 2},
    "alternatives without logprobs": {"messages": [USER], "max_tokens": 6, "logprobs": False, "top_logprobs": 2},
    "logprobs null": {"messages": [USER], "max_tokens": 6, "logprobs": None},
    "a multi-turn tool history": {
        "messages": [
            ASK_WEATHER,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ],
        "max_tokens": 10,
        "tools": [WEATHER],
    },
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "The capital of France is", "max_tokens": 6},
    "ids": {"prompt": [504, 3575, 282, 4649, 314], "max_tokens": 6},
    "n=2 of text": {"prompt": "The capital of France is", "max_tokens": 4, "n": 2},
}
ERRORS: dict[str, dict[str, Any]] = {
    "no such model": {"model": "nope", "messages": [USER]},
    "wrong type": {"messages": [USER], "max_tokens": "many"},
    "messages missing": {"max_tokens": 5},
    "too long a context": {"messages": [{"role": "user", "content": "word " * 20000}]},
    "top_logprobs without logprobs": {"messages": [USER], "logprobs": False, "top_logprobs": 2},
}
#: What differs between any two calls of the same request.
VOLATILE = {"id", "created", "system_fingerprint"}


class Pair:
    """The engine, reached direct and through the proxy."""

    def __init__(
        self, engine: LiveEngine, direct: httpx.AsyncClient, through: httpx.AsyncClient, journal: Path
    ) -> None:
        self.engine, self.direct, self.through, self.journal = engine, direct, through, journal

    def last_call(self) -> Call:
        return list(JournalReader(self.journal))[-1]

    def body(self, shape: dict[str, Any], **more: Any) -> dict[str, Any]:
        body = {"model": self.engine.model, "temperature": 0, **shape, **more}
        if body.get("n", 1) > 1 and self.engine.name == "vllm":
            body.update(temperature=1.0, seed=11)  # vLLM refuses several greedy choices, and keeps to a seed
        return body


@asynccontextmanager
async def pair(engine: LiveEngine, out: Path, **options: Any) -> AsyncIterator[Pair]:
    key = {"authorization": f"Bearer {engine.api_key}"} if engine.api_key else {}
    settings = Settings(upstream=[engine.base_url], upstream_key=engine.api_key, out=out, probe=False, **options)
    async with (
        serve(settings) as proxy,
        httpx.AsyncClient(base_url=engine.base_url, headers=key, timeout=300) as direct,
        httpx.AsyncClient(base_url=proxy.base_url, timeout=300) as through,
    ):
        yield Pair(engine, direct, through, out / "default/trajectory/llm_trajectory.jsonl")


@pytest.fixture(params=["vllm", "sglang"])
def live(request: pytest.FixtureRequest) -> LiveEngine:
    engine: LiveEngine = request.getfixturevalue(request.param)
    return engine


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("shape", CHAT)
async def test_chat(live: LiveEngine, tmp_path: Path, shape: str, stream: bool) -> None:
    if live.name == "sglang" and shape == "logprobs null":
        pytest.skip("SGLang refuses null where vLLM takes it; through the proxy it is answered")
    if live.name == "vllm" and shape == "alternatives without logprobs":
        pytest.skip("vLLM refuses it: see the errors")
    async with pair(live, tmp_path) as both:
        await compare(both, "/chat/completions", CHAT[shape], stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("shape", COMPLETIONS)
async def test_completions(live: LiveEngine, tmp_path: Path, shape: str, stream: bool) -> None:
    async with pair(live, tmp_path) as both:
        await compare(both, "/completions", COMPLETIONS[shape], stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("shape", ERRORS)
async def test_errors(live: LiveEngine, tmp_path: Path, shape: str, stream: bool) -> None:
    if live.name == "sglang" and shape in ("no such model", "messages missing", "top_logprobs without logprobs"):
        pytest.skip("no error: SGLang serves any model name, ignores the last, and never answers without messages")
    async with pair(live, tmp_path) as both:
        body = both.body({**ERRORS[shape], "stream": stream})
        direct = await both.direct.post("/chat/completions", json=body)
        through = await both.through.post("/chat/completions", json=body)
        call = both.last_call()
    assert through.status_code == direct.status_code >= 400
    assert steady(through.json()) == steady(direct.json())
    assert call.outcome == "error" and call.capture is not None and not call.capture.complete


async def test_a_buffered_stream_is_complete_and_says_the_same(live: LiveEngine, tmp_path: Path) -> None:
    async with pair(live, tmp_path, buffered=True) as both:
        body = both.body(CHAT["plain"], stream=True)
        direct = parse((await both.direct.post("/chat/completions", json=body)).content)
        through = parse((await both.through.post("/chat/completions", json=body)).content)
        call = both.last_call()
    assert text_of(through) == text_of(direct)
    assert call.capture is not None and call.capture.complete


async def test_an_agent_that_leaves_stops_the_engine(live: LiveEngine, tmp_path: Path) -> None:
    async with pair(live, tmp_path) as both:
        body = both.body({"messages": [USER], "max_tokens": 400, "ignore_eos": True}, stream=True)
        async with both.through.stream("POST", "/chat/completions", json=body) as answer:
            async for data in answer.aiter_raw():
                if data.count(b"content") > 3 or b'"content":"' in data:
                    break
        async with asyncio.timeout(10):
            while not both.journal.exists() or not list(JournalReader(both.journal)):
                await asyncio.sleep(0.05)
        call = both.last_call()
    assert call.outcome == "aborted"
    capture = call.capture
    assert capture is not None and not capture.complete
    assert len(capture.completions[0].logprobs or []) < 400


async def compare(both: Pair, path: str, shape: dict[str, Any], stream: bool) -> None:
    body = both.body(shape, **({"stream": True} if stream else {}))
    direct = await both.direct.post(path, json=body)
    through = await both.through.post(path, json=body)
    call = both.last_call()
    assert through.status_code == direct.status_code == 200, (direct.text, through.text)
    assert through.headers["content-type"] == direct.headers["content-type"]
    if stream:
        assert merged(parse(through.content)) == merged(parse(direct.content))
        assert set(keys(parse(through.content))) == set(keys(parse(direct.content)))
    else:
        assert steady(through.json()) == steady(direct.json())
    await same_tokens(both, path, body, call)


async def same_tokens(both: Pair, path: str, body: dict[str, Any], call: Call) -> None:
    """The record holds what a direct call that asks for ids gets."""
    capture = call.capture
    assert capture is not None and capture.complete, capture and capture.unavailable
    asked = {**body, "stream": False, "return_token_ids": True, "logprobs": True if "chat" in path else 0}
    asked.pop("stream_options", None)
    truth = (await both.direct.post(path, json=asked)).json()
    prompt = truth.get("prompt_token_ids") or truth["choices"][0].get("prompt_token_ids")
    assert capture.prompt_token_ids == prompt
    for choice in truth["choices"]:
        captured = capture.completions[choice["index"]]
        ids = choice.get("token_ids") or choice.get("response_token_ids")
        choice_logprobs = choice["logprobs"]
        logprobs = (
            [e["logprob"] for e in choice_logprobs["content"]] if "chat" in path else choice_logprobs["token_logprobs"]
        )
        assert captured.token_ids == ids
        assert captured.logprobs == pytest.approx(logprobs, abs=2e-4)


def parse(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(b[6:]) for b in data.decode().split("\n\n") if b.startswith("data: ") and b[6:] != "[DONE]"]


def merged(chunks: list[dict[str, Any]]) -> list[Any]:
    """A stream's meaning, whatever its cuts: two calls of an engine cut the same text in different places."""
    by_choice: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            into = by_choice.setdefault(choice["index"], {"text": "", "reasoning": "", "tools": {}, "finish": None})
            delta = choice.get("delta") or {}
            into["text"] += delta.get("content") or choice.get("text") or ""
            into["reasoning"] += delta.get("reasoning_content") or delta.get("reasoning") or ""
            into["finish"] = choice.get("finish_reason") or into["finish"]
            for tool in delta.get("tool_calls") or []:
                tool_call = into["tools"].setdefault(tool["index"], {"name": "", "arguments": ""})
                function = tool.get("function") or {}
                tool_call["name"] += function.get("name") or ""
                tool_call["arguments"] += function.get("arguments") or ""
            logprobs = choice.get("logprobs")
            if logprobs:
                into.setdefault("logprobs", []).extend(round(e["logprob"], 3) for e in logprobs.get("content") or [])
    return [sorted(by_choice.items()), usage]


def keys(chunks: list[Any]) -> list[str]:
    """Every key that stands anywhere in the chunks, with whether it ever holds more than null."""
    found: dict[str, bool] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for name, item in value.items():
                found[f"{path}.{name}"] = found.get(f"{path}.{name}", False) or item is not None
                walk(item, f"{path}.{name}")
        elif isinstance(value, list):
            for item in value:
                walk(item, path)

    walk(chunks, "")
    return [f"{path}={'value' if filled else 'null'}" for path, filled in found.items()]


def text_of(chunks: list[dict[str, Any]]) -> Any:
    return [(index, part["text"], part["finish"]) for index, part in merged(chunks)[0]]


def steady(value: Any) -> Any:
    """A body without what differs between two calls of the same request."""
    if isinstance(value, dict):
        return {name: steady(item) for name, item in value.items() if name not in VOLATILE}
    if isinstance(value, list):
        return [steady(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value
