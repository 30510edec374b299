"""The embedded llama.cpp through the proxy: the agent's answer is the direct one, the record is what was sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from capture.journal.call import Call
from sandbox.embedded_engine import EmbeddedEngine
from tests.proxy.conftest import Bench, Started

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
COLOURS = {"messages": [{"role": "user", "content": "Name two colours."}]}
CAPITAL = {"messages": [{"role": "user", "content": "What is the capital of France? One word."}]}
ASK = {"messages": [{"role": "user", "content": "What is the weather in Paris? Use the tool."}], "tools": [WEATHER]}
#: Deterministic, and with a cache of prompts that two equal calls share.
STEADY = {"temperature": 0, "seed": 1, "cache_prompt": True}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("/chat/completions", {**COLOURS, "max_tokens": 12}),
    "to its own end": ("/chat/completions", {**CAPITAL, "max_tokens": 48}),
    "one token": ("/chat/completions", {**COLOURS, "max_tokens": 1}),
    "a stop string": ("/chat/completions", {**COLOURS, "max_tokens": 40, "stop": ["world"]}),
    "tools": ("/chat/completions", {**ASK, "max_tokens": 48}),
    "tools required": ("/chat/completions", {**ASK, "max_tokens": 48, "tool_choice": "required"}),
    "n=2": ("/chat/completions", {**COLOURS, "max_tokens": 8, "n": 2}),
    "logprobs asked for": ("/chat/completions", {**COLOURS, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}),
    "logprobs without alternatives": ("/chat/completions", {**COLOURS, "max_tokens": 6, "logprobs": True}),
    "alternatives without logprobs": ("/chat/completions", {**COLOURS, "max_tokens": 6, "top_logprobs": 3}),
    "text": ("/completions", {"prompt": "The capital of France is", "max_tokens": 6}),
    "ids": ("/completions", {"prompt": [504, 3575, 282, 4649, 314], "max_tokens": 6}),
    "text with logprobs": ("/completions", {"prompt": "The capital of France is", "max_tokens": 6, "logprobs": 2}),
    "a number beyond 64 bits": (
        "/chat/completions",
        {**COLOURS, "max_tokens": 6, "chat_template_kwargs": {"x": 10**30}},
    ),
    "no messages": ("/chat/completions", {"max_tokens": 6}),
    "messages of a wrong type": ("/chat/completions", {"messages": 5}),
    "too long": ("/completions", {"prompt": "word " * 9000, "max_tokens": 6}),
}
#: What an engine does not repeat from one call to the next.
FLEETING = frozenset(("id", "created", "timings"))


@pytest.fixture
def bench_of(started: Started, engine: EmbeddedEngine) -> Callable[..., Any]:
    return lambda **options: started(engine.base_url, **options)


def steady(value: Any) -> Any:
    """An answer without what differs between two equal calls: a number from warm or cold cache included."""
    if isinstance(value, dict):
        return {name: steady(item) for name, item in value.items() if name not in FLEETING | {"prompt_tokens_details"}}
    if isinstance(value, list):
        return [steady(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


async def both(bench: Bench, engine: EmbeddedEngine, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
    # llama.cpp ends a kept connection whenever it likes; this client sends nothing twice, so it keeps none.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=engine.base_url, timeout=60, limits=limits) as direct:
        await direct.post(path, json=body)  # the prompt is in the cache for both
        return await direct.post(path, json=body), await bench.client.post(path, json=body)


@pytest.mark.parametrize("shape", SHAPES)
async def test_the_agent_gets_the_engines_own_answer(
    bench_of: Callable[..., Any], engine: EmbeddedEngine, shape: str
) -> None:
    path, body = SHAPES[shape]
    async with bench_of() as bench:
        direct, through = await both(bench, engine, path, {**STEADY, **body})
        (call,) = bench.calls()
    assert through.status_code == direct.status_code
    assert steady(through.json()) == steady(direct.json())
    assert through.headers["content-type"] == direct.headers["content-type"]
    assert call.response_body.get("usage") == through.json().get("usage")


COMPLETE = ("plain", "to its own end", "one token", "tools", "logprobs asked for", "text", "ids")
STREAMED = ("plain", "to its own end", "tools", "tools required", "a stop string", "text")


def assembled(data: bytes) -> dict[str, Any]:
    """What a stream says, however it is cut into chunks."""
    record: dict[str, Any] = {"text": "", "finish": None, "tools": {}, "done": data.endswith(b"data: [DONE]\n\n")}
    for block in data.decode().split("\n\n"):
        if not block.startswith("data: {"):
            continue
        for choice in json.loads(block[6:]).get("choices", []):
            delta = choice.get("delta", {})
            record["text"] += delta.get("content") or choice.get("text") or ""
            record["finish"] = choice.get("finish_reason") or record["finish"]
            for tool in delta.get("tool_calls") or ():
                tool_call = record["tools"].setdefault(tool["index"], {"name": "", "arguments": ""})
                for name, value in tool["function"].items():
                    tool_call[name] += value
    return record


@pytest.mark.parametrize("shape", STREAMED)
async def test_a_streamed_answer_says_the_same_as_the_engines_own_stream(
    bench_of: Callable[..., Any], engine: EmbeddedEngine, shape: str
) -> None:
    path, body = SHAPES[shape]
    async with bench_of() as bench:
        direct, through = await both(bench, engine, path, {**STEADY, **body, "stream": True})
        (call,) = bench.calls()
    assert through.headers["content-type"].split(";")[0] == direct.headers["content-type"].split(";")[0]
    assert assembled(through.content) == assembled(direct.content)
    assert b"logprob" not in through.content.replace(b'"logprobs":null', b"")
    assert call.metadata["stream"] is True


async def recorded(bench: Bench, path: str, body: dict[str, Any]) -> Call:
    answer = await bench.client.post(path, json={**STEADY, **body})
    assert answer.status_code == 200
    return bench.calls()[-1]


def codes(call: Call) -> dict[str, str]:
    assert call.capture is not None
    return {name: why.code for name, why in call.capture.unavailable.items()}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "shape", ["plain", "to its own end", "one token", "tools", "logprobs asked for", "text", "ids"]
)
async def test_ids_and_logprobs_are_complete_and_those_of_the_engine(
    bench_of: Callable[..., Any], engine: EmbeddedEngine, shape: str, stream: bool
) -> None:
    path, body = SHAPES[shape]
    async with bench_of() as bench:
        call = await recorded(bench, path, {**body, "stream": stream})
    capture = call.capture
    assert capture is not None and capture.complete, codes(call)
    (completion,) = capture.completions
    assert completion.token_ids is not None and completion.logprobs is not None and completion.tokens is not None
    assert len(completion.token_ids) == len(completion.logprobs) == call.response_body["usage"]["completion_tokens"]
    assert all(value <= 0 for value in completion.logprobs)
    root = engine.base_url.removesuffix("/v1")
    async with httpx.AsyncClient(base_url=root, timeout=60) as direct:
        text = (await direct.post("/detokenize", json={"tokens": completion.token_ids.tolist()})).json()["content"]
        assert text.startswith("".join(completion.tokens)[: len(text)].split("<|im_end|>")[0])
        prompt = body.get("prompt")
        if path == "/chat/completions":
            fields = {name: body[name] for name in ("messages", "tools") if name in body}
            prompt = (await direct.post("/apply-template", json=fields)).json()["prompt"]
        if isinstance(prompt, str):
            asked = {"content": prompt, "add_special": True, "parse_special": True}
            prompt = (await direct.post("/tokenize", json=asked)).json()["tokens"]
    assert capture.prompt_token_ids == prompt
    assert len(capture.prompt_token_ids or ()) == call.response_body["usage"]["prompt_tokens"]


async def test_logprobs_are_those_that_a_direct_call_asks_for(
    bench_of: Callable[..., Any], engine: EmbeddedEngine
) -> None:
    path, body = SHAPES["plain"]
    async with httpx.AsyncClient(base_url=engine.base_url, timeout=60) as direct:
        asked = {**STEADY, **body, "logprobs": True, "top_logprobs": 1}
        await direct.post(path, json=asked)
        entries = (await direct.post(path, json=asked)).json()["choices"][0]["logprobs"]["content"]
    async with bench_of() as bench:
        capture = (await recorded(bench, path, body)).capture
    assert capture is not None
    assert capture.completions[0].token_ids == [entry["id"] for entry in entries]
    assert capture.completions[0].logprobs == pytest.approx([entry["logprob"] for entry in entries], abs=1e-3)


async def test_each_of_n_choices_is_captured(bench_of: Callable[..., Any]) -> None:
    async with bench_of() as bench:
        call = await recorded(bench, "/chat/completions", {**COLOURS, "max_tokens": 8, "n": 2})
    capture = call.capture
    assert capture is not None and capture.complete, codes(call)
    assert [len(completion.token_ids or ()) for completion in capture.completions] == [8, 8]


@pytest.mark.parametrize(("many", "code"), [(1, "character_ids_not_returned"), (2, "choice_not_counted")])
async def test_a_character_of_several_tokens_is_not_called_complete(
    bench_of: Callable[..., Any], many: int, code: str
) -> None:
    """A fox is four tokens, and one entry with the last one's id; of n choices only the first one is counted."""
    body = {"prompt": "🦊 🦊 🦊 🦊 🦊 🦊 🦊", "max_tokens": 12, "n": many, "temperature": 0, "seed": 1}
    async with bench_of() as bench:
        call = await recorded(bench, "/completions", body)
    assert codes(call) == {"completion_token_ids": code}


