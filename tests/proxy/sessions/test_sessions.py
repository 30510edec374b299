"""Sessions: a key reaches one of them, only the model routes, for as long as it lives."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture.journal.journal import JournalReader
from proxy import ProxyThread, Settings, SettingsError, serve
from proxy.settings import SESSION_TYPES
from tests.proxy.conftest import Started
from tests.proxy.fake_engine import FakeEngine, Seen, answers, replays, transcript, whole

CHAT: dict[str, Any] = {"model": "my-policy", "messages": [{"role": "user", "content": "hi"}]}
PLAIN = "vllm/chat-plain-length-nostream"


def key(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


async def post(base_url: str, secret: str | None, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=30) as client:
        headers = key(secret) if secret else {}
        return await client.post(base_url + "/chat/completions", json={**CHAT, **body}, headers=headers)


async def arrived(engine: FakeEngine) -> None:
    """The engine has a model call: on a busy machine that takes longer than any sleep allows for."""
    async with asyncio.timeout(20):
        while not engine.calls:
            await asyncio.sleep(0.01)


async def test_concurrent_sessions_never_mix(tmp_path: Path) -> None:
    _, recorded = transcript(PLAIN)

    async def slowly(seen: Seen) -> Any:
        await asyncio.sleep(0.02)
        yield whole(200, recorded)

    async with FakeEngine(slowly) as engine, serve(Settings(upstream=[engine.url], probe=False)) as proxy:
        sessions = [await proxy.open_session(f"r{n}", journal=tmp_path / f"{n}.jsonl") for n in range(10)]
        await asyncio.gather(
            *(post(proxy.base_url, session.api_key, user=session.name) for session in sessions for _ in range(5))
        )
        for session in sessions:
            assert (await proxy.close_session(session.id))["complete_calls"] == 5
    for number in range(10):
        calls = list(JournalReader(tmp_path / f"{number}.jsonl"))
        assert [call.request_body["user"] for call in calls] == [f"r{number}"] * 5


async def test_wrong_closed_and_foreign_keys_are_401_and_leave_no_line(tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, serve(Settings(upstream=[engine.url], probe=False)) as proxy:
        session = await proxy.open_session("one", journal=tmp_path / "one.jsonl")
        two = await proxy.open_session("two", journal=tmp_path / "two.jsonl")
        assert (await post(proxy.base_url, None)).status_code == 401
        assert (await post(proxy.base_url, "sk-guess")).status_code == 401
        other = proxy.base_url.removesuffix("/v1") + f"/s/{two.id}/v1"
        assert (await post(other, session.api_key)).status_code == 401, "a key opens its own session only"
        await proxy.close_session(session.id)
        refused = await post(proxy.base_url, session.api_key)
        assert refused.status_code == 401 and "message" in refused.json()["error"]
    assert engine.calls == []
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes() == b""


async def test_a_key_works_as_bearer_and_as_x_api_key(tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, serve(Settings(upstream=[engine.url], probe=False)) as proxy:
        session = await proxy.open_session("one", journal=tmp_path / "one.jsonl")
        async with httpx.AsyncClient(base_url=proxy.base_url) as client:
            for headers in (key(session.api_key), {"x-api-key": session.api_key}):
                assert (await client.post("/chat/completions", json=CHAT, headers=headers)).status_code == 200
    assert all("x-api-key" not in seen.headers for seen in engine.calls)


async def test_closing_waits_for_calls_in_flight_and_then_seals(tmp_path: Path) -> None:
    _, recorded = transcript(PLAIN)

    async def slow(seen: Seen) -> Any:
        await asyncio.sleep(0.3)
        yield whole(200, recorded)

    async with FakeEngine(slow) as engine, serve(Settings(upstream=[engine.url], probe=False)) as proxy:
        session = await proxy.open_session("one", journal=tmp_path / "one.jsonl")
        running = asyncio.ensure_future(post(proxy.base_url, session.api_key))
        while not engine.calls:
            await asyncio.sleep(0.01)
        state = await proxy.close_session(session.id)
        assert (await running).status_code == 200
    assert state["calls"] == 1 and state["closed"]


async def test_a_stop_with_a_call_that_does_not_end_records_it_as_aborted(tmp_path: Path) -> None:
    async def stuck(seen: Seen) -> Any:
        await asyncio.sleep(30)
        yield b""

    async with FakeEngine(stuck) as engine:
        async with serve(Settings(upstream=[engine.url], probe=False, grace=1)) as proxy:
            session = await proxy.open_session("one", journal=tmp_path / "one.jsonl")
            running = asyncio.ensure_future(post(proxy.base_url, session.api_key))
            await arrived(engine)
        await asyncio.gather(running, return_exceptions=True)
    (call,) = JournalReader(tmp_path / "one.jsonl")
    assert call.outcome == "aborted"


async def test_sampling_defaults_fill_what_the_agent_left_open(tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, serve(Settings(upstream=[engine.url], probe=False)) as proxy:
        session = await proxy.open_session(
            "one", journal=tmp_path / "one.jsonl", sampling={"temperature": 1.0, "top_p": 1.0}, model="served"
        )
        await post(proxy.base_url, session.api_key, temperature=0.2)
    sent = engine.calls[0].body
    assert (sent["temperature"], sent["top_p"], sent["model"]) == (0.2, 1.0, "served")
    (call,) = JournalReader(tmp_path / "one.jsonl")
    assert "top_p" not in call.request_body
    assert call.metadata["sampling"]["sent"]["top_p"] == 1.0
    assert (call.metadata["request_model"], call.metadata["provider_model"]) == ("my-policy", "served")


async def test_open_mode_names_a_session_in_the_path(started: Started, tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        root = bench.proxy.base_url.removesuffix("/v1")
        assert (await post(f"{root}/s/rollout-7/v1", None)).status_code == 200
        assert (await post(f"{root}/s/..%2f..%2fetc/v1", None)).status_code in (400, 404)
    assert len(list(JournalReader(tmp_path / "captures/rollout-7/trajectory/llm_trajectory.jsonl"))) == 1
    assert sorted(p.name for p in (tmp_path / "captures").iterdir()) == ["default", "rollout-7"]


async def test_the_admin_listener_opens_shows_and_closes_sessions(tmp_path: Path) -> None:
    settings = Settings(probe=False, admin_port=0, admin_key="admin")
    async with FakeEngine(replays(PLAIN)) as engine, serve(settings) as proxy:
        assert proxy.admin_url is not None
        async with httpx.AsyncClient(base_url=proxy.admin_url, headers=key("admin")) as admin:
            made = await admin.post(
                "/sessions",
                json={
                    "name": "r1",
                    "journal": str(tmp_path / "r1.jsonl"),
                    "upstream": engine.url,
                    "policy_version": "1",
                },
            )
            assert made.status_code == 201
            body = made.json()
            assert set(body) == {"session", "api_key", "base_url", "anthropic_base_url"}
            assert (await post(body["base_url"], body["api_key"])).status_code == 200
            policy = await admin.post(f"/sessions/{body['session']}/policy", json={"version": "2"})
            assert policy.json()["policy_version"] == "2"
            assert (await admin.get(f"/sessions/{body['session']}")).json()["calls"] == 1
            metrics = (await admin.get("/metrics")).text
            assert 'capture_calls_total{outcome="ok",wire="openai-chat"} 1.0' in metrics
            assert "capture_complete_calls_total 1.0" in metrics
            assert (await admin.delete(f"/sessions/{body['session']}")).json()["closed"] is True
            assert (await admin.get(f"/sessions/{body['session']}")).status_code == 404
            odd = await admin.post("/sessions", json={"name": "x", "journal": "y", "upstreem": "z"})
            assert odd.status_code == 400 and "upstreem" in odd.json()["error"]["message"]
        async with httpx.AsyncClient(base_url=proxy.admin_url, headers=key(body["api_key"])) as agent:
            assert (await agent.get("/sessions")).status_code == 401
            assert (await agent.get("/metrics")).status_code == 401
        async with httpx.AsyncClient() as agent:
            root = proxy.base_url.removesuffix("/v1")
            elsewhere = await agent.get(root + "/sessions", headers=key("admin"))
            assert elsewhere.status_code == 404 and "--admin-port" in elsewhere.text
            assert (await agent.get(root + "/metrics", headers=key("admin"))).status_code == 404


async def test_two_writers_of_one_journal_are_refused(tmp_path: Path) -> None:
    async with FakeEngine(answers(200, {})) as engine, serve(Settings(upstream=[engine.url], probe=False)) as proxy:
        await proxy.open_session("one", journal=tmp_path / "same.jsonl")
        with pytest.raises(Exception, match="one writer"):
            await proxy.open_session("two", journal=tmp_path / "same.jsonl")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host": "0.0.0.0"}, "without a key"),
        ({"upstream": []}, "--upstream is missing"),
        ({"upstream": ["localhost:8000"]}, "not an http address"),
        ({"upstream": ["http://user:pw@h/v1"]}, "--upstream-key"),
        ({"engine": "vlm"}, "--engine must be one of"),
        ({"admin_port": 0, "admin_host": "0.0.0.0"}, "admin"),
        ({"key": "two words"}, "printable"),
    ],
)
def test_settings_that_cannot_be_used_say_what_to_change(tmp_path: Path, options: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Settings(**{"upstream": ["http://127.0.0.1:1/v1"], "out": tmp_path, **options}).check()


async def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    async with FakeEngine(answers(200, {})) as engine:
        with pytest.raises(SettingsError, match="cannot listen on"):
            async with serve(Settings(upstream=[engine.url], out=tmp_path, port=engine.port)):
                pass


def test_the_door_for_code_without_a_loop(tmp_path: Path) -> None:
    with ProxyThread(Settings(upstream=["http://127.0.0.1:1/v1"], probe=False)) as proxy:
        session = proxy.open_session("one", journal=tmp_path / "one.jsonl")
        answer = httpx.post(proxy.base_url + "/chat/completions", json=CHAT, headers=key(session.api_key))
        assert answer.status_code == 502
        assert proxy.close_session(session.id)["calls"] == 1
    with pytest.raises(SettingsError), ProxyThread(Settings(engine="nonsense")):
        pass


async def test_a_session_that_is_closed_twice_at_once_leaves_its_engine_once(started: Started, tmp_path: Path) -> None:
    async with FakeEngine(replays("vllm/chat-plain-length-nostream")) as engine, started(engine.url) as bench:
        opened = await bench.proxy.open_session("twice", journal=tmp_path / "twice.jsonl")
        headers = {"authorization": f"Bearer {opened.api_key}"}
        body = {"model": "my-policy", "messages": [{"role": "user", "content": "a"}]}
        assert (await bench.client.post("/chat/completions", json=body, headers=headers)).status_code == 200
        replica = bench.proxy.sessions.get(opened.id).replica
        assert replica is not None and replica.sessions == 1
        await asyncio.gather(*(bench.proxy.close_session(opened.id) for _ in range(2)))
        assert replica.sessions == 0


async def test_a_prompt_that_continues_from_the_last_is_read_as_if_it_did_not(started: Started) -> None:
    """The tail alone is looked at; where it holds what is no id, nothing of the prompt is believed."""
    prompts = ["1,2,3", "4," * 3_000 + "5", "4," * 3_000 + "5,6", "4," * 3_000 + "57", "4," * 3_000 + "5,-6", "4,4"]
    _, recorded = transcript("vllm/chat-plain-length-nostream")
    answer = json.loads(recorded)

    async def say(seen: Seen) -> Any:
        ids = json.loads(f"[{prompts[len(engine.calls) - 1]}]")
        answer["prompt_token_ids"], answer["usage"]["prompt_tokens"] = ids, len(ids)
        yield whole(200, json.dumps(answer, separators=(",", ":")).encode())

    async with FakeEngine(say) as engine, started(engine.url) as bench:
        for _ in prompts:
            assert (await bench.client.post("/chat/completions", json=CHAT)).status_code == 200
        calls = bench.calls()
    values = [call.capture and call.capture.prompt_token_ids for call in calls]
    wanted = [json.loads(f"[{text}]") for text in prompts]
    assert [ids and ids.tolist() for ids in values] == [*wanted[:4], None, wanted[5]]
    assert [call.capture is not None and call.capture.complete for call in calls] == [True] * 4 + [False, True]


def test_the_fields_of_a_session_are_those_that_the_docs_say() -> None:
    page = (Path(__file__).parents[3] / "docs/sessions.md").read_text(encoding="utf-8")
    table = page.partition("| field |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == {"name", "journal", *SESSION_TYPES}


async def test_the_example_of_the_docs_opens_a_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs/sessions.md").read_text(encoding="utf-8")
    example = re.search(r"-d '(\{.*\})'", page)
    assert example
    monkeypatch.chdir(tmp_path)
    settings = Settings(probe=False, admin_port=0, admin_key="admin")
    async with FakeEngine(replays(PLAIN)) as engine, serve(replace(settings, upstream=[engine.url])) as proxy:
        async with httpx.AsyncClient(base_url=str(proxy.admin_url), headers=key("admin")) as admin:
            made = await admin.post("/sessions", content=example[1])
        assert made.status_code == 201
        assert (await post(made.json()["base_url"], made.json()["api_key"])).status_code == 200
    assert len(list(JournalReader(tmp_path / json.loads(example[1])["journal"]))) == 1
