"""A crowd of agents that call a proxy without a pause, and what must hold of it however the proxy was treated."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.endurance.calls import DIALECTS, Call
from benchmarks.endurance.client import Agent, ClientReport
from benchmarks.endurance.engine import Engine
from benchmarks.endurance.ledger import Books
from benchmarks.endurance.server import ProxyProcess
from capture.journal.call import Call as Line
from capture.journal.journal import JournalReader

AGENTS = 24


class Broken(Exception):
    """Something that must hold did not."""


class Crowd:
    """Agents that call without a pause, each in a session of its own, named by its path on an open proxy."""

    def __init__(self, engine: Engine, out: Path, agents: int = AGENTS, seed: int = 6) -> None:
        self.engine = engine
        self.out = out
        self.reports: list[ClientReport] = []
        self.names = [f"c{number}" for number in range(agents)]
        self._made = dict.fromkeys(self.names, 0)
        self._dice = random.Random(seed)

    @property
    def journals(self) -> list[tuple[str, Path]]:
        paths = [(name, self.out / name / "trajectory" / "llm_trajectory.jsonl") for name in self.names]
        return [(name, path) for name, path in paths if path.exists()]

    async def finished(self) -> None:
        """Until each has ended the call that it is in, and makes no more."""
        self._over.set()
        await asyncio.gather(*self._working)

    @asynccontextmanager
    async def at_work(self, proxy: ProxyProcess) -> AsyncIterator[None]:
        """While this lasts they call; each then ends the call that it is in. A proxy that is gone ends them all."""
        self._over = asyncio.Event()
        self._working = [asyncio.ensure_future(self._agent(name, proxy.port_of(name))) for name in self.names]
        try:
            yield
        finally:
            await self.finished()

    async def _agent(self, name: str, port: int) -> None:
        agent = Agent(port, "none", self.engine, f"/s/{name}")
        while not self._over.is_set():
            report = await agent.make(self._call(name))
            self.reports.append(report)
            if report.client == "cut":
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                except OSError:
                    break
        agent.hang_up()

    def _call(self, name: str) -> Call:
        number = self._made[name]
        self._made[name] += 1
        dialect, streams = self._dice.choice(list(DIALECTS)), self._dice.random() < 0.7
        return Call(f"{name}.{number}", dialect, "plain", streams, self._dice.randint(4, 40))

    async def until_served(self, calls: int) -> None:
        async with asyncio.timeout(60):
            while served(self.engine) < calls:  # noqa: ASYNC110 (the ledger has no bell)
                await asyncio.sleep(0.02)


def lines(crowd: Crowd) -> Iterator[Line]:
    """Every line of every journal of theirs."""
    for _, path in crowd.journals:
        yield from JournalReader(path)


def served(engine: Engine) -> int:
    """Calls that it answered whole."""
    return sum(report.whole for report in engine.ledger.values())


def agree(books: Books) -> None:
    if books.disagreements:
        raise Broken("; ".join(books.disagreements[:5]) + f" ({len(books.disagreements)} in all)")


def must(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


def no_traceback(proxy: ProxyProcess) -> None:
    must("Traceback" not in proxy.log_text(), f"the proxy's log has a traceback: {proxy.log_text()[-3000:]}")
