"""Sessions that their address made end when nobody calls any more, and go on in the same journal when somebody does."""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture.errors import JournalError
from capture.journal.journal import JournalReader, JournalWriter
from proxy import Settings, SettingsError, serve
from proxy.errors import Refusal
from tests.proxy.conftest import Bench, Started
from tests.proxy.fake_engine import FakeEngine, Seen, replays, transcript, whole

PLAIN = "vllm/chat-plain-length-nostream"
CHAT: dict[str, Any] = {"model": "my-policy", "messages": [{"role": "user", "content": "hi"}]}
IDLE = 0.3


def journals() -> int:
    """How many this process has open."""
    links = [Path("/proc/self/fd") / descriptor for descriptor in os.listdir("/proc/self/fd")]
    return sum(os.path.islink(link) and os.readlink(link).endswith(".jsonl") for link in links)


async def post(bench: Bench, name: str, path: str = "chat/completions", **body: Any) -> httpx.Response:
    return await bench.client.post(f"/../s/{name}/v1/{path}", json=body or CHAT)


async def ended(bench: Bench, seconds: float = 20) -> None:
    """Until only the default session is open."""
    async with asyncio.timeout(seconds):
        while len(list(bench.proxy.sessions)) > 1:
            await asyncio.sleep(0.02)


async def an_hour_passes(bench: Bench, seconds: float = 20) -> None:
    """Ends what is unused. A short idle time of the settings could be over between any two calls on a busy machine."""
    sessions = bench.proxy.sessions
    async with asyncio.timeout(seconds):
        while len(list(sessions)) > 1:
            await sessions.end_unused(0.01)
            await asyncio.sleep(0.01)


def numbers(tmp_path: Path, name: str) -> list[int]:
    return [call.metadata["call"] for call in JournalReader(journal(tmp_path, name))]


def journal(tmp_path: Path, name: str) -> Path:
    return tmp_path / "captures" / name / "trajectory/llm_trajectory.jsonl"


async def test_the_next_call_continues_in_the_journal(
    started: Started, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "proxy")
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        for _ in range(2):
            assert (await post(bench, "task-1")).status_code == 200
        first = bench.proxy.sessions.get("task-1")
        replica = first.replica
        assert replica is not None and replica.sessions == 1
        await an_hour_passes(bench)
        assert first.closed and replica.sessions == 0 and bench.proxy.sessions.calls == 2
        assert "task-1: no call for 0.01 s; its journal is sealed (2 calls" in caplog.text
        JournalWriter(journal(tmp_path, "task-1")).close()  # nobody holds it
        assert (await post(bench, "task-1")).status_code == 200
        state = bench.proxy.sessions.get("task-1").state()
        assert (state["first_call"], state["calls"]) == (2, 1)
        await an_hour_passes(bench)
        assert (await post(bench, "task-1")).status_code == 200
    assert numbers(tmp_path, "task-1") == [0, 1, 2, 3]


