"""A proxy beside the code under test, and the calls its journal holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import certifi
import httpx
import pytest

from capture.journal.call import Call
from capture.journal.journal import JournalReader
from proxy import Proxy, Settings, serve


@pytest.fixture(scope="session")
def one_certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    first = certifi.contents().partition("-----END CERTIFICATE-----")
    path = tmp_path_factory.mktemp("certificates") / "one.pem"
    path.write_text(first[0] + first[1] + "\n")
    return path


@pytest.fixture(autouse=True)
def few_certificates(one_certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One certificate to trust: each client of a test would load all 140, in 35 ms, and none leaves this machine."""
    monkeypatch.setenv("SSL_CERT_FILE", str(one_certificate))


class Bench:
    """A running proxy, a client that reaches it, and its journal."""

    def __init__(self, proxy: Proxy, client: httpx.AsyncClient, out: Path) -> None:
        self.proxy = proxy
        self.client = client
        self.journal = out / "default/trajectory/llm_trajectory.jsonl"

    def calls(self) -> list[Call]:
        reader = JournalReader(self.journal)
        calls = list(reader)
        assert reader.problems == []
        return calls

    def call(self) -> Call:
        calls = self.calls()
        assert len(calls) == 1
        return calls[0]

    async def recorded(self, count: int = 1, seconds: float = 5) -> list[Call]:
        """The calls, once there are `count` of them: for calls whose agent is gone."""
        async with asyncio.timeout(seconds):
            # A line that is being written is no problem of a journal.
            while not self.journal.exists() or self.journal.read_bytes().count(b"\n") < count:
                await asyncio.sleep(0.01)
        return self.calls()


Started = Callable[..., AbstractAsyncContextManager[Bench]]


@pytest.fixture
def started(tmp_path: Path) -> Started:
    """`async with started(upstream, **settings) as bench`: a stand-alone proxy in front of `upstream`."""

    @asynccontextmanager
    async def start(*upstream: str, **options: Any) -> AsyncIterator[Bench]:
        out = options.pop("out", tmp_path / "captures")
        options.setdefault("probe", False)
        options.setdefault("grace", 5.0)
        async with (
            serve(Settings(upstream=list(upstream), out=out, **options)) as proxy,
            httpx.AsyncClient(base_url=proxy.base_url, timeout=30) as client,
        ):
            yield Bench(proxy, client, out)

    return start
