"""A journal that is no file of its own: refused when its session is opened, at once and with a sentence."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import httpx
import pytest

from proxy import SessionError, Settings, serve
from tests.proxy.conftest import Started
from tests.proxy.fake_engine import FakeEngine, replays

PLAIN = "vllm/chat-plain-length-nostream"
CHAT = {"model": "my-policy", "messages": [{"role": "user", "content": "hi"}]}


def make(kind: str, path: Path) -> None:
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(path))
        case "link to a fifo":
            os.mkfifo(path.with_name("fifo"))
            path.symlink_to("fifo")
        case target:
            path.symlink_to(target)


KINDS = ["fifo", "folder", "socket", "link to a fifo", "/dev/null", "/dev/full", "/dev/zero"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_journal_that_is_not_a_file_is_refused_at_opening(tmp_path: Path, kind: str) -> None:
    journal = tmp_path / "llm_trajectory.jsonl"
    make(kind, journal)
    settings = Settings(upstream=["http://127.0.0.1:1/v1"], probe=False, admin_port=0)
    async with serve(settings) as proxy, httpx.AsyncClient() as admin:
        async with asyncio.timeout(5):  # a fifo without a reader blocked the whole proxy
            with pytest.raises(SessionError, match="journal"):
                await proxy.open_session("one", journal=journal)
            answer = await admin.post(
                f"{proxy.admin_url}/sessions",
                json={"name": "one", "journal": str(journal)},
                headers={"authorization": f"Bearer {proxy.settings.admin_key}"},
            )
        assert answer.status_code == 409 and str(journal) in answer.json()["error"]["message"]
        assert list(proxy.sessions) == []


@pytest.mark.parametrize("kind", ["fifo", "/dev/null", "folder"])
async def test_an_address_whose_journal_is_not_a_file_is_refused(started: Started, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "captures/evil/trajectory"
    folder.mkdir(parents=True)
    make(kind, folder / "llm_trajectory.jsonl")
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        root = bench.proxy.base_url.removesuffix("/v1")
        answer = await bench.client.post(f"{root}/s/evil/v1/chat/completions", json=CHAT)
        assert answer.status_code == 503 and "journal" in answer.json()["error"]["message"]
        assert engine.calls == []
        assert (await bench.client.post("/chat/completions", json=CHAT)).status_code == 200