async def test_a_large_journal_is_not_read_again_unless_somebody_wrote_in_it(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading it blocks the calls of all other sessions."""
    read: list[Any] = []
    usual = mmap.mmap
    monkeypatch.setattr(mmap, "mmap", lambda *arguments, **more: (read.append(arguments), usual(*arguments, **more))[1])
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        for _ in range(2):
            await post(bench, "task-1")
            await an_hour_passes(bench)
        assert numbers(tmp_path, "task-1") == [0, 1] and read == []
        line = journal(tmp_path, "task-1").read_bytes().splitlines(keepends=True)[-1]
        with journal(tmp_path, "task-1").open("ab") as file:
            file.write(line.replace(b'"call":1,', b'"call":7,'))
        await post(bench, "task-1", **CHAT, metadata={"call": 99})  # an agent's own count is none of ours
        await an_hour_passes(bench)
        with journal(tmp_path, "task-1").open("ab") as file:
            file.write(b"\n")
        await post(bench, "task-1")
    assert numbers(tmp_path, "task-1") == [0, 1, 7, 8, 9] and len(read) == 2


async def test_many_give_their_descriptors_and_their_memory_back(started: Started, tmp_path: Path) -> None:
    names = [f"task-{number}" for number in range(200)]
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        sessions = bench.proxy.sessions
        for at in range(0, len(names), 20):
            asked = (post(bench, name, "responses", model="m", input="hi") for name in names[at : at + 20])
            assert {got.status_code for got in await asyncio.gather(*asked)} == {200}
        assert journals() == 1 + len(names) and sessions.budget.size > 500 * len(names)
        await an_hour_passes(bench)
        assert sessions.budget.size == 0 and journals() == 1
        assert [session.name for session in sessions] == ["default"]
    assert all(numbers(tmp_path, name) == [0] for name in names)


async def test_a_call_that_runs_keeps_its_session(started: Started, tmp_path: Path) -> None:
    async def slow(seen: Seen) -> Any:
        await asyncio.sleep(4 * IDLE)
        yield whole(200, transcript(PLAIN)[1])

    async with FakeEngine(slow) as engine, started(engine.url, session_idle=IDLE) as bench:
        assert (await post(bench, "task-1")).status_code == 200
        await ended(bench)
    assert numbers(tmp_path, "task-1") == [0], "a sealed journal takes no line"


async def test_calls_at_the_very_end_are_all_answered(started: Started, tmp_path: Path) -> None:
    """Each call comes when its session is just about to end."""
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url, session_idle=0.02) as bench:

        async def rollout(number: int) -> list[int]:
            got = []
            for turn in range(12):
                got.append((await post(bench, f"task-{number}")).status_code)
                await asyncio.sleep(0.02 + 0.001 * (turn + number % 3))
            return got

        assert await asyncio.gather(*(rollout(number) for number in range(8))) == [[200] * 12] * 8
    assert all(numbers(tmp_path, f"task-{number}") == list(range(12)) for number in range(8))


async def test_a_request_that_is_read_while_its_session_ends_is_asked_for_again(
    started: Started, tmp_path: Path
) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url, session_idle=0.05) as bench:
        session = bench.proxy.sessions.authorize([], "task-1")
        await ended(bench)
        task = asyncio.current_task()
        assert task is not None
        with pytest.raises(Refusal, match="made again") as refused:
            session.start_call(task)
        assert refused.value.status == 503, "clients repeat it by themselves"


async def test_sessions_that_somebody_opened_stay_and_so_does_the_default(started: Started, tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url, session_idle=0.05) as bench:
        opened = await bench.proxy.open_session("mine", journal=tmp_path / "mine.jsonl")
        assert (await post(bench, "mine")).status_code == 200  # by its name, in open mode
        assert (await post(bench, "task-1")).status_code == 200
        async with asyncio.timeout(10):
            while len(list(bench.proxy.sessions)) > 2:
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)
        assert {session.name for session in bench.proxy.sessions} == {"default", "mine"}
        headers = {"authorization": f"Bearer {opened.api_key}"}
        assert (await bench.client.post("/chat/completions", json=CHAT, headers=headers)).status_code == 200


async def test_zero_is_never(started: Started) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url, session_idle=0) as bench:
        await post(bench, "task-1")
        await asyncio.sleep(0.2)
        assert not bench.proxy.sessions.get("task-1").closed


async def test_a_policy_version_that_was_set_outlasts_the_end(started: Started, tmp_path: Path) -> None:
    async with (
        FakeEngine(replays(PLAIN)) as engine,
        started(engine.url, policy_version="1") as bench,
    ):
        await post(bench, "task-1")
        await bench.proxy.set_policy_version("task-1", "2")
        await post(bench, "task-2")
        await an_hour_passes(bench)
        await post(bench, "task-1")
        await post(bench, "task-2")
    stamped = [
        [c.metadata["policy_version"] for c in JournalReader(journal(tmp_path, n))] for n in ("task-1", "task-2")
    ]
    assert stamped == [["1", "2"], ["1", "1"]]


async def test_forgotten_calls_are_reported_as_forgotten(started: Started, tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        body = (await post(bench, "task-1", "responses", model="m", input="hi")).json()
        follow = {"model": "m", "input": "and?", "previous_response_id": body["id"]}
        assert (await post(bench, "task-1", "responses", **follow)).status_code == 200
        await an_hour_passes(bench)
        refused = await post(bench, "task-1", "responses", **follow)
        assert refused.status_code == 400 and "opened again" in refused.json()["error"]["message"]


async def test_a_thousand_conversations_together_stay_within_the_bound(started: Started) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url, history_mb=1) as bench:
        first = (await post(bench, "task-0", "responses", model="m", input="hi")).json()
        for number in range(1, 12):
            await post(bench, f"task-{number}", "responses", model="m", input="x" * 100_000)
        assert bench.proxy.sessions.budget.size <= 1 << 20
        follow = {"model": "m", "input": "and?", "previous_response_id": first["id"]}
        refused = await post(bench, "task-0", "responses", **follow)
        assert refused.status_code == 400 and "too long ago" in refused.json()["error"]["message"]


async def test_two_sessions_of_one_name(tmp_path: Path) -> None:
    """The name leads to the first session while it is open, then to the second; each has its own id and key."""
    async with FakeEngine(replays(PLAIN)) as engine, serve(Settings(upstream=[engine.url], probe=False)) as proxy:
        first, second = [await proxy.open_session("same", journal=tmp_path / f"{n}.jsonl") for n in range(2)]
        assert (await proxy.session_state("same"))["session"] == first.id
        assert (await proxy.session_state(second.id))["session"] == second.id
        await proxy.close_session("same")
        assert (await proxy.session_state("same"))["session"] == second.id
        await proxy.close_session("same")
        with pytest.raises(Exception, match="there is no session"):
            await proxy.session_state("same")
        assert list(proxy.sessions) == []


async def test_a_name_is_found_without_looking_at_the_others(tmp_path: Path) -> None:
    """Comparisons, not time: no session but the one that is asked for is looked at."""
    async with FakeEngine(replays(PLAIN)) as engine, serve(Settings(upstream=[engine.url], probe=False)) as proxy:
        for number in range(50):
            await proxy.open_session(f"task-{number}", journal=tmp_path / f"{number}.jsonl")
        looked_at: list[str] = []
        kind = type(proxy.sessions.get("task-0"))

        class Watched(kind):  # type: ignore[valid-type,misc]
            def __getattribute__(self, attribute: str) -> Any:
                looked_at.append(attribute)
                return super().__getattribute__(attribute)

        for session in proxy.sessions:
            session.__class__ = Watched
        proxy.sessions.get("task-49")
        assert looked_at == []


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    usual: dict[str, Any] = {"upstream": ["http://127.0.0.1:1/v1"], "out": tmp_path}
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(SettingsError, match="--session-idle must be a number of seconds, or 0 for never"):
            Settings(**usual, session_idle=seconds).check()
    with pytest.raises(SettingsError, match="--history-mb must be at least 1"):
        Settings(**usual, history_mb=0).check()
    Settings(**usual, session_idle=0).check()


async def test_an_invalid_name_and_an_invalid_journal_are_distinguished(started: Started, tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        (tmp_path / "captures/taken").write_text("a file, where the session's folder would be")
        refused = await post(bench, "taken")
        assert refused.status_code == 503 and "cannot open the journal" in refused.json()["error"]["message"]
        refused = await post(bench, "-not-a-name")
        assert refused.status_code == 400 and "a session's name is letters" in refused.json()["error"]["message"]


def test_no_descriptor_left_says_which_limit_to_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(JournalError, match=r"Too many open files; .* \(ulimit -n\)"):
        JournalWriter(tmp_path / "one.jsonl")
