"""The version and name of the policy change while sessions live, and each call says what it was made to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture.journal.journal import JournalReader
from proxy import Settings, SettingsError, serve
from proxy.sessions.policy import Policy
from tests.proxy.conftest import Started
from tests.proxy.fake_engine import FakeEngine, Seen, replays, transcript, whole

CHAT: dict[str, Any] = {"model": "asked", "messages": [{"role": "user", "content": "Name two colours."}]}
PLAIN = "vllm/chat-plain-length-nostream"


@pytest.mark.parametrize(
    ("fields", "policy"),
    [
        ({"version": "step-120"}, Policy("step-120")),
        ({"version": 8}, Policy("8")),
        ({"version": "8", "model": "lora-v8"}, Policy("8", "lora-v8")),
        ({"model": "lora-v12"}, Policy("12", "lora-v12")),
        ({"version": "a", "model": "other"}, Policy("a", "other")),
    ],
)
def test_a_policy_from_its_fields(fields: dict[str, Any], policy: Policy) -> None:
    assert Policy.of(fields) == policy


@pytest.mark.parametrize(
    "fields", [{}, {"version": None}, {"version": True}, {"version": 1.5}, {"model": "plain"}, {"model": ""},
               {"version": "8", "model": 8}, {"version": ""}, {"version": "a\nb"}, {"version": "v" * 201}],
)  # fmt: skip
def test_fields_that_name_no_policy(fields: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        Policy.of(fields)


async def test_a_new_policy_reaches_running_and_later_sessions_and_its_name_the_engine(tmp_path: Path) -> None:
    settings = Settings(probe=False, admin_port=0, admin_key="admin", model="lora-v1", policy_version="1")
    async with FakeEngine(replays(PLAIN)) as engine, serve(settings) as proxy:
        async with httpx.AsyncClient(
            base_url=proxy.admin_url or "", headers={"authorization": "Bearer admin"}
        ) as admin:

            async def opened(name: str, **options: Any) -> Any:
                return await proxy.open_session(
                    name, journal=tmp_path / f"{name}.jsonl", upstream=[engine.url], **options
                )

            async def call(session: Any) -> None:
                headers = {"authorization": f"Bearer {session.api_key}"}
                assert (await admin.post(f"{proxy.base_url}/chat/completions", json=CHAT, headers=headers)).is_success

            running = await opened("running")
            await call(running)
            answer = await admin.post("/policy", json={"model": "lora-v2"})
            assert answer.json() == {"policy_version": "2", "model": "lora-v2"}
            later, own = await opened("later"), await opened("own", policy_version="0")
            for session in (running, later, own):
                await call(session)
            await admin.post(f"/sessions/{own.id}/policy", json={"version": "9", "model": "mine"})
            await call(own)
            await admin.post("/policy", json={"version": "3"})
            await call(own)
            assert (await admin.post("/policy", json={"model": "plain"})).status_code == 400
            assert (await admin.post("/policy", json={}, headers={"authorization": "x"})).status_code == 401
    assert [made(line) for line in JournalReader(tmp_path / "running.jsonl")] == [("1", "lora-v1"), ("2", "lora-v2")]
    assert [made(line) for line in JournalReader(tmp_path / "later.jsonl")] == [("2", "lora-v2")]
    lines = JournalReader(tmp_path / "own.jsonl")
    assert [made(line) for line in lines] == [("0", "lora-v2"), ("9", "mine"), ("3", "mine")]
    assert [seen.body["model"] for seen in engine.calls][:2] == ["lora-v1", "lora-v2"]


def made(line: Any) -> tuple[str, str]:
    """The version and the model that a call was made to."""
    return line.metadata["policy_version"], line.metadata["provider_model"]


async def test_a_policy_for_all_outlasts_the_end_of_sessions_by_address(started: Started, tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url, policy_version="1") as bench:
        root = bench.proxy.base_url.removesuffix("/v1")

        async def calls() -> None:
            for address in ("", "/s/one", "/s/two"):
                assert (await bench.client.post(f"{root}{address}/v1/chat/completions", json=CHAT)).is_success

        await calls()
        await bench.proxy.set_policy_version("one", "2")
        await calls()
        await bench.proxy.set_policy("3", "new")
        await bench.proxy.sessions.end_unused(0)
        await calls()
    versions = {
        name: [made(line) for line in JournalReader(tmp_path / f"captures/{name}/trajectory/llm_trajectory.jsonl")]
        for name in ("default", "one", "two")
    }
    old, new = ("1", "asked"), ("3", "new")
    assert versions == {"default": [old, old, new], "one": [old, ("2", "asked"), new], "two": [old, old, new]}


@pytest.mark.parametrize(("model", "end"), [(None, "2"), ("served", "2"), ("lora-v2", None)])
async def test_a_call_in_flight_has_two_versions_unless_the_new_one_has_another_name(
    started: Started, model: str | None, end: str | None
) -> None:
    """Under the same name an engine's weights were replaced; a LoRA adapter stays the one that the call was sent to."""
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def slow(seen: Seen) -> AsyncIterator[bytes]:
        arrived.set()
        await go_on.wait()
        yield whole(200, transcript(PLAIN)[1])

    async with FakeEngine(slow) as engine, started(engine.url, policy_version="1", model="served") as bench:
        call = asyncio.ensure_future(bench.client.post("/chat/completions", json=CHAT))
        await arrived.wait()
        await bench.proxy.set_policy("2", model)
        go_on.set()
        assert (await call).is_success
        recorded = bench.call()
    assert (recorded.metadata["policy_version"], recorded.metadata["policy_version_end"]) == ("1", end)


