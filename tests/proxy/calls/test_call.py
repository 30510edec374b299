"""One call through the proxy: what the engine is asked, what the agent gets, what the journal says."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import httpx
import pytest

from tests.proxy.conftest import Started
from tests.proxy.fake_engine import FakeEngine, Seen, answers, replays, streams, transcript, whole

CHAT: dict[str, Any] = {
    "model": "my-policy",
    "messages": [{"role": "user", "content": "Name two colours."}],
    "max_tokens": 10,
    "temperature": 0,
}


def events(data: bytes) -> list[Any]:
    """The JSON of each event, and `[DONE]` as text."""
    out: list[Any] = []
    for block in data.decode().split("\n\n"):
        if block.startswith("data: "):
            text = block[6:]
            out.append(text if text == "[DONE]" else json.loads(text))
    return out


async def test_an_unstreamed_call_is_captured_and_the_agent_sees_nothing_of_it(started: Started) -> None:
    result, recorded = transcript("vllm/chat-plain-length-nostream")
    async with FakeEngine(replays("vllm/chat-plain-length-nostream")) as engine, started(engine.url) as bench:
        answer = await bench.client.post("/chat/completions", json=CHAT)
        call = bench.call()
    asked = engine.calls[0].body
    assert asked["logprobs"] is True and asked["return_token_ids"] is True
    assert {k: asked[k] for k in CHAT} == CHAT
    engine_body, agent_body = json.loads(recorded), answer.json()
    for key in ("prompt_token_ids",):
        engine_body[key] = None
    for choice in engine_body["choices"]:
        choice["logprobs"] = choice["token_ids"] = None
    assert agent_body == engine_body
    capture = call.capture
    assert capture is not None and capture.complete
    truth = json.loads(recorded)
    assert capture.prompt_token_ids == truth["prompt_token_ids"]
    assert capture.completions[0].token_ids == truth["choices"][0]["token_ids"]
    assert capture.completions[0].logprobs == [e["logprob"] for e in truth["choices"][0]["logprobs"]["content"]]
    assert call.request_body == CHAT
    assert call.metadata["engine"] == "vllm" and call.metadata["engine_version"] == "0.32.0"
    assert call.metadata["sampling"]["sent"] == {"temperature": 0, "max_tokens": 10}
    assert result["response"]["status"] == call.status_code == 200


async def test_a_stream_reaches_the_agent_as_if_the_proxy_were_not_there(started: Started) -> None:
    _, recorded = transcript("vllm/chat-plain-length-stream")
    async with FakeEngine(replays("vllm/chat-plain-length-stream", size=7)) as engine, started(engine.url) as bench:
        answer = await bench.client.post("/chat/completions", json={**CHAT, "stream": True})
        call = bench.call()
    assert answer.headers["content-type"].startswith("text/event-stream")
    wanted = []
    for event in events(recorded):
        if event != "[DONE]":
            if not event["choices"]:
                continue  # the usage chunk: the agent did not ask for it
            if "prompt_token_ids" in event:
                event["prompt_token_ids"] = None
            for choice in event["choices"]:
                choice["logprobs"] = None
                if "token_ids" in choice:
                    choice["token_ids"] = None
        wanted.append(event)
    # Without a count the engine puts its fingerprint on the finish chunk.
    wanted[-2]["system_fingerprint"] = "vllm-0.32.0-1db4b656"
    assert events(answer.content) == wanted
    assert call.capture is not None and call.capture.complete
    assert call.metadata["stream"] is True and call.metadata["ttft_ms"] > 0
    assert call.response_body["choices"][0]["message"]["content"] == "The two most popular colours in the world are:"


async def test_chunks_go_out_as_they_come_in(started: Started) -> None:
    """The agent has the first words while the engine still waits."""
    _, recorded = transcript("vllm/chat-plain-length-stream")
    head, _, tail = recorded.partition(b'"content":" two"')
    first = head.rpartition(b"\n\n")[0] + b"\n\n"
    release = asyncio.Event()

    async def wait(seen: Seen) -> None:
        await release.wait()

    async with FakeEngine(streams(first, then=wait)) as engine, started(engine.url) as bench:
        async with bench.client.stream("POST", "/chat/completions", json={**CHAT, "stream": True}) as answer:
            got = b""
            async with asyncio.timeout(5):
                async for data in answer.aiter_raw():
                    got += data
                    if b'"content":"The"' in got:
                        break
            release.set()
    assert tail


async def test_the_record_is_written_before_the_agent_sees_the_end_of_the_reply(started: Started) -> None:
    async with FakeEngine(replays("vllm/chat-plain-length-stream", size=64)) as engine, started(engine.url) as bench:
        seen_before = None
        async with bench.client.stream("POST", "/chat/completions", json={**CHAT, "stream": True}) as answer:
            got = b""
            async for data in answer.aiter_raw():
                got += data
                if seen_before is None and b'"finish_reason":"length"' in got:
                    seen_before = len(bench.calls())
    assert seen_before == 1


async def test_usage_goes_to_an_agent_that_asked_for_it(started: Started) -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    async with FakeEngine(replays("vllm/chat-plain-length-stream")) as engine, started(engine.url) as bench:
        answer = await bench.client.post("/chat/completions", json=body)
    assert events(answer.content)[-2]["usage"]["completion_tokens"] == 10


async def test_an_agent_that_asked_for_logprobs_and_ids_keeps_them(started: Started) -> None:
    body = {**CHAT, "logprobs": True, "return_token_ids": True}
    _, recorded = transcript("vllm/chat-plain-length-nostream")
    async with FakeEngine(replays("vllm/chat-plain-length-nostream")) as engine, started(engine.url) as bench:
        answer = await bench.client.post("/chat/completions", json=body)
        call = bench.call()
    assert answer.json() == json.loads(recorded)
    assert call.capture is not None and call.capture.complete
    assert "token_ids" not in call.response_body["choices"][0], "ids stand once in a record"


@pytest.mark.parametrize("value", [None, False])
async def test_an_agent_that_turns_logprobs_off_is_captured_and_gets_null(started: Started, value: object) -> None:
    async with FakeEngine(replays("vllm/chat-plain-length-nostream")) as engine, started(engine.url) as bench:
        answer = await bench.client.post("/chat/completions", json={**CHAT, "logprobs": value})
        call = bench.call()
    assert engine.calls[0].body["logprobs"] is True
    assert answer.json()["choices"][0]["logprobs"] is None
    assert call.request_body["logprobs"] is value
    assert call.capture is not None and call.capture.complete


async def test_capture_off_asks_for_nothing_and_still_keeps_a_journal(started: Started) -> None:
    async with FakeEngine(replays("vllm/chat-plain-length-nostream")) as engine:
        async with started(engine.url, capture=False) as bench:
            await bench.client.post("/chat/completions", json=CHAT)
            call = bench.call()
    assert engine.calls[0].body == CHAT
    assert call.capture is None
    assert call.response_body["choices"][0]["message"]["content"]


@pytest.mark.parametrize("name", ["err-model-404", "err-context-length", "err-max-tokens"])
async def test_an_engines_error_reaches_the_agent_as_it_is(started: Started, name: str) -> None:
    result, recorded = transcript(f"vllm/{name}")
    async with FakeEngine(replays(f"vllm/{name}")) as engine, started(engine.url) as bench:
        answer = await bench.client.post("/chat/completions", json=CHAT)
        call = bench.call()
    assert (answer.status_code, answer.content) == (result["response"]["status"], recorded)
    assert call.outcome == "error" and call.status_code == result["response"]["status"]
    assert call.response_body == json.loads(recorded)
    assert call.capture is not None and not call.capture.complete
    assert {why.reason for why in call.capture.unavailable.values()} == {"request_failed"}


@pytest.mark.parametrize("raw", [b"{not json", b'"a string"', b"[1]", b""])
async def test_a_body_that_is_not_an_object_gets_the_engines_own_error(started: Started, raw: bytes) -> None:
    async with FakeEngine(answers(400, {"error": {"message": "bad", "code": 400}})) as engine:
        async with started(engine.url) as bench:
            answer = await bench.client.post(
                "/chat/completions", content=raw, headers={"content-type": "application/json"}
            )
            call = bench.call()
    assert engine.calls[0].raw == raw
    assert answer.status_code == 400 and answer.json()["error"]["message"] == "bad"
    assert call.outcome == "error"


async def test_a_refused_capture_field_loses_the_record_not_the_call(started: Started) -> None:
    """An engine that knows no return_token_ids: the agent gets the answer of a second, plain call."""
    refused = answers(400, {"error": {"message": "Unsupported parameter: return_token_ids", "code": 400}})
    plain = replays("vllm/chat-plain-length-nostream")
    async with FakeEngine(refused, plain) as engine, started(engine.url) as bench:
        answer = await bench.client.post("/chat/completions", json=CHAT)
        call = bench.call()
    assert answer.status_code == 200
    assert engine.calls[1].body == CHAT
    assert call.outcome == "ok" and call.capture is not None
    assert {why.code for why in call.capture.unavailable.values()} == {"server_refused_capture_fields"}


async def test_an_agents_own_invalid_request_keeps_its_own_error(started: Started) -> None:
    wrong = {**CHAT, "logprobs": False, "top_logprobs": 3}
    error = answers(400, {"error": {"message": "`top_logprobs` needs `logprobs` to be true", "code": 400}})
    async with FakeEngine(error) as engine, started(engine.url) as bench:
        answer = await bench.client.post("/chat/completions", json=wrong)
    assert answer.status_code == 400
    assert engine.calls[0].body["logprobs"] is False


async def test_old_sglang_that_refuses_ids_in_a_stream_is_called_unstreamed(started: Started) -> None:
    _, refusal = transcript("sglang/chat-return_token_ids-stream-400")
    answer_whole = replays("sglang/chat-return_token_ids-nostream")

    async def by_stream(seen: Seen) -> Any:
        if seen.body.get("stream"):
            yield whole(400, refusal)
        else:
            async for piece in answer_whole(seen):
                yield piece

    body = {**CHAT, "stream": True, "return_token_ids": False}
    async with FakeEngine(by_stream, engine="sglang") as engine, started(engine.url, buffered=True) as bench:
        answer = await bench.client.post("/chat/completions", json=body)
        call = bench.call()
    assert not engine.calls[0].body.get("stream")
    got = events(answer.content)
    assert got[-1] == "[DONE]" and got[-2]["choices"][0]["finish_reason"]
    text = "".join(e["choices"][0]["delta"].get("content") or "" for e in got[:-1] if e["choices"])
    assert text == call.response_body["choices"][0]["message"]["content"]
    assert call.capture is not None and call.capture.complete


async def test_comments_keep_the_connection_open_while_the_engine_is_called_unstreamed(
    started: Started,
) -> None:
    _, recorded = transcript("vllm/chat-plain-length-nostream")

    async def slow(seen: Seen) -> Any:
        await asyncio.sleep(0.5)
        yield whole(200, recorded)

    async with FakeEngine(slow) as engine, started(engine.url, buffered=True, keepalive=0.1) as bench:
        answer = await bench.client.post("/chat/completions", json={**CHAT, "stream": True})
        call = bench.call()
    assert answer.content.count(b": keep-alive\n\n") >= 2
    assert answer.content.endswith(b"data: [DONE]\n\n")
    assert call.capture is not None and call.capture.complete


async def test_an_unreachable_engine_is_a_502_that_names_no_address(started: Started) -> None:
    async with FakeEngine(answers(200, {})) as engine:
        url = engine.url
    async with started(url) as bench:
        answer = await bench.client.post("/chat/completions", json=CHAT)
        call = bench.call()
    assert answer.status_code == 502
    assert "127.0.0.1" not in answer.text and f":{engine.port}" not in answer.text
    assert call.outcome == "error" and call.status_code == 502
    assert call.capture is not None
    details = {why.detail for why in call.capture.unavailable.values()}
    assert details == {"the engine cannot be reached; is it up?"}, "no engine answered 502: it was the proxy"


async def test_an_engine_that_dies_mid_stream_cuts_the_reply_and_the_record_says_truncated(
    started: Started,
) -> None:
    _, recorded = transcript("vllm/chat-plain-length-stream")
    half = recorded[: recorded.index(b'" popular"')]
    async with FakeEngine(streams(half, end=False)) as engine, started(engine.url) as bench:
        with pytest.raises(httpx.RemoteProtocolError):
            await bench.client.post("/chat/completions", json={**CHAT, "stream": True})
        (call,) = await bench.recorded()
    capture = call.capture
    assert call.outcome == "truncated" and capture is not None and not capture.complete
    assert {why.code for why in capture.unavailable.values()} == {"stream_error"}
    assert capture.completions[0].token_ids == [504, 827, 768], "what came is kept"


async def test_an_error_inside_a_stream_is_forwarded_and_recorded(started: Started) -> None:
    _, recorded = transcript("vllm/chat-plain-length-stream")
    half = recorded[: recorded.index(b'data: {"id":"chatcmpl-94c4843a4d72276a"', 1500)]
    half = half[: half.rindex(b"\n\n") + 2]
    error = b'data: {"error": {"message": "engine out of memory", "type": "InternalServerError", "code": 500}}\n\n'
    async with FakeEngine(streams(half + error + b"data: [DONE]\n\n")) as engine, started(engine.url) as bench:
        answer = await bench.client.post("/chat/completions", json={**CHAT, "stream": True})
        call = bench.call()
    assert error in answer.content
    assert call.outcome == "truncated"
    assert call.capture is not None and not call.capture.complete


async def test_a_stream_without_its_end_is_truncated(started: Started) -> None:
    _, recorded = transcript("vllm/chat-plain-length-stream")
    half = recorded[: recorded.index(b'" popular"')]
    async with FakeEngine(streams(half[: half.rindex(b"\n\n") + 2])) as engine, started(engine.url) as bench:
        await bench.client.post("/chat/completions", json={**CHAT, "stream": True})
        call = bench.call()
    assert call.outcome == "truncated"
    assert call.capture is not None and not call.capture.complete


async def test_an_agent_that_leaves_stops_the_engine_and_is_recorded_as_aborted(started: Started) -> None:
    _, recorded = transcript("vllm/chat-plain-length-stream")
    half = recorded[: recorded.index(b'" popular"')]
    half = half[: half.rindex(b"\n\n") + 2]

    async def wait(seen: Seen) -> None:
        async with asyncio.timeout(5):
            await seen.gone.wait()

    async with FakeEngine(streams(half, then=wait)) as engine, started(engine.url) as bench:
        async with bench.client.stream("POST", "/chat/completions", json={**CHAT, "stream": True}) as answer:
            async for data in answer.aiter_raw():
                if b"two" in data:
                    break
        (call,) = await bench.recorded()
        async with asyncio.timeout(5):
            await engine.calls[0].gone.wait()
    assert call.outcome == "aborted"
    assert call.capture is not None and not call.capture.complete
    assert {why.code for why in call.capture.unavailable.values()} == {"stream_aborted"}
    assert call.capture.completions[0].token_ids


async def test_a_silent_engine_times_out(started: Started) -> None:
    async def silent(seen: Seen) -> Any:
        await asyncio.sleep(30)
        yield b""

    async with FakeEngine(silent) as engine, started(engine.url, first_byte_timeout=0.3) as bench:
        answer = await bench.client.post("/chat/completions", json=CHAT)
        call = bench.call()
    assert answer.status_code == 504 and "0.3 s" in answer.json()["error"]["message"]
    assert call.outcome == "error"


async def test_a_stream_that_stalls_ends_with_an_error_event(started: Started) -> None:
    _, recorded = transcript("vllm/chat-plain-length-stream")
    half = recorded[: recorded.index(b'" popular"')]

    async def stall(seen: Seen) -> None:
        await asyncio.sleep(30)

    async with FakeEngine(streams(half[: half.rindex(b"\n\n") + 2], then=stall)) as engine:
        async with started(engine.url, idle_timeout=0.3) as bench:
            answer = await bench.client.post("/chat/completions", json={**CHAT, "stream": True})
            call = bench.call()
    assert "sent nothing more" in events(answer.content)[-1]["error"]["message"]
    assert call.outcome == "truncated"


async def test_gzip_in_both_directions(started: Started) -> None:
    _, recorded = transcript("vllm/chat-plain-length-nostream")
    async with FakeEngine(answers(200, gzip.compress(recorded), content_encoding="gzip")) as engine:
        async with started(engine.url) as bench:
            answer = await bench.client.post(
                "/chat/completions",
                content=gzip.compress(json.dumps(CHAT).encode()),
                headers={"content-encoding": "gzip", "content-type": "application/json"},
            )
            call = bench.call()
    assert engine.calls[0].body["messages"] == CHAT["messages"]
    assert "content-encoding" not in answer.headers
    assert answer.json()["choices"][0]["message"]["content"]
    assert call.capture is not None and call.capture.complete


async def test_a_body_over_the_limit_is_413_and_reaches_no_engine(started: Started) -> None:
    async with FakeEngine(answers(200, {})) as engine, started(engine.url, max_body_mb=1) as bench:
        big = await bench.client.post("/chat/completions", content=b"x" * (2 << 20))
        bomb = gzip.compress(b"x" * (8 << 20))
        packed = await bench.client.post("/chat/completions", content=bomb, headers={"content-encoding": "gzip"})
    assert (big.status_code, packed.status_code) == (413, 413)
    assert "--max-body-mb" in big.json()["error"]["message"]
    assert engine.calls == []


async def test_a_call_is_retried_only_before_its_first_byte_and_never_answered_twice(started: Started) -> None:
    """A kept connection that the engine closed in the meantime: the request was never read, and is sent again."""
    _, recorded = transcript("vllm/chat-plain-length-nostream")

    async def closes_after(seen: Seen) -> Any:
        yield whole(200, recorded)
        from tests.proxy.fake_engine import Cut

        raise Cut

    async with FakeEngine(closes_after) as engine, started(engine.url) as bench:
        for _ in range(5):
            assert (await bench.client.post("/chat/completions", json=CHAT)).status_code == 200
        assert len(engine.calls) == len(bench.calls()) == 5


async def test_an_engine_that_reads_a_call_and_dies_is_not_called_again(started: Started) -> None:
    async def dies(seen: Seen) -> Any:
        from tests.proxy.fake_engine import Cut

        yield b""
        raise Cut

    async with FakeEngine(dies) as engine, started(engine.url) as bench:
        answer = await bench.client.post("/chat/completions", json=CHAT)
    assert answer.status_code == 502
    assert len(engine.calls) == 1


async def test_a_word_for_word_retry_names_the_failed_call_it_repeats(started: Started) -> None:
    busy = answers(503, {"error": {"message": "busy", "code": 503}})
    async with FakeEngine(busy, busy, replays("vllm/chat-plain-length-nostream")) as engine:
        async with started(engine.url) as bench:
            for _ in range(4):
                await bench.client.post("/chat/completions", json=CHAT)
            calls = bench.calls()
    assert [call.metadata["retry_of"] for call in calls] == [None, 0, 1, None]


async def test_a_replica_that_is_down_is_left_and_the_call_is_answered_by_another(started: Started) -> None:
    async with FakeEngine(answers(200, {})) as gone:
        down = gone.url
    async with FakeEngine(replays("vllm/chat-plain-length-nostream")) as engine, started(down, engine.url) as bench:
        answer = await bench.client.post("/chat/completions", json=CHAT)
        call = bench.call()
    assert answer.status_code == 200
    assert call.metadata["upstream"] == "replica-1"


async def test_a_session_returns_to_its_replica_when_that_answers_again(started: Started) -> None:
    plain = replays("vllm/chat-plain-length-nostream")
    async with FakeEngine(plain) as first, FakeEngine(plain) as second, started(first.url, second.url) as bench:
        assert bench.proxy.sessions.defaults is not None
        for replica in bench.proxy.sessions.defaults.replicas.all:
            replica.check_interval = 0.05

        async def upstream() -> str:
            assert (await bench.client.post("/chat/completions", json=CHAT)).status_code == 200
            return bench.calls()[-1].metadata["upstream"]

        assert await upstream() == "replica-0"
        await first.stop()
        assert [await upstream() for _ in range(3)] == ["replica-1"] * 3
        await asyncio.sleep(0.2)
        assert await upstream() == "replica-1", "nothing answers there yet"
        await first.start(first.port)
        async with asyncio.timeout(10):
            while await upstream() != "replica-0":
                await asyncio.sleep(0.02)
        assert [await upstream() for _ in range(3)] == ["replica-0"] * 3


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/v1/chat/completions", "//v1//chat/completions/", "/chat/completions"]
)
async def test_paths_are_normalized(started: Started, path: str) -> None:
    async with FakeEngine(replays("vllm/chat-plain-length-nostream")) as engine, started(engine.url) as bench:
        root = bench.proxy.base_url.removesuffix("/v1")
        async with httpx.AsyncClient() as client:
            answer = await client.post(root + path, json=CHAT)
    assert answer.status_code == 200
    assert engine.calls[0].path == "/v1/chat/completions"


async def test_other_paths_are_404_in_the_engines_error_shape(started: Started) -> None:
    async with FakeEngine(answers(200, {})) as engine, started(engine.url) as bench:
        answer = await bench.client.post("/embeddings", json={})
        models = await bench.client.get("/models")
        health = await bench.client.get(bench.proxy.base_url.removesuffix("/v1") + "/health")
        head = await bench.client.head(bench.proxy.base_url.removesuffix("/v1") + "/")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == 404
    assert models.json()["data"][0]["id"] == "my-policy"
    assert health.status_code == head.status_code == 200


async def test_the_engine_key_is_ours_and_the_agents_never_goes_upstream(started: Started) -> None:
    async with FakeEngine(replays("vllm/chat-plain-length-nostream")) as engine:
        async with started(engine.url, upstream_key="engine-secret") as bench:
            answer = await bench.client.post(
                "/chat/completions", json=CHAT, headers={"authorization": "Bearer agent-secret", "cookie": "a=b"}
            )
            text = bench.journal.read_text()
    sent = engine.calls[0].headers
    assert sent["authorization"] == "Bearer engine-secret"
    assert "cookie" not in sent and "agent-secret" not in str(sent)
    assert "engine-secret" not in text and "agent-secret" not in text
    assert "engine-secret" not in str(answer.headers) + answer.text
    assert f":{engine.port}" not in text


async def test_a_hosted_api_is_recorded_with_text_and_usage_and_asked_for_nothing(started: Started) -> None:
    body = {
        "id": "x", "object": "chat.completion", "model": "gpt", "created": 1,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    }  # fmt: skip
    async with FakeEngine(answers(200, body)) as engine, started(engine.url, engine="other") as bench:
        answer = await bench.client.post("/chat/completions", json=CHAT)
        call = bench.call()
    assert engine.calls[0].body == CHAT and answer.json() == body
    assert call.response_body["usage"]["total_tokens"] == 4
    assert call.capture is not None
    assert {why.reason for why in call.capture.unavailable.values()} == {"provider_api_unsupported"}


async def test_overlapping_calls_are_numbered_as_they_began_and_written_as_they_ended(started: Started) -> None:
    _, recorded = transcript("vllm/chat-plain-length-nostream")

    async def by_words(seen: Seen) -> Any:
        await asyncio.sleep(0.3 if seen.body["messages"][0]["content"] == "slow" else 0)
        yield whole(200, recorded)

    async with FakeEngine(by_words) as engine, started(engine.url) as bench:

        def send(words: str) -> Any:
            body = {**CHAT, "messages": [{"role": "user", "content": words}]}
            return bench.client.post("/chat/completions", json=body)

        slow = asyncio.ensure_future(send("slow"))
        await asyncio.sleep(0.1)
        await send("quick")
        await slow
        calls = bench.calls()
    assert [(c.number, c.request_body["messages"][0]["content"]) for c in calls] == [(1, "quick"), (0, "slow")]


async def test_a_policy_that_changes_mid_call_is_stamped_at_both_ends(started: Started) -> None:
    _, recorded = transcript("vllm/chat-plain-length-nostream")
    bench_holder: list[Any] = []

    async def changes(seen: Seen) -> Any:
        await bench_holder[0].proxy.set_policy_version("default", "step-2")
        yield whole(200, recorded)

    async with FakeEngine(changes) as engine, started(engine.url, policy_version="step-1") as bench:
        bench_holder.append(bench)
        await bench.client.post("/chat/completions", json=CHAT)
        call = bench.call()
    assert (call.metadata["policy_version"], call.metadata["policy_version_end"]) == ("step-1", "step-2")


@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/responses"])
async def test_which_weights_sampled_which_ids_is_recorded_where_the_engine_says_it(
    started: Started, path: str
) -> None:
    answer = json.loads(transcript("sglang/chat-return_token_ids-nostream")[1])
    versions = [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 5}]
    answer["choices"][0]["meta_info"]["weight_versions"] = versions
    prompt_field = (
        {"input": "Name two colours."} if path == "/responses" else {"messages": CHAT["messages"], "max_tokens": 9}
    )
    body = {"model": "my-policy", "stream": True, **prompt_field}
    async with (
        FakeEngine(answers(200, answer), engine="sglang") as engine,
        started(engine.url, engine="sglang", buffered=True, policy_version="7") as bench,
    ):
        assert (await bench.client.post(path, json=body)).is_success
        call = bench.call()
    assert call.metadata["weight_versions"] == [versions]
    assert call.metadata["policy_version"] == "7"


async def test_a_full_disk_loses_the_record_not_the_call(started: Started) -> None:
    async with FakeEngine(replays("vllm/chat-plain-length-nostream")) as engine, started(engine.url) as bench:
        session = bench.proxy.sessions.default
        assert session is not None
        import os

        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, session.journal._fd)  # every write now fails with "No space left on device"
        os.close(full)
        answer = await bench.client.post("/chat/completions", json=CHAT)
        state = session.state()
    assert answer.status_code == 200 and answer.json()["choices"]
    assert "No space left" in state["journal_failed"]


async def test_a_bug_in_reading_an_answer_loses_the_record_not_the_call(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    from capture.engines.answer.choices import Sampled

    def broken(self: Sampled, *_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Sampled, "take", broken)
    for name, body in (("chat-plain-length-nostream", CHAT), ("chat-plain-length-stream", {**CHAT, "stream": True})):
        _, recorded = transcript(f"vllm/{name}")
        async with FakeEngine(replays(f"vllm/{name}")) as engine, started(engine.url) as bench:
            answer = await bench.client.post("/chat/completions", json=body)
            call = bench.calls()[-1]
        assert answer.status_code == 200 and answer.content == recorded
        assert call.capture is not None
        assert {why.code for why in call.capture.unavailable.values()} == {"capture_failed"}


async def test_sessions_are_spread_over_replicas_and_stay(started: Started) -> None:
    plain = replays("vllm/chat-plain-length-nostream")
    async with FakeEngine(plain) as first, FakeEngine(plain) as second, started(first.url, second.url) as bench:
        root = bench.proxy.base_url.removesuffix("/v1")
        for _ in range(3):
            for name in ("a", "b", "c", "d"):
                stream = {"stream": False}
                await bench.client.post(f"{root}/s/{name}/v1/chat/completions", json={**CHAT, **stream, "user": name})
        users = [{call.body["user"] for call in engine.calls} for engine in (first, second)]
    assert [len(names) for names in users] == [2, 2] and not users[0] & users[1]


async def test_an_engine_that_came_back_is_asked_again_who_it_is(started: Started) -> None:
    async with FakeEngine(replays("vllm/chat-plain-length-nostream")) as engine, started(engine.url) as bench:
        await bench.client.post("/chat/completions", json=CHAT)
        replica = bench.proxy.sessions.default.replica
        await engine.stop()
        assert (await bench.client.post("/chat/completions", json=CHAT)).status_code == 502
        engine.engine = "sglang"
        engine.answers = [replays("sglang/chat-return_token_ids-nostream")]
        await engine.start(engine.port)
        assert (await bench.client.post("/chat/completions", json=CHAT)).status_code == 200
        calls = bench.calls()
    assert replica is not None
    assert [call.metadata["engine"] for call in calls] == ["vllm", "vllm", "sglang"] or calls[1].metadata[
        "engine"
    ] is None
    assert calls[-1].capture is not None and calls[-1].capture.complete


async def test_an_engine_that_loses_ids_in_streams_is_called_unstreamed_from_then_on(started: Started) -> None:
    """An SGLang that knows no sglext yet, and gives ids where nothing streams."""
    _, recorded = transcript("sglang/chat-sglext-length-stream")
    old = b"".join(b + b"\n\n" for b in recorded.split(b"\n\n") if b and b'"sglext"' not in b)
    whole_answer = replays("sglang/chat-return_token_ids-nostream")

    async def by_stream(seen: Seen) -> Any:
        answer = streams(old) if seen.body.get("stream") else whole_answer
        async for piece in answer(seen):
            yield piece

    async with FakeEngine(by_stream, engine="sglang") as engine, started(engine.url) as bench:
        answers_seen = [await bench.client.post("/chat/completions", json={**CHAT, "stream": True}) for _ in range(3)]
        calls = bench.calls()
    assert [bool(call.body.get("stream")) for call in engine.calls] == [True, False, False]
    assert [call.capture.complete for call in calls if call.capture] == [False, True, True]
    assert all(answer.content.endswith(b"data: [DONE]\n\n") for answer in answers_seen)


async def test_an_engine_that_knows_no_ids_at_all_keeps_streaming(started: Started) -> None:
    _, recorded = transcript("sglang/chat-sglext-length-stream")
    old = b"".join(b + b"\n\n" for b in recorded.split(b"\n\n") if b and b'"sglext"' not in b)
    body = json.loads(transcript("sglang/chat-sglext-length-nostream")[1])
    body.pop("sglext")

    async def by_stream(seen: Seen) -> Any:
        answer = streams(old) if seen.body.get("stream") else answers(200, body)
        async for piece in answer(seen):
            yield piece

    async with FakeEngine(by_stream, engine="sglang") as engine, started(engine.url) as bench:
        for _ in range(4):
            await bench.client.post("/chat/completions", json={**CHAT, "stream": True})
        calls = bench.calls()
    assert [bool(call.body.get("stream")) for call in engine.calls] == [True, False, True, True]
    assert not any(call.capture.complete for call in calls if call.capture)
