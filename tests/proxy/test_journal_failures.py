"""What a disk does to a journal costs the record, is said aloud, and never costs the agent its answer."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture.journal.journal import JournalReader
from proxy import Settings, SettingsError, serve
from proxy.errors import SessionError
from proxy.sessions.session import INLINE_LINE
from tests.proxy.conftest import Bench, Started
from tests.proxy.fake_engine import FakeEngine, Seen, replays, streams, transcript, whole
from tests.proxy.test_kill import start_proxy

CHAT: dict[str, Any] = {"model": "my-policy", "messages": [{"role": "user", "content": "hi"}]}
PLAIN, STREAM = "vllm/chat-plain-length-nostream", "vllm/chat-plain-length-stream"


def state(bench: Bench) -> dict[str, Any]:
    session = bench.proxy.sessions.default
    assert session is not None
    return session.state()


async def answered(bench: Bench, **more: Any) -> None:
    got = await bench.client.post("/chat/completions", json={**CHAT, **more})
    assert got.status_code == 200 and got.json()["choices"]


@pytest.mark.parametrize("trouble", ["folder removed", "file removed", "file moved", "file replaced"])
async def test_a_journal_that_is_no_longer_at_its_path_is_reported(
    started: Started, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        await answered(bench)
        assert state(bench)["journal_failed"] is None
        if trouble == "folder removed":
            bench.journal.unlink()
            bench.journal.parent.rmdir()
        elif trouble == "file removed":
            bench.journal.unlink()
        elif trouble == "file moved":
            bench.journal.rename(bench.journal.with_suffix(".old"))
        else:
            new_path = bench.journal.with_suffix(".new")
            new_path.write_bytes(bench.journal.read_bytes())
            new_path.replace(bench.journal)
        await answered(bench)
        await answered(bench)
        assert "deleted or moved" in state(bench)["journal_failed"]
        assert state(bench)["calls"] == 3
    assert [record.levelname for record in caplog.records if record.name == "proxy"] == ["ERROR"], (
        "once, not for each call"
    )


async def test_a_disk_that_fills_up_mid_line_keeps_the_lines_before_and_takes_those_after(tmp_path: Path) -> None:
    """A limit on the size of files replaces the disk: the kernel writes a part of a line, then says no."""
    async with FakeEngine(replays(PLAIN)) as engine:
        proxy, base_url = start_proxy(engine.url, tmp_path)
        journal = tmp_path / "default/trajectory/llm_trajectory.jsonl"
        try:
            async with httpx.AsyncClient(base_url=base_url) as client:
                assert (await client.post("/chat/completions", json=CHAT)).status_code == 200
                size = journal.stat().st_size
                _, hard = resource.prlimit(proxy.pid, resource.RLIMIT_FSIZE)
                resource.prlimit(proxy.pid, resource.RLIMIT_FSIZE, (size + size // 2, hard))
                for body in (CHAT, {**CHAT, "stream": True}):
                    assert (await client.post("/chat/completions", json=body)).status_code == 200
                assert journal.stat().st_size == size, "the part of a line is taken back"
                resource.prlimit(proxy.pid, resource.RLIMIT_FSIZE, (hard, hard))
                assert (await client.post("/chat/completions", json=CHAT)).status_code == 200
        finally:
            proxy.send_signal(signal.SIGTERM)
            _, stderr = proxy.communicate(timeout=20)
    reader = JournalReader(journal)
    assert [call.number for call in reader] == [0, 3] and reader.problems == []
    assert "cannot write the journal" in stderr and "Traceback" not in stderr
    assert "ERROR stopped: 4 calls, 4 complete, but 2 of them are in no journal" in stderr and "recorded," not in stderr
    assert proxy.returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
async def test_a_full_tmpfs_loses_the_record_not_the_call(started: Started, tmp_path: Path) -> None:
    out = tmp_path / "small"
    out.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(out)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this machine may not mount a tmpfs")
    try:
        async with FakeEngine(replays(PLAIN)) as engine, started(engine.url, out=out) as bench:
            for _ in range(30):
                await answered(bench)
            assert "No space left" in state(bench)["journal_failed"]
            calls = bench.calls()
            assert state(bench)["unrecorded"] == 30 - len(calls)
            assert 1 < len(calls) < 30 and all(call.capture is not None and call.capture.complete for call in calls)
    finally:
        subprocess.run(["umount", "-l", str(out)], check=True)


async def test_a_folder_that_cannot_be_written_is_one_sentence_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = Settings(upstream=["http://127.0.0.1:1/v1"], out=tmp_path / "file" / "out", probe=False)
    with pytest.raises(SessionError, match=r"cannot open the journal .*give a folder"):
        async with serve(settings):
            pass
    async with serve(replace(settings, out=tmp_path / "good")) as proxy:
        assert proxy.port


async def test_a_start_that_fails_gives_its_journal_back(tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine:
        with pytest.raises(SettingsError, match="cannot listen"):
            async with serve(Settings(upstream=[engine.url], out=tmp_path, port=engine.port, probe=False)):
                pass
        async with serve(Settings(upstream=[engine.url], out=tmp_path, probe=False)) as proxy:
            assert proxy.port


async def test_a_second_proxy_on_a_journal_is_refused_and_the_first_continues(started: Started, tmp_path: Path) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        await answered(bench)
        second = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "proxy", "--upstream", engine.url, "--out", str(tmp_path / "captures"), "--port", "0",
            "--no-probe", stderr=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        _, stderr = await asyncio.wait_for(second.communicate(), 20)
        assert second.returncode == 2 and b"one writer" in stderr and len(stderr.splitlines()) == 1
        await answered(bench)
        assert len(bench.calls()) == 2


async def test_a_journal_continues_after_kill_9_with_its_torn_line_left_out_and_its_numbers_unique(
    started: Started, tmp_path: Path
) -> None:
    async with FakeEngine(replays(PLAIN)) as engine:
        async with started(engine.url) as bench:
            for _ in range(3):
                await answered(bench)
            written = bench.journal.read_bytes()
        torn = written[: len(written) - 700]
        bench.journal.write_bytes(torn)
        async with started(engine.url) as bench:
            await answered(bench)
    data = bench.journal.read_bytes()
    assert data.startswith(torn + b"\n"), "nothing that was written is touched"
    reader = JournalReader(bench.journal)
    calls = list(reader)
    assert len(calls) == 3 and [problem.line for problem in reader.problems] == [2]
    assert len({call.number for call in calls}) == 3


@pytest.mark.parametrize("fsync", [False, True])
async def test_long_and_short_lines_are_whole_whatever_ends_at_once(started: Started, fsync: bool) -> None:
    """Lines beyond `INLINE_LINE` are written by other threads: still one at a time, in the order the calls ended."""
    _, recorded = transcript(PLAIN)

    async def answer(seen: Seen) -> Any:
        yield whole(200, recorded)

    async with FakeEngine(answer) as engine, started(engine.url, fsync=fsync) as bench:
        sizes = [(number * 7919) % 5 * INLINE_LINE // 3 for number in range(60)]
        await asyncio.gather(*(answered(bench, user=str(n), pad="x" * size) for n, size in enumerate(sizes)))
        calls = bench.calls()
    assert sorted(int(call.request_body["user"]) for call in calls) == list(range(60))
    assert all(len(call.request_body["pad"]) == sizes[int(call.request_body["user"])] for call in calls)
    assert all(call.capture is not None and call.capture.complete for call in calls)


async def test_a_call_that_is_stopped_while_its_line_is_written_keeps_its_line(tmp_path: Path) -> None:
    """The line of a call whose session is given up is neither lost nor torn."""
    async with FakeEngine(streams(transcript(STREAM)[1])) as engine:
        async with serve(Settings(upstream=[engine.url], out=tmp_path, probe=False, grace=0.1)) as proxy:
            session = proxy.sessions.default
            assert session is not None
            append = session.journal.append

            def slowly(line: bytes) -> None:
                import time

                time.sleep(0.4)
                append(line)

            session.journal.append = slowly  # type: ignore[method-assign]
            async with httpx.AsyncClient(base_url=proxy.base_url) as client:
                body = {**CHAT, "stream": True, "pad": "x" * INLINE_LINE}
                sending = [asyncio.ensure_future(client.post("/chat/completions", json=body)) for _ in range(3)]
                while session.in_flight < 3:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.1)
                await proxy.close_session(session.id)
                await asyncio.gather(*sending, return_exceptions=True)
    reader = JournalReader(tmp_path / "default/trajectory/llm_trajectory.jsonl")
    assert len(list(reader)) == 3 and reader.problems == []


async def test_a_line_that_cannot_be_written_says_so_in_the_metrics(started: Started) -> None:
    async with FakeEngine(replays(PLAIN)) as engine:
        async with started(engine.url, admin_port=0, admin_key="admin") as bench:
            bench.journal.unlink()
            await answered(bench)
            async with httpx.AsyncClient(headers={"authorization": "Bearer admin"}) as admin:
                result = (await admin.get(f"{bench.proxy.admin_url}/metrics")).text
                shown = (await admin.get(f"{bench.proxy.admin_url}/sessions/default")).json()
    assert "capture_journal_failures_total 1.0" in result
    assert json.dumps(shown["journal_failed"])
