"""Budget, forced sampling, output cap, grammars and purpose, in every dialect: engine, agent and journal."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from proxy.errors import SessionError
from proxy.sampling import LIMITS
from tests.proxy.conftest import Bench, Started
from tests.proxy.fake_engine import FakeEngine, Seen, answers, replays, streams, transcript
from tests.schemas import validator

USER = [{"role": "user", "content": "hi"}]
GEMINI = "/v1beta/models/m:generateContent"
#: dialect -> path, body, and how to stream it.
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/chat/completions", {"model": "m", "messages": USER}),
    "completions": ("/completions", {"model": "m", "prompt": "hi"}),
    "responses": ("/responses", {"model": "m", "input": "hi"}),
    "messages": ("/messages", {"model": "m", "max_tokens": 32000, "messages": USER}),
    "gemini": (GEMINI, {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}),
}
STREAMED = {name: (path, {**body, "stream": True}) for name, (path, body) in DIALECTS.items()} | {
    "gemini": (GEMINI.replace("generate", "streamGenerate") + "?alt=sse", DIALECTS["gemini"][1])
}
#: How a finished reply says that the turn is over.
ENDS = {
    "chat": '"finish_reason":"stop"',
    "completions": '"finish_reason":"stop"',
    "responses": '"status":"completed"',
    "messages": '"stop_reason":"end_turn"',
    "gemini": '"finishReason":"STOP"',
}


def engine_for(dialect: str, *, streamed: bool = False) -> FakeEngine:
    kind = "cmpl" if dialect == "completions" else "chat-plain-length"
    return FakeEngine(replays(f"vllm/{kind}-{'stream' if streamed else 'nostream'}"))


async def send(bench: Bench, path: str, body: dict[str, Any]) -> tuple[int, str]:
    root = bench.proxy.base_url.removesuffix("/v1") if path.startswith("/v1beta") else bench.proxy.base_url
    answer = await bench.client.post(root + path, json=body)
    return answer.status_code, answer.text


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_past_the_budget_the_agent_gets_a_message_that_ends_its_turn(
    started: Started, dialect: str, streamed: bool
) -> None:
    path, body = (STREAMED if streamed else DIALECTS)[dialect]
    async with engine_for(dialect, streamed=streamed) as engine, started(engine.url, max_calls=1) as bench:
        await send(bench, path, body)
        status, text = await send(bench, path, body)
        statuses = [(await send(bench, path, body))[0] for _ in range(3)]
        assert len(engine.calls) == 1
        first, *ended = bench.calls()
        lines = bench.journal.read_text().splitlines()
        state = bench.proxy.sessions.get("default").state()
    assert status == 200 and "1 of 1 calls were made (max_calls)" in text
    assert ENDS[dialect] in text.replace(" ", "")
    assert statuses == [200, 200, 403]
    assert first.outcome == "ok" and first.capture is not None and first.capture.complete
    for call in ended:
        assert call.outcome == "ended" and call.status_code == 403 and call.capture is not None
        assert not call.capture.completions
        assert {why.code for why in call.capture.unavailable.values()} == {"budget_reached"}
        assert set(call.response_body) == {"error"}
        assert call.metadata["ended"]["limit"] == "max_calls" and call.metadata["ended"]["used"] == 1
    assert [call.metadata["ended"]["answer"] for call in ended] == ["message"] * 3 + ["error"]
    for line in lines:
        validator("llm_trajectory_line.v1").validate(json.loads(line))
    assert state["calls"] == 1 and state["budget"]["reached"] == "max_calls" and state["incomplete"] == {}


async def test_every_choice_counts_and_the_last_call_is_cut_to_what_is_left(started: Started) -> None:
    chat = {"model": "m", "messages": USER, "max_tokens": 900}
    recorded = json.loads(transcript("vllm/chat-n2-nostream")[1])
    sampled = recorded["usage"]["completion_tokens"]
    async with FakeEngine(replays("vllm/chat-n2-nostream")) as engine:
        async with started(engine.url, max_sampled_tokens=sampled + 5) as bench:
            await bench.client.post("/chat/completions", json={**chat, "n": 2})
            await bench.client.post("/chat/completions", json=chat)
            await bench.client.post("/chat/completions", json=chat)
            first, second, third = bench.calls()[-3:]
    assert [seen.body["max_tokens"] for seen in engine.calls] == [(sampled + 5) // 2, 5]
    assert second.metadata["sampling"]["output_cap"] == {"asked": 900, "sent": 5, "by": "max_sampled_tokens"}
    assert second.request_body["max_tokens"] == 900 and first.outcome == second.outcome == "ok"
    assert third.outcome == "ended" and third.metadata["ended"]["limit"] == "max_sampled_tokens"


async def test_a_stream_that_waits_for_its_part_of_the_budget_is_kept_alive(started: Started) -> None:
    chat = {"model": "m", "messages": USER, "stream": True}
    released = asyncio.Event()

    async def hold(_: Seen) -> None:
        await released.wait()

    first, later = streams(transcript("vllm/chat-tokid-stream")[1], then=hold), replays("vllm/chat-tokid-stream")
    async with FakeEngine(first, later) as engine:
        async with started(engine.url, max_sampled_tokens=1000, keepalive=0.02) as bench:
            running = asyncio.ensure_future(bench.client.post("/chat/completions", json=chat))
            async with asyncio.timeout(5):
                while not engine.calls:
                    await asyncio.sleep(0.005)
            async with bench.client.stream("POST", "/chat/completions", json=chat) as waiting:
                pieces = waiting.aiter_text()
                assert (await anext(pieces)).startswith(": keep-alive")
                assert len(engine.calls) == 1
                released.set()
                text = "".join([piece async for piece in pieces])
            assert text.endswith("data: [DONE]\n\n") and (await running).is_success
            assert [call.outcome for call in bench.calls()] == ["ok", "ok"]
            assert engine.calls[1].body["max_tokens"] < 1000


async def test_calls_that_the_engine_did_not_answer_cost_nothing(started: Started) -> None:
    down = answers(503, {"error": {"message": "busy", "code": 503}})
    good = replays("vllm/chat-plain-length-nostream")
    chat = {"model": "m", "messages": USER}
    async with FakeEngine(down, down, good) as engine, started(engine.url, max_calls=1) as bench:
        got = [(await bench.client.post("/chat/completions", json=chat)).status_code for _ in range(4)]
        outcomes = [call.outcome for call in bench.calls()]
    assert got == [503, 503, 200, 200] and outcomes == ["error", "error", "ok", "ended"]


async def test_a_budget_holds_when_the_session_is_opened_again(started: Started) -> None:
    chat = {"model": "m", "messages": USER}
    async with FakeEngine(replays("vllm/chat-plain-length-nostream")) as engine:
        for _ in range(2):
            async with started(engine.url, max_calls=2) as bench:
                await bench.client.post("/chat/completions", json=chat)
        async with started(engine.url, max_calls=2) as bench:
            await bench.client.post("/chat/completions", json=chat)
            outcomes = [call.outcome for call in bench.calls()]
    assert outcomes == ["ok", "ok", "ended"] and len(engine.calls) == 2


async def test_tokens_are_counted_where_capture_is_off_and_the_agent_streams(started: Started) -> None:
    chat = {"model": "m", "messages": USER, "stream": True}
    async with FakeEngine(replays("vllm/chat-tokid-stream")) as engine:
        async with started(engine.url, max_sampled_tokens=8, capture=False) as bench:
            await bench.client.post("/chat/completions", json=chat)
            assert engine.calls[0].body["stream_options"] == {"include_usage": True}
            state = bench.proxy.sessions.get("default").state()
    assert state["budget"]["sampled_tokens"] > 0


async def test_a_limit_that_does_not_fit_the_context_is_taken_back(started: Started) -> None:
    chat = {"model": "m", "messages": USER}
    refused, good = replays("vllm/err-max-tokens"), replays("vllm/chat-plain-length-nostream")
    async with FakeEngine(refused, good) as engine, started(engine.url, max_output_tokens=9000) as bench:
        answer = await bench.client.post("/chat/completions", json=chat)
        call = bench.call()
    assert answer.status_code == 200 and [seen.body.get("max_tokens") for seen in engine.calls] == [9000, None]
    assert "output_cap" not in call.metadata["sampling"] and "max_tokens" not in call.metadata["sampling"]["sent"]
    async with FakeEngine(refused) as engine, started(engine.url, max_output_tokens=9000) as bench:
        answer = await bench.client.post("/chat/completions", json={**chat, "max_tokens": 9500})
        assert answer.status_code == 400 and "9000" in answer.text  # its own mistake, capped or not


FORCED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
#: dialect -> the request's own sampling, in its words.
OWN: dict[str, dict[str, Any]] = {
    "chat": {"temperature": 0.2, "top_p": 0.95, "top_k": 64},
    "completions": {"temperature": 0.2, "top_p": 0.95, "top_k": 64},
    "responses": {"temperature": 0.2, "top_p": 0.95},
    "messages": {"temperature": 0.2, "top_p": 0.95, "top_k": 64},
    "gemini": {"generationConfig": {"temperature": 0.2, "topP": 0.95, "topK": 64}},
}


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_forced_sampling_wins_over_what_the_agent_sends(started: Started, dialect: str) -> None:
    path, body = DIALECTS[dialect]
    body = {**body, **OWN[dialect]}
    async with engine_for(dialect) as engine, started(engine.url, force_sampling=FORCED) as bench:
        status, _ = await send(bench, path, body)
        call = bench.call()
    assert status == 200 and {name: engine.calls[0].body[name] for name in FORCED} == FORCED
    assert call.metadata["sampling"]["forced"] == FORCED and call.metadata["sampling"]["sent"].items() >= FORCED.items()
    assert {name: call.request_body[name] for name in OWN[dialect]} == OWN[dialect]


async def test_a_forced_limit_replaces_the_agents_by_any_name(started: Started) -> None:
    chat = {"model": "m", "messages": USER, "max_completion_tokens": 32000, "n_predict": 9}
    async with engine_for("chat") as engine, started(engine.url, force_sampling={"max_tokens": 5}) as bench:
        await bench.client.post("/chat/completions", json=chat)
        await bench.client.post("/chat/completions", json=chat)
    sent = engine.calls[0].body
    assert sent["max_tokens"] == 5 and "max_completion_tokens" not in sent and "n_predict" not in sent


#: dialect -> the request's own limit, in its words.
LIMIT: dict[str, dict[str, Any]] = {
    "chat": {"max_completion_tokens": 32000},
    "completions": {"max_tokens": 32000},
    "responses": {"max_output_tokens": 32000},
    "messages": {"max_tokens": 32000},
    "gemini": {"generationConfig": {"maxOutputTokens": 32000}},
}


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_output_cap_lowers_the_agents_limit(started: Started, dialect: str) -> None:
    path, body = DIALECTS[dialect]
    async with engine_for(dialect) as engine, started(engine.url, max_output_tokens=512) as bench:
        await send(bench, path, {**body, **LIMIT[dialect]})
        call = bench.call()
    assert [value for name, value in engine.calls[0].body.items() if "max" in name] == [512]
    assert call.metadata["sampling"]["output_cap"] == {"asked": 32000, "sent": 512, "by": "max_output_tokens"}


@pytest.mark.parametrize(
    ("own", "sent", "asked"),
    [
        ({}, {"max_tokens": 512}, None),
        ({"max_tokens": None}, {"max_tokens": 512}, None),
        ({"max_tokens": 100}, {"max_tokens": 100}, 100),
        ({"max_tokens": "32000"}, {"max_tokens": 512}, 32000),
        ({"n_predict": -1}, {"n_predict": 512}, None),
        ({"max_tokens": 100, "max_completion_tokens": 900}, {"max_tokens": 100, "max_completion_tokens": 900}, 100),
        ({"max_tokens": 700, "max_completion_tokens": 900}, {"max_tokens": 512, "max_completion_tokens": 512}, 700),
        ({"max_tokens": "many"}, {"max_tokens": "many"}, None),
    ],
    ids=str,
)
async def test_an_output_cap_knows_every_way_to_ask(
    started: Started, own: dict[str, Any], sent: dict[str, Any], asked: int | None
) -> None:
    async with engine_for("chat") as engine, started(engine.url, max_output_tokens=512) as bench:
        await bench.client.post("/chat/completions", json={"model": "m", "messages": USER, **own})
        body = engine.calls[0].body
    assert {name: body[name] for name in LIMITS if name in body} == sent


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
GRAMMARS: dict[str, tuple[str, dict[str, Any], str]] = {
    "json": ("/chat/completions", {"messages": USER, "response_format": {"type": "json_object"}}, "response_format"),
    "guided": ("/chat/completions", {"messages": USER, "guided_regex": "a+"}, "guided_regex"),
    "required": ("/chat/completions", {"messages": USER, "tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
    "completions": ("/completions", {"prompt": "hi", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    "messages": (
        "/messages",
        {
            "max_tokens": 9, "messages": USER, "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any"},
        },
        "tool_choice",
    ),
    "responses": (
        "/responses",
        {"input": "hi", "tools": [{"type": "function", "name": "f"}], "tool_choice": "required"},
        "tool_choice",
    ),
    "gemini": (
        GEMINI,
        {
            "contents": DIALECTS["gemini"][1]["contents"],
            "generationConfig": {"responseMimeType": "application/json"},
        },
        "response_format",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAMMARS)
async def test_grammars_are_refused_where_the_session_says_so(started: Started, name: str) -> None:
    path, body, word = GRAMMARS[name]
    async with engine_for(name if name == "completions" else "chat") as engine:
        async with started(engine.url, grammars="refuse") as bench:
            status, text = await send(bench, path, {"model": "m", **body})
            call = bench.call()
        assert status == 400 and word in text and "--grammars refuse" in text and engine.calls == []
        assert call.capture is not None
        assert {why.code for why in call.capture.unavailable.values()} == {"refused_by_proxy"}
        async with started(engine.url) as bench:
            status, _ = await send(bench, path, {"model": "m", **body})
        assert status == 200


async def test_tools_alone_are_not_a_grammar_but_on_llama_cpp(started: Started) -> None:
    chat = {"model": "m", "messages": USER, "tools": TOOLS}
    async with engine_for("chat") as engine:
        async with started(engine.url, grammars="refuse") as bench:
            assert (await bench.client.post("/chat/completions", json=chat)).status_code == 200
        async with started(engine.url, grammars="refuse", engine="llamacpp") as bench:
            refused = await bench.client.post("/chat/completions", json=chat)
            allowed = await bench.client.post("/chat/completions", json={**chat, "tool_choice": "none"})
    assert refused.status_code == 400 and "llama.cpp's tool grammar" in refused.text and allowed.status_code == 200


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_purpose_is_on_every_record(started: Started, dialect: str) -> None:
    path, body = DIALECTS[dialect]
    async with engine_for(dialect) as engine, started(engine.url, purpose="eval") as bench:
        await send(bench, path, body)
        assert bench.call().metadata["purpose"] == "eval"
        assert bench.proxy.sessions.get("default").state()["purpose"] == "eval"


async def test_sessions_have_controls_of_their_own(started: Started, tmp_path: Any) -> None:
    options = {
        "max_calls": 1,
        "max_seconds": 60,
        "force_sampling": {"top_k": -1},
        "purpose": "eval",
        "grammars": "refuse",
    }
    chat = {"model": "m", "messages": USER}
    async with engine_for("chat") as engine, started(engine.url) as bench:
        opened = await bench.proxy.open_session("a", journal=tmp_path / "a.jsonl", **options)
        headers = {"Authorization": f"Bearer {opened.api_key}"}
        await bench.client.post("/chat/completions", json=chat, headers=headers)
        last = await bench.client.post("/chat/completions", json=chat, headers=headers)
        state = await bench.proxy.close_session(opened.id)
        assert (await bench.client.post("/chat/completions", json=chat)).json()["choices"][0][
            "finish_reason"
        ] == "length"
    assert "max_calls" in last.text and engine.calls[0].body["top_k"] == -1
    assert state["budget"] == {"calls": 1, "sampled_tokens": 10, "reached": "max_calls", "ended_calls": 1}


async def test_a_journal_has_calls_of_one_purpose(started: Started) -> None:
    chat = {"model": "m", "messages": USER}
    async with engine_for("chat") as engine:
        async with started(engine.url, purpose="eval") as bench:
            await bench.client.post("/chat/completions", json=chat)
        with pytest.raises(SessionError, match=r"has calls for eval, and these would be for train.*--purpose eval"):
            async with started(engine.url):
                pass
        async with started(engine.url, purpose="eval") as bench:
            await bench.client.post("/chat/completions", json=chat)
            assert len(bench.calls()) == 2
