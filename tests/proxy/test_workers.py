"""`--workers`: one port, several processes; each session in one of them, whatever connection its calls come by."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture.journal.journal import JournalReader
from proxy.http.sockets import bind
from proxy.settings import Settings
from proxy.workers.admin import added_up
from proxy.workers.fd_channel import whose
from proxy.workers.process import Worker
from proxy.workers.session_index import Directory, Opened
from proxy.workers.supervisor import Front
from tests.proxy.fake_engine import FakeEngine, Seen, answers, replays, transcript, whole
from tests.proxy.raw import connection, exchange, post, statuses, until_quiet

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="passing connections on needs Linux")

PLAIN, STREAM = "vllm/chat-plain-length-nostream", "vllm/chat-plain-length-stream"
CHAT: dict[str, Any] = {"model": "my-policy", "messages": [{"role": "user", "content": "Name two colours."}]}
WHOLE = transcript(PLAIN)[1]


class Running:
    def __init__(self, process: asyncio.subprocess.Process, out: Path) -> None:
        self.process = process
        self.out = out
        self.said: list[str] = []
        self.port = 0
        self.admin = self.made_key = ""

    async def hear(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.said.append(line.decode())

    async def settled(self) -> None:
        async with asyncio.timeout(30):
            while not self.port or not self.admin:
                assert self.process.returncode is None, self.said
                for line in self.said:
                    if "agents: http://127.0.0.1:" in line:
                        self.port = int(line.split("agents: http://127.0.0.1:")[1].split("/")[0])
                    if "admin: " in line:
                        self.admin, _, self.made_key = line.split("admin: ")[1].strip(" )\n").partition(" (key ")
                await asyncio.sleep(0.02)

    def workers(self) -> list[int]:
        return [
            int(one) for one in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
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
        async with asyncio.timeout(30):
            return await self.process.wait()


@asynccontextmanager
async def proxies(upstream: str, out: Path, *more: str, key: str | None = "boss") -> AsyncIterator[Running]:
    command = [sys.executable, "-m", "proxy", "--upstream", upstream, "--out", str(out), "--port", "0", "--no-probe"]
    process = await asyncio.create_subprocess_exec(
        *command, "--admin-port", "0", *(["--admin-key", key] if key else []), "--workers", "2", *more,
        stderr=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2],
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
    return httpx.AsyncClient(headers={"authorization": "Bearer boss"}, timeout=30)


async def test_sessions_live_in_workers_and_the_admin_routes_see_them_all(tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, proxies(engine.url, tmp_path) as proxy, boss() as admin:
        opened = await asyncio.gather(*(proxy.open(admin, f"rollout-{number}") for number in range(4)))
        assert len({one["api_key"] for one in opened}) == 4
        shown = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in proxy.workers())
        assert shown and b"boss" not in shown
        for times, one in enumerate(opened, 1):
            assert one["base_url"] == f"http://127.0.0.1:{proxy.port}/v1"
            async with httpx.AsyncClient(headers={"authorization": f"Bearer {one['api_key']}"}) as agent:
                for _ in range(times):
                    got = await agent.post(f"{one['base_url']}/chat/completions", json=CHAT)
                    assert got.status_code == 200
        listed = (await admin.get(f"{proxy.admin}/sessions")).json()["sessions"]
        assert {one["name"]: one["calls"] for one in listed} == {
            "default": 0, "rollout-0": 1, "rollout-1": 2, "rollout-2": 3, "rollout-3": 4,
        }  # fmt: skip
        metrics = (await admin.get(f"{proxy.admin}/metrics")).text
        assert 'capture_calls_total{outcome="ok",wire="openai-chat"} 10.0' in metrics
        assert "capture_sessions 5.0" in metrics
        held = {path.parent.name for pid in proxy.workers() for path in journals_of(pid)}
        assert held == {f"rollout-{number}" for number in range(4)} | {"trajectory"}
        assert sorted(len(journals_of(pid)) for pid in proxy.workers()) == [2, 3], "opened at once, and spread"
        for times, one in enumerate(opened, 1):
            assert (await admin.delete(f"{proxy.admin}/sessions/{one['session']}")).json()["calls"] == times
            assert [call.outcome for call in proxy.calls(one["journal"])] == ["ok"] * times
        assert (await admin.get(f"{proxy.admin}/sessions/{opened[0]['session']}")).status_code == 404
        assert (await httpx.AsyncClient().get(f"{proxy.admin}/sessions")).status_code == 401
        refused = await httpx.AsyncClient().post(
            f"{opened[0]['base_url']}/chat/completions", json=CHAT, headers={"x-api-key": opened[0]["api_key"]}
        )
        assert refused.status_code == 401 and "closed" in refused.text


def journals_of(pid: int) -> set[Path]:
    """Journals that a process has open."""
    found = set()
    for one in Path(f"/proc/{pid}/fd").iterdir():
        try:
            path = one.readlink()
        except OSError:
            continue
        if path.suffix == ".jsonl":
            found.add(path)
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_a_kept_connection_serves_one_session_after_another(tmp_path: Path, stream: bool) -> None:
    async with (
        FakeEngine(replays(STREAM if stream else PLAIN)) as engine,
        proxies(engine.url, tmp_path) as proxy,
        boss() as admin,
    ):
        opened = [await proxy.open(admin, f"rollout-{number}") for number in range(3)]
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{proxy.port}/v1", limits=limits) as agent:
            for turn in range(12):
                key = opened[turn % 3]["api_key"]
                body = {**CHAT, "stream": stream, "padding": "x" * (300_000 if turn % 2 else 10)}
                got = await agent.post("/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
                assert got.status_code == 200
        for one in opened:
            assert [call.outcome for call in proxy.calls(one["journal"])] == ["ok"] * 4


async def test_a_session_by_its_name_is_made_in_one_worker_and_found_there(tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, proxies(engine.url, tmp_path) as proxy, boss() as admin:
        version = await admin.post(f"{proxy.admin}/sessions/default/policy", json={"version": "step-7"})
        assert version.status_code == 200
        async with httpx.AsyncClient() as agent:
            for turn in range(12):
                url = f"http://127.0.0.1:{proxy.port}/s/task-{turn % 6}/v1/chat/completions"
                assert (await agent.post(url, json=CHAT)).status_code == 200
            assert (
                await agent.post(f"http://127.0.0.1:{proxy.port}/v1/chat/completions", json=CHAT)
            ).status_code == 200
        for number in range(6):
            calls = proxy.calls(tmp_path / f"task-{number}/trajectory/llm_trajectory.jsonl")
            assert [call.metadata["policy_version"] for call in calls] == ["step-7"] * 2
        assert len(proxy.calls(tmp_path / "default/trajectory/llm_trajectory.jsonl")) == 1
        assert (await admin.get(f"{proxy.admin}/sessions/task-3")).json()["calls"] == 2


async def test_a_head_that_trickles_in_finds_its_worker(tmp_path: Path) -> None:
    async with FakeEngine(answers(200, WHOLE)) as engine, proxies(engine.url, tmp_path) as proxy, boss() as admin:
        opened = [await proxy.open(admin, f"rollout-{number}") for number in range(2)]
        for one in opened:
            async with connection(proxy.port) as (reader, writer):
                for _ in range(2):  # the second on the kept connection
                    request = post(CHAT, f"authorization: Bearer {one['api_key']}")
                    for at in range(0, len(request), 40):
                        writer.write(request[at : at + 40])
                        await writer.drain()
                        await asyncio.sleep(0.002)
                    head = await reader.readuntil(b"\r\n\r\n")
                    assert head.startswith(b"HTTP/1.1 200")
                    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
                    await reader.readexactly(int(length.split(b":")[1]))
            assert len(proxy.calls(one["journal"])) == 2


@pytest.mark.parametrize(
    "other",
    ["POST /%73/task-", "POST /s/t%61sk-", "POST http://h/s/task-", "POST  /s/task-", "\r\n\r\nPOST /s/task-"],
)
async def test_a_name_is_the_same_however_it_is_written(tmp_path: Path, other: str) -> None:
    """A worker that has not the session would make another of its name, on a journal that is taken."""
    async with FakeEngine(replays(PLAIN)) as engine, proxies(engine.url, tmp_path) as proxy:
        for number in range(4):
            data = post(CHAT, path=f"/s/task-{number}/v1/chat/completions")
            for begun in (b"POST /s/task-", other.encode()):
                got = await exchange(proxy.port, data.replace(b"POST /s/task-", begun), seconds=0.1)
                assert statuses(got) == [200]
            assert len(proxy.calls(tmp_path / f"task-{number}/trajectory/llm_trajectory.jsonl")) == 2


async def test_an_answer_that_is_not_read_yet_stays_whole_when_another_sessions_request_comes(tmp_path: Path) -> None:
    body = b'{"choices": [], "x": "%b"}' % (b"y" * (8 << 20))
    large = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)

    async def answer(seen: Seen) -> AsyncIterator[bytes]:
        yield large

    async with FakeEngine(answer) as engine, proxies(engine.url, tmp_path) as proxy, boss() as admin:
        one, two = [await proxy.open(admin, f"rollout-{number}") for number in range(2)]
        async with connection(proxy.port) as (reader, writer):
            writer.write(post(CHAT, f"x-api-key: {one['api_key']}"))
            got = await reader.read(1)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            async with asyncio.timeout(5):
                while not one["journal"].exists() or not proxy.calls(one["journal"]):
                    await asyncio.sleep(0.02)
            writer.write(post(CHAT, f"x-api-key: {two['api_key']}"))
            await asyncio.sleep(0.2)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            got += await until_quiet(reader)
        assert statuses(got) == [200, 421] and got.partition(b"\r\n\r\n")[2].startswith(body + b"HTTP/1.1 ")


async def test_a_request_right_behind_another_sessions_makes_no_session_in_the_wrong_worker(tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, proxies(engine.url, tmp_path) as proxy:
        data = [post(CHAT, path=f"/s/task-{number}/v1/chat/completions") for number in range(4)]
        for first in data:
            assert statuses(await exchange(proxy.port, first + first, seconds=0.1)) == [200, 200]
            for second in data:
                if second is not first:
                    assert statuses(await exchange(proxy.port, first + second, seconds=0.1)) == [200]
        for number in range(4):  # each in its own
            assert len(proxy.calls(tmp_path / f"task-{number}/trajectory/llm_trajectory.jsonl")) == 5


async def test_a_stop_lets_calls_in_every_worker_end(tmp_path: Path) -> None:
    async def late(seen: Seen) -> AsyncIterator[bytes]:
        await asyncio.sleep(1.0)
        yield whole(200, WHOLE)

    async with FakeEngine(late) as engine, proxies(engine.url, tmp_path) as proxy, boss() as admin:
        opened = [await proxy.open(admin, f"rollout-{number}") for number in range(4)]
        async with httpx.AsyncClient(timeout=30) as agent:
            url = f"http://127.0.0.1:{proxy.port}/v1/chat/completions"
            calls = [
                asyncio.ensure_future(agent.post(url, json=CHAT, headers={"x-api-key": one["api_key"]}))
                for one in opened
            ]
            async with asyncio.timeout(10):
                while len(engine.calls) < 4:
                    await asyncio.sleep(0.01)
            proxy.process.send_signal(signal.SIGTERM)
            assert [got.status_code for got in await asyncio.gather(*calls)] == [200] * 4
        assert await proxy.ended() == 0
        assert all(len(proxy.calls(one["journal"])) == 1 for one in opened)


async def test_a_worker_that_is_killed_under_load_comes_back_with_its_sessions(tmp_path: Path) -> None:
    """Agents repeat a call that broke off, as their libraries do; their keys go on opening their sessions."""
    async with FakeEngine(replays(STREAM)) as engine, proxies(engine.url, tmp_path) as proxy, boss() as admin:
        opened = [await proxy.open(admin, f"rollout-{number}") for number in range(6)]
        closed = await proxy.open(admin, "over")
        await admin.delete(f"{proxy.admin}/sessions/{closed['session']}")
        await admin.post(f"{proxy.admin}/sessions/{opened[0]['session']}/policy", json={"version": "step-9"})
        await admin.post(f"{proxy.admin}/sessions/{opened[1]['session']}/policy", json={"version": "step-9"})
        await admin.post(f"{proxy.admin}/sessions/default/policy", json={"version": "step-8"})
        kept = [{path.parent.name for path in journals_of(pid)} for pid in proxy.workers()]
        answered, broken, over = dict.fromkeys(range(6), 0), dict.fromkeys(range(6), 0), asyncio.Event()

        async def rollout(number: int) -> None:
            headers = {"x-api-key": opened[number]["api_key"]}
            async with httpx.AsyncClient(timeout=30, headers=headers) as agent:
                while not over.is_set():
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
        await until(lambda: any("worker 1 is up again" in line for line in proxy.said), rollouts)
        before = dict(answered)
        await until(lambda: all(answered[number] > before[number] for number in range(6)), rollouts)
        over.set()
        await asyncio.gather(*rollouts)
        spared = [number for number in range(6) if f"rollout-{number}" in kept[0]]
        assert len(spared) == 3 and not any(broken[number] for number in spared), "the other worker's never noticed"
        assert all(broken[number] <= 3 for number in range(6)), "a connection waits until its worker is back"
        for number, one in enumerate(opened):
            calls = proxy.calls(one["journal"])
            assert answered[number] <= len(calls) <= answered[number] + broken[number]
            assert len({call.metadata["call"] for call in calls}) == len(calls)
            assert calls[-1].metadata["policy_version"] == ("step-9" if number < 2 else None)
            state = (await admin.get(f"{proxy.admin}/sessions/{one['session']}")).json()
            assert (state["first_call"] > 0) is (number not in spared) and not state["closed"]
            assert (await admin.delete(f"{proxy.admin}/sessions/{one['session']}")).status_code == 200
        assert closed["api_key"] and (await admin.get(f"{proxy.admin}/sessions/over")).status_code == 404
        assert any(f"worker 1 (process {killed}) died (killed by SIGKILL)" in line for line in proxy.said)
        name = next(name for name in ("a", "b", "c") if zlib.crc32(name.encode()) % 2)
        async with httpx.AsyncClient() as agent:
            url = f"http://127.0.0.1:{proxy.port}/s/{name}/v1/chat/completions"
            assert (await agent.post(url, json=CHAT)).status_code == 200
        (call,) = proxy.calls(tmp_path / name / "trajectory/llm_trajectory.jsonl")
        assert call.metadata["policy_version"] == "step-8", "the default's was told to the new worker too"


BODY = {**CHAT, "stream": True}


async def until(holds: Callable[[], bool], others: list[asyncio.Future[None]]) -> None:
    """While the others go on."""
    async with asyncio.timeout(60):
        while not holds():
            assert not any(one.done() for one in others), [one.exception() for one in others if one.done()]
            await asyncio.sleep(0.02)


async def test_a_worker_that_dies_again_and_again_ends_the_proxy_with_a_sentence(tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, proxies(engine.url, tmp_path) as proxy, boss() as admin:
        opened = [await proxy.open(admin, f"rollout-{number}") for number in range(4)]
        async with httpx.AsyncClient() as agent:
            for one in opened:
                url = f"http://127.0.0.1:{proxy.port}/v1/chat/completions"
                assert (await agent.post(url, json=CHAT, headers={"x-api-key": one["api_key"]})).status_code == 200
        seen = set(proxy.workers())
        for time in range(3):
            second = max(proxy.workers())
            os.kill(second, signal.SIGKILL)
            if time < 2:
                async with asyncio.timeout(30):
                    while sum("is up again" in line for line in proxy.said) <= time:
                        await asyncio.sleep(0.02)
                seen |= set(proxy.workers())
        assert await proxy.ended() == 1
        assert any("worker 1 died 3 times within 60 s" in line and "start it again" in line for line in proxy.said)
        assert all(len(proxy.calls(one["journal"])) == 1 for one in opened)
        assert not any(Path(f"/proc/{pid}").exists() for pid in seen)


async def test_a_front_without_descriptors_waits_for_some_and_burns_nothing(tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, proxies(engine.url, tmp_path) as proxy:
        pid, url = proxy.process.pid, f"http://127.0.0.1:{proxy.port}/v1/chat/completions"
        usual = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        highest = max(int(one.name) for one in Path(f"/proc/{pid}/fd").iterdir())
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 1, usual[1]))
        async with httpx.AsyncClient(timeout=30) as agent:
            calls = [asyncio.ensure_future(agent.post(url, json=CHAT)) for _ in range(highest + 8)]
            await asyncio.sleep(0.5)
            before = processor_ticks(pid)
            await asyncio.sleep(1.0)
            spent = processor_ticks(pid) - before
            resource.prlimit(pid, resource.RLIMIT_NOFILE, usual)
            answers_ = [got.status_code for got in await asyncio.gather(*calls)]
        assert answers_ == [200] * len(calls)
        assert spent < 40, "of 100 a second: a loop that asks again at once takes all of them"
        assert sum("no more connections can be taken (Too many open files)" in line for line in proxy.said) == 1


def processor_ticks(pid: int) -> int:
    """Hundredths of a second that a process computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def test_workers_end_when_the_front_is_killed(tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, proxies(engine.url, tmp_path) as proxy:
        workers = proxy.workers()
        assert len(workers) == 2
        proxy.process.kill()
        async with asyncio.timeout(20):
            while any(Path(f"/proc/{pid}").exists() for pid in workers):
                await asyncio.sleep(0.05)


async def test_a_journal_that_another_process_writes_is_said_once(tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, proxies(engine.url, tmp_path):
        command = [sys.executable, "-m", "proxy", "--upstream", engine.url, "--out", str(tmp_path), "--port", "0"]
        second = await asyncio.create_subprocess_exec(
            *command, "--workers", "2", stderr=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
        )
        _, said = await asyncio.wait_for(second.communicate(), 30)
        assert second.returncode == 2 and said.decode().count("a journal has one writer") == 1


async def test_admin_routes_of_workers_have_a_key_where_none_was_given(tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, proxies(engine.url, tmp_path, key=None) as proxy:
        async with httpx.AsyncClient(timeout=30) as client:
            body = {"name": "mine", "journal": str(tmp_path / "mine.jsonl")}
            assert (await client.post(f"{proxy.admin}/sessions", json=body)).status_code == 401
            client.headers["authorization"] = f"Bearer {proxy.made_key}"
            assert (await client.post(f"{proxy.admin}/sessions", json=body)).status_code == 201


@pytest.mark.parametrize(("number", "how"), [(9, "killed by SIGKILL"), (40, "killed by signal 40")])
async def test_how_a_worker_ended_is_said_of_every_signal(number: int, how: str, tmp_path: Path) -> None:
    worker = Worker(0, 0, Settings(upstream=["http://127.0.0.1:9"]), tmp_path / "0.sock")
    worker.start()
    assert worker.pid is not None
    os.kill(worker.pid, number)
    assert await asyncio.to_thread(worker.ended) == how
    worker.channel.close()


def test_whose_a_request_is() -> None:
    head = (
        b"POST /s/task-1/v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer  k1\r\nX-API-Key: k2\r\n\r\n"
    )
    assert whose(head + b'{"authorization": "Bearer no"}') == (("k1", "k2"), "task-1")
    assert whose(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n") == ((), None)
    assert whose(b"\x16\x03\x01 garbage") == ((), None)


def test_the_directory_keeps_a_name_in_its_worker() -> None:
    directory = Directory(3)
    assert [directory.least() for _ in range(1)] == [2], "the first has the default already"
    directory.opened(Opened(2, "s-1", "key", "one", {}))
    assert directory.of(whose(b"POST /v1/x HTTP/1.1\r\nx-api-key: key\r\n\r\n")) == 2
    assert directory.of_name("one") == directory.of_name("s-1") == 2
    assert directory.of_name("default") == 0 and directory.least() == 1


def test_metrics_are_added_up() -> None:
    one = '# TYPE a counter\na_total{x="1"} 2.0\na_created{x="1"} 50.0\n'
    two = '# TYPE a counter\na_total{x="1"} 3.0\na_total{x="2"} 1.0\na_created{x="1"} 40.0\n'
    assert added_up([one, two]) == ('# TYPE a counter\na_total{x="1"} 5.0\na_created{x="1"} 40.0\na_total{x="2"} 1.0\n')


def test_of_two_sessions_of_one_name_the_directory_knows_the_first_by_it() -> None:
    directory = Directory(2)
    directory.opened(Opened(1, "s-1", "key-1", "same", {}))
    directory.opened(Opened(0, "s-2", "key-2", "same", {}))
    assert directory.of_name("same") == directory.of_name("s-1") == 1 and directory.of_name("s-2") == 0
    directory.set_version("s-2", "same", "7")
    directory.set_version("s-9", "made-by-address", "8")
    assert [one.fields for one in directory.of_worker(0)] == [{"policy_version": "7"}]
    assert directory.versions == {"made-by-address": "8"}
    directory.closed("s-1", "same")
    directory.closed("s-9", "made-by-address")
    assert directory.of_name("same") == 0 and directory.versions == {} and directory.of_worker(1) == []


async def test_a_worker_that_dies_before_the_first_connection_is_started_again(tmp_path: Path) -> None:
    """Between the moment when all are ready and the one when the port is open."""
    settings = Settings(upstream=["http://127.0.0.1:9"], out=tmp_path / "out", probe=False, workers=1)
    listening = bind(["127.0.0.1"], 0)
    worker = Worker(0, int(listening[0].getsockname()[1]), settings, tmp_path / "0.sock")
    front = Front([worker], listening)
    front.start()
    try:
        async with asyncio.timeout(30):
            await worker.up.wait()
            first = worker.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            while worker.up.is_set():
                await asyncio.sleep(0.01)
            front.open()
            async with httpx.AsyncClient(timeout=30) as agent:
                got = await agent.get(f"http://127.0.0.1:{worker.port}/health")
        assert got.status_code == 200 and worker.pid != first
    finally:
        await front.close()
        worker.stop()
        worker.ended()
