"""`--workers`: several processes with a port each; a session lives in one of them, and the others say which."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture.journal.journal import JournalReader
from proxy.http.sockets import bind
from proxy.sessions.placement import Placement
from proxy.sessions.policy import Policy
from proxy.settings import Settings
from proxy.workers.admin import add_metrics
from proxy.workers.opened_sessions import OpenedSession, OpenedSessions
from proxy.workers.process import Worker
from tests.proxy.fake_engine import FakeEngine, Seen, replays, transcript, whole
from tests.proxy.raw import exchange_to_end, post, statuses

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

PLAIN, STREAM = "vllm/chat-plain-length-nostream", "vllm/chat-plain-length-stream"
CHAT: dict[str, Any] = {"model": "my-policy", "messages": [{"role": "user", "content": "Name two colours."}]}
WHOLE = transcript(PLAIN)[1]


class Running:
    def __init__(self, process: asyncio.subprocess.Process, out: Path) -> None:
        self.process = process
        self.out = out
        self.log_lines: list[str] = []
        self.ports: list[int] = []
        self.admin = self.made_key = ""

    @property
    def port(self) -> int:
        """`--port`, which is the first worker's."""
        return self.ports[0]

    def port_of(self, name: str) -> int:
        """The port of the worker that has the session which an address names."""
        return self.ports[zlib.crc32(name.encode()) % len(self.ports)]

    async def hear(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.log_lines.append(line.decode())

    async def settled(self) -> None:
        async with asyncio.timeout(120):
            while not self.ports or not self.admin:
                assert self.process.returncode is None, self.log_lines
                for line in self.log_lines:
                    if "agents: http://127.0.0.1:" in line:
                        self.ports = [int(port) for port in line.partition("on ports ")[2].strip(" )\n").split(", ")]
                        assert f"agents: http://127.0.0.1:{self.ports[0]}/v1" in line
                    if "admin: " in line:
                        self.admin, _, self.made_key = line.split("admin: ")[1].strip(" )\n").partition(" (key ")
                await asyncio.sleep(0.02)

    def workers(self) -> list[int]:
        return [
            int(part) for part in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]

    def calls(self, journal: Path) -> list[Any]:
        reader = JournalReader(journal)
        calls = list(reader)
        assert reader.problems == []
        return calls

    async def open(self, client: httpx.AsyncClient, name: str) -> dict[str, Any]:
        journal = self.out / name / "journal.jsonl"
        made = await client.post(f"{self.admin}/sessions", json={"name": name, "journal": str(journal)})
        assert made.status_code == 201, made.text
        return {**made.json(), "journal": journal}

    async def ended(self) -> int:
        async with asyncio.timeout(120):
            return await self.process.wait()


@asynccontextmanager
async def proxies(upstream: str, out: Path, *more: str, key: str | None = "boss") -> AsyncIterator[Running]:
    command = [sys.executable, "-m", "proxy", "--upstream", upstream, "--out", str(out), "--port", "0", "--no-probe"]
    process = await asyncio.create_subprocess_exec(
        *command, "--admin-port", "0", *(["--admin-key", key] if key else []), "--workers", "2", *more,
        stderr=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    running = Running(process, out)
    hearing = asyncio.ensure_future(running.hear())
    try:
        await running.settled()
        yield running
    finally:
        if process.returncode is None:
            process.terminate()
            await running.ended()
        await hearing


def boss() -> httpx.AsyncClient:
    return httpx.AsyncClient(headers={"authorization": "Bearer boss"}, timeout=120)


async def test_sessions_live_in_workers_and_the_admin_routes_see_them_all(tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, proxies(engine.url, tmp_path) as proxy, boss() as admin:
        opened = await asyncio.gather(*(proxy.open(admin, f"rollout-{number}") for number in range(4)))
        assert len({session["api_key"] for session in opened}) == 4
        shown = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in proxy.workers())
        assert shown and b"boss" not in shown
        for times, session in enumerate(opened, 1):
            assert session["base_url"] in [f"http://127.0.0.1:{port}/v1" for port in proxy.ports]
            assert session["base_url"] == session["anthropic_base_url"] + "/v1"
            async with httpx.AsyncClient(headers={"authorization": f"Bearer {session['api_key']}"}) as agent:
                for _ in range(times):
                    got = await agent.post(f"{session['base_url']}/chat/completions", json=CHAT)
                    assert got.status_code == 200
        listed = (await admin.get(f"{proxy.admin}/sessions")).json()["sessions"]
        assert {session["name"]: session["calls"] for session in listed} == {
            "default": 0, "rollout-0": 1, "rollout-1": 2, "rollout-2": 3, "rollout-3": 4,
        }  # fmt: skip
        metrics = (await admin.get(f"{proxy.admin}/metrics")).text
        assert 'capture_calls_total{outcome="ok",wire="openai-chat"} 10.0' in metrics
        assert "capture_sessions 5.0" in metrics
        open_journals = {path.parent.name for pid in proxy.workers() for path in journals_of(pid)}
        assert open_journals == {f"rollout-{number}" for number in range(4)} | {"trajectory"}
        assert sorted(len(journals_of(pid)) for pid in proxy.workers()) == [2, 3], "opened at once, and spread"
        for times, session in enumerate(opened, 1):
            assert (await admin.delete(f"{proxy.admin}/sessions/{session['session']}")).json()["calls"] == times
            assert [call.outcome for call in proxy.calls(session["journal"])] == ["ok"] * times
        assert (await admin.get(f"{proxy.admin}/sessions/{opened[0]['session']}")).status_code == 404
        assert (await httpx.AsyncClient().get(f"{proxy.admin}/sessions")).status_code == 401
        refused = await httpx.AsyncClient().post(
            f"{opened[0]['base_url']}/chat/completions", json=CHAT, headers={"x-api-key": opened[0]["api_key"]}
        )
        assert refused.status_code == 401 and "closed" in refused.text


def journals_of(pid: int) -> set[Path]:
    """Journals that a process has open."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            path = entry.readlink()
        except OSError:
            continue
        if path.suffix == ".jsonl":
            found.add(path)
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_a_connection_serves_one_session_of_its_worker_after_another(tmp_path: Path, stream: bool) -> None:
    async with (
        FakeEngine(replays(STREAM if stream else PLAIN)) as engine,
        proxies(engine.url, tmp_path) as proxy,
        boss() as admin,
    ):
        opened = [await proxy.open(admin, f"rollout-{number}") for number in range(6)]
        base = opened[0]["base_url"]
        together = [session for session in opened if session["base_url"] == base]
        assert len(together) == 3
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(base_url=base, limits=limits) as agent:
            for turn in range(12):
                key = together[turn % 3]["api_key"]
                body = {**CHAT, "stream": stream, "padding": "x" * (300_000 if turn % 2 else 10)}
                got = await agent.post("/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
                assert got.status_code == 200
        for session in together:
            assert [call.outcome for call in proxy.calls(session["journal"])] == ["ok"] * 4


async def test_a_session_that_an_address_names_lives_where_its_name_hashes_to(tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, proxies(engine.url, tmp_path) as proxy, boss() as admin:
        version = await admin.post(f"{proxy.admin}/sessions/default/policy", json={"version": "step-7"})
        assert version.status_code == 200
        async with httpx.AsyncClient() as agent:
            for turn in range(12):
                name = f"task-{turn % 6}"
                url = f"http://127.0.0.1:{proxy.port_of(name)}/s/{name}/v1/chat/completions"
                assert (await agent.post(url, json=CHAT)).status_code == 200
            url = f"http://127.0.0.1:{proxy.port}/v1/chat/completions"
            assert (await agent.post(url, json=CHAT)).status_code == 200
        assert {proxy.port_of(f"task-{number}") for number in range(6)} == set(proxy.ports)
        for number in range(6):
            calls = proxy.calls(tmp_path / f"task-{number}/trajectory/llm_trajectory.jsonl")
            assert [call.metadata["policy_version"] for call in calls] == ["step-7"] * 2
        assert len(proxy.calls(tmp_path / "default/trajectory/llm_trajectory.jsonl")) == 1
        assert (await admin.get(f"{proxy.admin}/sessions/task-3")).json()["calls"] == 2


async def test_another_workers_port_answers_421_with_the_address_that_answers(tmp_path: Path) -> None:
    """For a name, a key and the default session, in each dialect, and without making a session there."""
    async with FakeEngine(replays(PLAIN)) as engine, proxies(engine.url, tmp_path) as proxy, boss() as admin:
        opened = await proxy.open(admin, "opened")
        key = {"authorization": f"Bearer {opened['api_key']}"}
        cases = [("", {}, proxy.ports[0], ""), ("", key, int(opened["base_url"].split(":")[2][:-3]), "")]
        cases += [(f"/s/{name}", {}, proxy.port_of(name), name) for name in ("task-0", "task-1", "task-2", "default")]
        async with httpx.AsyncClient() as agent:
            for path, headers, right, name in cases:
                if name == "default":
                    right = proxy.ports[0]
                (wrong,) = set(proxy.ports) - {right}
                for route in ("/chat/completions", "/completions", "/messages", "/responses"):
                    url = f"http://127.0.0.1:{wrong}{path}/v1{route}"
                    got = await agent.post(url, json=CHAT, headers=headers)
                    assert got.status_code == 421, got.text
                    assert f"http://127.0.0.1:{right}{path}/v1" in got.json()["error"]["message"]
                    assert (got.json().get("type") == "error") is (route == "/messages")
                got = await agent.get(f"http://localhost:{wrong}{path}/v1/models", headers=headers)
                assert got.status_code == 421 and f"http://localhost:{right}{path}/v1" in got.text
                got = await agent.post(
                    f"http://127.0.0.1:{right}{path}/v1/chat/completions", json=CHAT, headers=headers
                )
                assert got.status_code == 200
        listed = (await admin.get(f"{proxy.admin}/sessions")).json()["sessions"]
        assert sorted(session["name"] for session in listed) == ["default", "opened", "task-0", "task-1", "task-2"]
        assert {session["name"]: session["calls"] for session in listed if session["name"] != "default"} == {
            "opened": 1, "task-0": 1, "task-1": 1, "task-2": 1,
        }  # fmt: skip


@pytest.mark.parametrize(
    "key",
    ["sk-capture-w7-x", "sk-capture-w99-x", "sk-capture-w1", "sk-capture-", "sk-capture-w-1-x", "sk-capture-w1-x"],
)
async def test_a_key_of_no_worker_opens_nothing(tmp_path: Path, key: str) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, proxies(engine.url, tmp_path) as proxy:
        async with httpx.AsyncClient(headers={"x-api-key": key}) as agent:
            got = [
                (await agent.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=CHAT)) for port in proxy.ports
            ]
        assert {answer.status_code for answer in got} <= {401, 421} and got[-1].status_code == 401
        assert not engine.calls


@pytest.mark.parametrize(
    "other",
    ["POST /%73/task-", "POST /s/t%61sk-", "POST http://h/s/task-", "POST  /s/task-", "\r\n\r\nPOST /s/task-"],
)
async def test_a_name_is_the_same_however_it_is_written(tmp_path: Path, other: str) -> None:
    """A worker that read another name would make another session, on a journal that is taken."""
    async with FakeEngine(replays(PLAIN)) as engine, proxies(engine.url, tmp_path) as proxy:
        for number in range(4):
            data = post(CHAT, "connection: close", path=f"/s/task-{number}/v1/chat/completions")
            for first in (b"POST /s/task-", other.encode()):
                for port in proxy.ports:
                    got = await exchange_to_end(port, data.replace(b"POST /s/task-", first))
                    assert statuses(got) == [200 if port == proxy.port_of(f"task-{number}") else 421]
            assert len(proxy.calls(tmp_path / f"task-{number}/trajectory/llm_trajectory.jsonl")) == 2


async def test_pipelined_requests_of_two_workers_are_answered_each_for_itself(tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, proxies(engine.url, tmp_path) as proxy:
        names = [f"task-{number}" for number in range(4)]
        data = {name: post(CHAT, path=f"/s/{name}/v1/chat/completions") for name in names}
        last = {name: post(CHAT, "connection: close", path=f"/s/{name}/v1/chat/completions") for name in names}
        for first in names:
            port = proxy.port_of(first)
            for second in names:
                got = await exchange_to_end(port, data[first] + last[second])
                assert statuses(got) == [200, 200 if proxy.port_of(second) == port else 421]
        for name in names:
            together = sum(proxy.port_of(other) == proxy.port_of(name) for other in names)
            assert len(proxy.calls(tmp_path / name / "trajectory/llm_trajectory.jsonl")) == 4 + together


async def test_a_stop_lets_calls_in_every_worker_end(tmp_path: Path) -> None:
    async def late(seen: Seen) -> AsyncIterator[bytes]:
        await asyncio.sleep(1.0)
        yield whole(200, WHOLE)

    async with FakeEngine(late) as engine, proxies(engine.url, tmp_path) as proxy, boss() as admin:
        opened = [await proxy.open(admin, f"rollout-{number}") for number in range(4)]
        async with httpx.AsyncClient(timeout=120) as agent:
            calls = [
                asyncio.ensure_future(
                    agent.post(
                        session["base_url"] + "/chat/completions", json=CHAT, headers={"x-api-key": session["api_key"]}
                    )
                )
                for session in opened
            ]
            async with asyncio.timeout(120):
                while len(engine.calls) < 4:
                    await asyncio.sleep(0.01)
            proxy.process.send_signal(signal.SIGTERM)
            assert [got.status_code for got in await asyncio.gather(*calls)] == [200] * 4
        assert await proxy.ended() == 0
        assert all(len(proxy.calls(session["journal"])) == 1 for session in opened)


async def test_a_worker_that_is_killed_under_load_comes_back_with_its_sessions(tmp_path: Path) -> None:
    """Agents repeat a call that broke off, as their libraries do; their keys go on opening their sessions."""
    async with FakeEngine(replays(STREAM)) as engine, proxies(engine.url, tmp_path) as proxy, boss() as admin:
        opened = [await proxy.open(admin, f"rollout-{number}") for number in range(6)]
        closed = await proxy.open(admin, "over")
        await admin.delete(f"{proxy.admin}/sessions/{closed['session']}")
        await admin.post(f"{proxy.admin}/sessions/{opened[0]['session']}/policy", json={"version": "step-9"})
        await admin.post(f"{proxy.admin}/sessions/{opened[1]['session']}/policy", json={"version": "step-9"})
        await admin.post(f"{proxy.admin}/sessions/default/policy", json={"version": "step-8"})
        sessions = [{path.parent.name for path in journals_of(pid)} for pid in proxy.workers()]
        answered, broken, finished = dict.fromkeys(range(6), 0), dict.fromkeys(range(6), 0), asyncio.Event()

        async def rollout(number: int) -> None:
            headers = {"x-api-key": opened[number]["api_key"]}
            async with httpx.AsyncClient(timeout=120, headers=headers) as agent:
                while not finished.is_set():
                    try:
                        got = await agent.post(f"{opened[number]['base_url']}/chat/completions", json=BODY)
                    except httpx.TransportError:
                        broken[number] += 1
                        continue
                    assert got.status_code == 200, got.text
                    answered[number] += got.text.rstrip().endswith("[DONE]")

        rollouts = [asyncio.ensure_future(rollout(number)) for number in range(6)]
        await until(lambda: all(answered[number] >= 2 for number in range(6)), rollouts)
        killed = proxy.workers()[1]
        os.kill(killed, signal.SIGKILL)
        await until(lambda: any("worker 1 is up again" in line for line in proxy.log_lines), rollouts)
        before = dict(answered)
        await until(lambda: all(answered[number] > before[number] for number in range(6)), rollouts)
        finished.set()
        await asyncio.gather(*rollouts)
        spared = [number for number in range(6) if f"rollout-{number}" in sessions[0]]
        assert len(spared) == 3 and not any(broken[number] for number in spared), "the other worker's never noticed"
        assert all(broken[number] <= 3 for number in range(6)), "the kernel holds a connection until its worker is back"
        for number, session in enumerate(opened):
            calls = proxy.calls(session["journal"])
            assert answered[number] <= len(calls) <= answered[number] + broken[number]
            assert len({call.metadata["call"] for call in calls}) == len(calls)
            assert calls[-1].metadata["policy_version"] == ("step-9" if number < 2 else None)
            state = (await admin.get(f"{proxy.admin}/sessions/{session['session']}")).json()
            assert (state["first_call"] > 0) is (number not in spared) and not state["closed"]
            assert (await admin.delete(f"{proxy.admin}/sessions/{session['session']}")).status_code == 200
        assert closed["api_key"] and (await admin.get(f"{proxy.admin}/sessions/over")).status_code == 404
        assert any(f"worker 1 (process {killed}) died (killed by SIGKILL)" in line for line in proxy.log_lines)
        name = next(name for name in ("a", "b", "c") if zlib.crc32(name.encode()) % 2)
        async with httpx.AsyncClient() as agent:
            url = f"http://127.0.0.1:{proxy.port_of(name)}/s/{name}/v1/chat/completions"
            assert (await agent.post(url, json=CHAT)).status_code == 200
        (call,) = proxy.calls(tmp_path / name / "trajectory/llm_trajectory.jsonl")
        assert call.metadata["policy_version"] == "step-8", "the default's reached the new worker too"


async def test_all_workers_pause_and_resume_with_one_policy_also_one_that_died_meanwhile(tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, proxies(engine.url, tmp_path) as proxy, boss() as admin:
        opened = [await proxy.open(admin, f"rollout-{number}") for number in range(2)]
        assert {session["base_url"] for session in opened} == {f"http://127.0.0.1:{port}/v1" for port in proxy.ports}
        assert (await admin.post(f"{proxy.admin}/pause", json={"wait": "x"})).status_code == 400
        assert (await admin.post(f"{proxy.admin}/pause", headers={"authorization": "x"})).status_code == 401
        assert (await admin.post(f"{proxy.admin}/pause", json={"wait": 5})).json() == {"in_flight": 0}
        os.kill(proxy.workers()[1], signal.SIGKILL)
        async with httpx.AsyncClient(timeout=60) as agent:

            async def call(number: int) -> httpx.Response:
                key = {"x-api-key": opened[number]["api_key"]}
                url = f"{opened[number]['base_url']}/chat/completions"
                while True:
                    with suppress(httpx.TransportError):  # it reached the process that was being killed
                        return await agent.post(url, json=CHAT, headers=key)

            waiting = [asyncio.ensure_future(call(number)) for number in range(2)]
            async with asyncio.timeout(60):
                while "capture_held_calls 2.0" not in (await admin.get(f"{proxy.admin}/metrics")).text:
                    await asyncio.sleep(0.02)
            assert engine.calls == []
            resumed = await admin.post(f"{proxy.admin}/resume", json={"model": "lora-v8"})
            assert resumed.json() == {"paused": False}
            assert [got.status_code for got in await asyncio.gather(*waiting)] == [200, 200]
            answer = await admin.post(f"{proxy.admin}/policy", json={"version": "9"})
            assert answer.json() == {"policy_version": "9"}
            os.kill(proxy.workers()[0], signal.SIGKILL)
            assert [got.status_code for got in await asyncio.gather(call(0), call(1))] == [200, 200]
            later = await proxy.open(admin, "later")
            key = {"x-api-key": later["api_key"]}
            assert (await agent.post(f"{later['base_url']}/chat/completions", json=CHAT, headers=key)).is_success
        for session in opened:
            calls = proxy.calls(session["journal"])
            made = [(call.metadata["policy_version"], call.metadata["provider_model"]) for call in calls]
            assert made == [("8", "lora-v8"), ("9", "lora-v8")]
            answer = await admin.get(f"{proxy.admin}/sessions/{session['session']}/records?from=1")
            assert answer.content == session["journal"].read_bytes().splitlines(keepends=True)[1]
            await admin.delete(f"{proxy.admin}/sessions/{session['session']}")
            answer = await admin.get(f"{proxy.admin}/sessions/{session['session']}/records")
            assert answer.content == session["journal"].read_bytes()
        assert proxy.calls(later["journal"])[0].metadata["policy_version"] == "9"
        assert (await admin.get(f"{proxy.admin}/sessions/nobody/records")).status_code == 404


async def test_workers_keep_a_sessions_controls_also_one_that_died(tmp_path: Path) -> None:
    more = ("--max-calls", "3", "--force-sampling", '{"top_k": -1}', "--purpose", "eval")
    async with FakeEngine(replays(PLAIN)) as engine, proxies(engine.url, tmp_path, *more) as proxy, boss() as admin:
        fields = {"journal": str(tmp_path / "own/journal.jsonl"), "max_calls": 2, "force_sampling": {"top_p": 1.0}}
        own = (await admin.post(f"{proxy.admin}/sessions", json={"name": "own", **fields})).json()
        opened = [{**own, "journal": Path(str(fields["journal"]))}, await proxy.open(admin, "inherits")]

        async def call(session: dict[str, Any]) -> None:
            async with httpx.AsyncClient(timeout=60) as agent:
                while True:
                    with suppress(httpx.TransportError):  # it reached the process that was being killed
                        key = {"x-api-key": session["api_key"]}
                        got = await agent.post(f"{session['base_url']}/chat/completions", json=CHAT, headers=key)
                        assert got.status_code == 200, got.text
                        return

        await asyncio.gather(*map(call, opened))
        for worker in proxy.workers():
            os.kill(worker, signal.SIGKILL)
        for _ in range(3):
            await asyncio.gather(*map(call, opened))
        for session, most in zip(opened, (2, 3), strict=True):
            calls = proxy.calls(session["journal"])
            assert [call.outcome for call in calls] == ["ok"] * most + ["ended"] * (4 - most)
            assert {call.metadata["purpose"] for call in calls} == {"eval"}
        assert proxy.calls(opened[0]["journal"])[0].metadata["sampling"]["forced"] == {"top_p": 1.0}
        assert proxy.calls(opened[1]["journal"])[0].metadata["sampling"]["forced"] == {"top_k": -1}


BODY = {**CHAT, "stream": True}


async def until(holds: Callable[[], bool], others: list[asyncio.Future[None]]) -> None:
    """While the others go on."""
    async with asyncio.timeout(120):
        while not holds():
            assert not any(other.done() for other in others), [other.exception() for other in others if other.done()]
            await asyncio.sleep(0.02)


async def test_a_worker_that_dies_again_and_again_ends_the_proxy_with_a_sentence(tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, proxies(engine.url, tmp_path) as proxy, boss() as admin:
        opened = [await proxy.open(admin, f"rollout-{number}") for number in range(4)]
        async with httpx.AsyncClient() as agent:
            for session in opened:
                url = session["base_url"] + "/chat/completions"
                assert (await agent.post(url, json=CHAT, headers={"x-api-key": session["api_key"]})).status_code == 200
        seen = set(proxy.workers())
        for time in range(3):
            second = max(proxy.workers())
            os.kill(second, signal.SIGKILL)
            if time < 2:
                async with asyncio.timeout(120):
                    while sum("is up again" in line for line in proxy.log_lines) <= time:
                        await asyncio.sleep(0.02)
                seen |= set(proxy.workers())
        assert await proxy.ended() == 1
        assert any("worker 1 died 3 times within 60 s" in line and "start it again" in line for line in proxy.log_lines)
        assert all(len(proxy.calls(session["journal"])) == 1 for session in opened)
        assert not any(Path(f"/proc/{pid}").exists() for pid in seen)


async def test_workers_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, proxies(engine.url, tmp_path) as proxy:
        workers = proxy.workers()
        assert len(workers) == 2
        proxy.process.kill()
        async with asyncio.timeout(120):
            while any(Path(f"/proc/{pid}").exists() for pid in workers):
                await asyncio.sleep(0.05)


async def test_a_journal_that_another_process_writes_is_reported_once(tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, proxies(engine.url, tmp_path):
        command = [sys.executable, "-m", "proxy", "--upstream", engine.url, "--out", str(tmp_path), "--port", "0"]
        second = await asyncio.create_subprocess_exec(
            *command, "--workers", "2", stderr=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[3]
        )
        _, stderr = await asyncio.wait_for(second.communicate(), 120)
        assert second.returncode == 2 and stderr.decode().count("a journal has one writer") == 1


async def test_admin_routes_of_workers_have_a_key_where_none_was_given(tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, proxies(engine.url, tmp_path, key=None) as proxy:
        async with httpx.AsyncClient(timeout=120) as client:
            body = {"name": "mine", "journal": str(tmp_path / "mine.jsonl")}
            assert (await client.post(f"{proxy.admin}/sessions", json=body)).status_code == 401
            client.headers["authorization"] = f"Bearer {proxy.made_key}"
            assert (await client.post(f"{proxy.admin}/sessions", json=body)).status_code == 201


@pytest.mark.parametrize(("number", "how"), [(9, "killed by SIGKILL"), (40, "killed by signal 40")])
async def test_how_a_worker_ended_is_reported_for_every_signal(number: int, how: str, tmp_path: Path) -> None:
    sockets = bind(["127.0.0.1"], 0)
    settings = Settings(upstream=["http://127.0.0.1:9"], probe=False)
    worker = Worker(Placement(0, (sockets[0].getsockname()[1],)), sockets, settings, tmp_path / "0.sock")
    assert await worker.start() is None
    assert worker.pid is not None
    os.kill(worker.pid, number)
    assert await worker.ended() == how
    worker.stop()


async def test_ports_follow_the_first_and_leave_out_the_admin_port(tmp_path: Path) -> None:
    first = free_ports(3)
    async with (
        FakeEngine(replays(PLAIN)) as engine,
        proxies(engine.url, tmp_path, "--port", str(first), "--admin-port", str(first + 1)) as proxy,
    ):
        assert proxy.ports == [first, first + 2] and proxy.admin == f"http://127.0.0.1:{first + 1}"


async def test_a_port_of_a_further_worker_that_is_taken_is_named(tmp_path: Path) -> None:
    first = free_ports(2)
    with socket.create_server(("127.0.0.1", first + 1)):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "proxy", "--upstream", "http://127.0.0.1:9", "--out", str(tmp_path),
            "--port", str(first), "--workers", "2", stderr=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[3],
        )  # fmt: skip
        _, log = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 2 and b"Traceback" not in log
    assert f"cannot listen on 127.0.0.1:{first + 1}: Address already in use".encode() in log


def free_ports(number: int) -> int:
    """The first of so many ports in a row that are free now."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as found:
            first = int(found.getsockname()[1])
        if first + number > 65535:
            continue
        try:
            for port in range(first, first + number):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first


def test_metrics_are_add_metrics() -> None:
    first = '# TYPE a counter\na_total{x="1"} 2.0\na_created{x="1"} 50.0\n'
    two = '# TYPE a counter\na_total{x="1"} 3.0\na_total{x="2"} 1.0\na_created{x="1"} 40.0\n'
    assert add_metrics([first, two]) == (
        '# TYPE a counter\na_total{x="1"} 5.0\na_created{x="1"} 40.0\na_total{x="2"} 1.0\n'
    )


def test_of_two_sessions_of_one_name_the_name_means_the_first() -> None:
    sessions = OpenedSessions(2)
    sessions.add(OpenedSession(1, "s-1", "key-1", "same", {}))
    sessions.add(OpenedSession(0, "s-2", "key-2", "same", {}))
    first, second = sessions.find("s-1"), sessions.find("s-2")
    assert first is not None and second is not None and sessions.find("same") is first
    sessions.set_policy("s-2", "same", Policy("7"))
    sessions.set_policy("s-9", "made-by-address", Policy("8"))
    assert [session.fields for session in sessions.of_worker(0)] == [{"policy_version": "7"}]
    assert sessions.policies == {"made-by-address": Policy("8")}
    sessions.remove("s-1", "same")
    sessions.remove("s-9", "made-by-address")
    assert sessions.find("same") is second and sessions.policies == {} and sessions.of_worker(1) == []


def test_the_least_loaded_worker_gets_the_next_session() -> None:
    sessions = OpenedSessions(3)
    assert sessions.least_loaded() == 2, "the first has the default session already"
    sessions.add(OpenedSession(2, "s-1", "key", "one", {}))
    sessions.opening[1] += 1
    assert sessions.least_loaded() == 0