async def test_how_the_engine_samples_by_itself_is_on_the_record(bench_of: Callable[..., Any]) -> None:
    async with bench_of() as bench:
        call = await recorded(bench, "/chat/completions", {**COLOURS, "max_tokens": 2, "top_k": 7})
    sampling = call.metadata["sampling"]
    assert sampling["sent"] == {"max_tokens": 2, "top_k": 7, "temperature": 0, "seed": 1}
    defaults = {
        name: round(sampling["engine_defaults"][name], 3) for name in ("temperature", "top_k", "top_p", "min_p")
    }
    assert defaults == {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}, "llama.cpp's own, not neutral"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_is_not_called_complete(bench_of: Callable[..., Any], stream: bool) -> None:
    """llama.cpp leaves out the token that completes the stop string: the record says so and names the remedy."""
    async with bench_of() as bench:
        call = await recorded(bench, "/chat/completions", {**SHAPES["a stop string"][1], "stream": stream})
    assert call.response_body["choices"][0]["finish_reason"] == "stop"
    assert codes(call) == {"completion_token_ids": "stop_token_not_returned"}
    assert call.capture is not None and call.capture.completions[0].token_ids, "what came is kept"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_official_client_works_and_finds_its_own_fields_only(
    bench_of: Callable[..., Any], engine: EmbeddedEngine, stream: bool
) -> None:
    async with bench_of(keepalive=0.02) as bench:
        api = openai.AsyncOpenAI(base_url=bench.proxy.base_url, api_key="none", max_retries=0)
        request: dict[str, Any] = {**COLOURS, "model": engine.model, "max_tokens": 24, "temperature": 0}
        if stream:
            text = ""
            async for chunk in await api.chat.completions.create(
                **request, stream=True, stream_options={"include_usage": True}
            ):
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                usage = chunk.usage
                assert all(choice.logprobs is None for choice in chunk.choices)
        else:
            answer = await api.chat.completions.create(**request)
            text, usage = answer.choices[0].message.content or "", answer.usage
            assert answer.choices[0].logprobs is None
        await api.close()
        call = bench.call()
    assert call.response_body["choices"][0]["message"]["content"] == text and len(text) > 10
    assert usage is not None and usage.completion_tokens == 24
    assert call.capture is not None and call.capture.complete


