"""`kill -9` at any moment: every call whose end a client saw is in the journal, and the journal opens."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture.journal.journal import JournalReader
from tests.proxy.fake_engine import FakeEngine, replays

STREAMS = 32
BODY: dict[str, Any] = {"model": "my-policy", "messages": [{"role": "user", "content": "x"}], "stream": True}


@pytest.mark.timeout(180)
@pytest.mark.slow
async def test_no_finished_call_is_lost_to_kill_9(tmp_path: Path) -> None:
    await kill(tmp_path, rounds=4)


async def kill(tmp_path: Path, rounds: int) -> None:
    """32 concurrent streams a round, then `kill -9`; all rounds into the same journal (`make live` runs 20)."""
    ended: list[str] = []
    dice = random.Random(7)
    async with FakeEngine(replays("vllm/chat-plain-length-stream", size=300, pause=0.002)) as engine:
        for number in range(rounds):
            proxy, base_url = start_proxy(engine.url, tmp_path / "captures")
            try:
                http = httpx.AsyncClient(base_url=base_url, timeout=10, limits=httpx.Limits(max_connections=STREAMS))
                clients = [asyncio.ensure_future(client(http, f"{number}-{n}", ended)) for n in range(STREAMS)]
                await asyncio.sleep(0.5 + dice.random())
            finally:
                os.kill(proxy.pid, signal.SIGKILL)
                proxy.wait()
            for agent in clients:
                agent.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            await http.aclose()
    reader = JournalReader(tmp_path / "captures/default/trajectory/llm_trajectory.jsonl")
    recorded = {call.request_body["user"]: call for call in reader if call.outcome == "ok"}
    print(f"{rounds} kills, {len(ended)} ends seen, {len(recorded)} recorded, {len(reader.problems)} torn lines")
    assert len(ended) > rounds * STREAMS / 4, "the test must see calls end"
    assert [user for user in ended if user not in recorded] == []
    assert all(call.capture is not None and call.capture.complete for call in recorded.values())
    assert len(reader.problems) <= rounds, "at most the line that was being written when the proxy died"


def start_proxy(upstream: str, out: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    proxy = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "proxy",
            "--upstream",
            upstream,
            "--out",
            str(out),
            "--port",
            "0",
            "--no-probe",
            *options,
        ],
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert proxy.stderr is not None
    for line in proxy.stderr:
        found = re.search(r"agents: (\S+)", line)
        if found:
            return proxy, found[1]
    raise AssertionError("the proxy did not start")


async def client(http: httpx.AsyncClient, name: str, ended: list[str]) -> None:
    """Calls until the proxy is gone; notes each call whose end it saw, even where the connection broke after it."""
    number = 0
    while True:
        user = f"{name}-{number}"
        number += 1
        got = b""
        try:
            async with http.stream("POST", "/chat/completions", json={**BODY, "user": user}) as answer:
                async for data in answer.aiter_raw():
                    got += data
        except httpx.HTTPError:
            return
        finally:
            if b"data: [DONE]" in got or b'"finish_reason":"length"' in got:
                ended.append(user)