async def test_without_a_version_it_is_read_from_the_adapters_name(started: Started) -> None:
    names = ["lora-v3", "lora-v12", "lora-v3", "base:lora-v12", "base-v9", "other-v1", "plain"]
    async with (
        FakeEngine(replays(PLAIN), models=["base-v9", "plain"], adapters=["lora-v3", "lora-v12"]) as engine,
        started(engine.url) as bench,
    ):
        for name in names:
            assert (await bench.client.post("/chat/completions", json={**CHAT, "model": name})).is_success
        asked = [seen.path for seen in engine.seen].count("/v1/models")
        calls = bench.calls()
    assert [call.metadata["policy_version"] for call in calls] == ["3", "12", "3", "12", None, None, None]
    assert [call.metadata["policy_version_end"] for call in calls] == [None] * 7
    assert asked == 4, "a listed name is asked about once"


async def test_an_explicit_version_wins_over_one_in_a_name(started: Started) -> None:
    async with FakeEngine(replays(PLAIN), adapters=["lora-v3"]) as engine, started(engine.url) as bench:
        lora = {**CHAT, "model": "lora-v3"}
        await bench.client.post("/chat/completions", json=lora)
        await bench.proxy.set_policy("step-500")
        await bench.client.post("/chat/completions", json=lora)
        calls = bench.calls()
    assert [call.metadata["policy_version"] for call in calls] == ["3", "step-500"]


async def test_a_call_to_an_adapter_keeps_its_version_while_the_next_is_announced(started: Started) -> None:
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def slow(seen: Seen) -> AsyncIterator[bytes]:
        arrived.set()
        await go_on.wait()
        yield whole(200, transcript(PLAIN)[1])

    async with FakeEngine(slow, adapters=["lora-v3"]) as engine, started(engine.url) as bench:
        call = asyncio.ensure_future(bench.client.post("/chat/completions", json={**CHAT, "model": "lora-v3"}))
        await arrived.wait()
        await bench.proxy.set_policy("4")
        go_on.set()
        assert (await call).is_success
        recorded = bench.call()
    assert (recorded.metadata["policy_version"], recorded.metadata["policy_version_end"]) == ("3", None)