async def test_an_agent_that_leaves_stops_the_engine(bench_of: Callable[..., Any], engine: EmbeddedEngine) -> None:
    async with bench_of() as bench:
        with pytest.raises(httpx.ReadTimeout):
            await bench.client.post(
                "/chat/completions", json={**COLOURS, "max_tokens": 3000, "ignore_eos": True}, timeout=0.7
            )
        (call,) = await bench.recorded()
        assert call.outcome == "aborted"
        # All four slots are free again: four calls at once do not wait for a reply of 3000 tokens.
        answer = await bench.client.post("/chat/completions", json={**COLOURS, "max_tokens": 2, "n": 4}, timeout=20)
    assert answer.status_code == 200


async def test_the_logprobs_of_llamacpp_are_measured_and_have_no_temperature(bench_of: Callable[..., Any]) -> None:
    """The same token at temperature 1 and 2, with and without a cut: one logprob, and each record says why."""
    first = {**COLOURS, "max_tokens": 1, "seed": 3}
    async with bench_of(measure_logprobs=True) as bench:
        async with asyncio.timeout(60):
            while (await bench.proxy.logprobs() or {}).get("source") != "probe":
                await asyncio.sleep(0.05)
        for sampling in (
            {"temperature": 1, "top_k": 1},
            {"temperature": 2, "top_k": 1},
            {"temperature": 2, "top_k": 40},
        ):
            await bench.client.post("/chat/completions", json={**first, **sampling}, timeout=60)
    calls = bench.calls()
    wanted = {"temperature": "not_applied", "truncation": "not_applied", "values": "logprobs", "source": "probe"}
    assert [call.metadata["logprobs"] for call in calls] == [wanted] * 3
    logprobs = [call.capture.completions[0].logprobs[0] for call in calls]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-3), "top_k 1 takes the same token"


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("own", [{}, {"max_tokens": 900}, {"n_predict": -1}, {"n": 2}], ids=str)
async def test_a_budget_of_tokens_holds(bench_of: Callable[..., Any], own: dict[str, Any], streamed: bool) -> None:
    """Four calls at once, each of which would sample more than is left."""
    forced = {"temperature": 1.0, "ignore_eos": True}
    body = {**COLOURS, **own, "model": "m", "stream": streamed}
    async with bench_of(max_sampled_tokens=30, max_output_tokens=12, force_sampling=forced) as bench:
        await asyncio.gather(*(bench.client.post("/chat/completions", json=body) for _ in range(4)))
        calls = bench.calls()
        state = bench.proxy.sessions.get("default").state()["budget"]
    sampled = [len(choice.token_ids or ()) for call in calls for choice in call.capture.completions]
    assert sum(sampled) == state["sampled_tokens"] == 30 and max(sampled) == 12
    assert [call.outcome for call in calls if call.outcome not in ("ok", "ended")] == []
    assert state["reached"] == "max_sampled_tokens" and [call.outcome for call in calls].count("ended") >= 1
