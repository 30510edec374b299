"""Endurance: sessions of mixed dialects, clients that disconnect, an engine that misbehaves; nothing may leak.

    python -m benchmarks.soak [--seconds 600] [--sessions 256]

A real proxy process runs between clients and a double of vLLM's HTTP side. The prompt of each call says what is to
happen to it. Afterwards three records are compared call by call: what each client saw, what the engine did, and what
the journals hold (ids and logprobs one by one). Memory, descriptors and tasks are measured after the first part of the
run, when everything has happened once, and at the end, both times with all sessions closed. Exit 1 on any
disagreement.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.endurance.calls import DIALECTS, Call, drawn, every
from benchmarks.endurance.client import Agent, ClientReport
from benchmarks.endurance.engine import Engine
from benchmarks.endurance.ledger import Books, reconcile, table
from benchmarks.endurance.server import ProxyProcess

#: Share of the run after which the proxy is measured for the first time.
WARMUP = 0.3
#: Calls of one session.
CALLS = (1, 40)
#: Seconds between two calls of a session, at most.
THINKS = 2.0
SLACK = 0.10


@dataclass(frozen=True, slots=True)
class Weight:
    """What the idle proxy uses; memory in bytes."""

    memory: int
    descriptors: int
    tasks: int


@dataclass
class Run:
    proxy: ProxyProcess
    engine: Engine
    folder: Path
    reports: list[ClientReport] = field(default_factory=list)
    journals: list[tuple[str, Path]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    begun: int = 0

    def name(self) -> str:
        self.begun += 1
        return f"s{self.begun}"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--seconds", type=float, default=600)
    ask.add_argument("--sessions", type=int, default=256, help="that are open at any time")
    ask.add_argument("--seed", type=int, default=6)
    ask.add_argument("--patience", type=float, default=20, help="seconds that the proxy waits for a silent engine")
    ask.add_argument(
        "--slack-mib", type=float, default=0,
        help="memory that may be more at the end besides the 10 %%: in a short run the allocator is not yet full",
    )  # fmt: skip
    ask.add_argument("--keep", type=Path, help="a folder for the journals; by default they are removed at the end")
    options = ask.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        failed = asyncio.run(
            soak(folder, options.seconds, options.sessions, options.seed, options.patience, options.slack_mib)
        )
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(1 if failed else 0)


async def soak(folder: Path, seconds: float, sessions: int, seed: int, patience: float, slack: float) -> list[str]:
    """Returns everything that was wrong; prints the figures."""
    began = time.monotonic()
    timeouts = ("--first-byte-timeout", f"{2 * patience:g}", "--idle-timeout", f"{patience:g}")
    async with Engine() as engine, ProxyProcess(engine.url, folder / "captures", *timeouts) as proxy:
        run = Run(proxy, engine, folder)
        dice = random.Random(seed)
        await one_of_each(run, dice)
        await part(run, dice, sessions, seconds * WARMUP)
        before = await weigh(proxy)
        print(f"after {time.monotonic() - began:.0f} s: {len(run.reports):,} calls, {shown(before)}", flush=True)
        await part(run, dice, sessions, seconds * (1 - WARMUP))
        after = await weigh(proxy)
        figures = await proxy.metrics()
        cpu = proxy.seconds()
        code = await proxy.stop()
        log = proxy.log_text()
    books = reconcile(run.reports, engine.ledger, run.journals)
    wrong = run.wrong + books.disagreements + left_behind(before, after, figures, slack)
    wrong += counts(run, books, figures)
    if code != 0 or "Traceback" in log:
        wrong.append(f"the proxy ended with {code}; the end of its log: {log[-2000:]}")
    report(run, books, before, after, wrong, time.monotonic() - began, cpu)
    return wrong


async def one_of_each(run: Run, dice: random.Random) -> None:
    """Everything happens once in every dialect and form, however short the run is."""

    async def each(dialect: str, streams: bool) -> None:
        name = run.name()
        await session(run, name, iter(every(dice, name, dialect, streams)))

    await asyncio.gather(*(each(dialect, streams) for dialect in DIALECTS for streams in (True, False)))


async def part(run: Run, dice: random.Random, sessions: int, seconds: float) -> None:
    """`sessions` at a time for `seconds`, each followed by another; returns when the last has closed."""
    until = time.monotonic() + seconds

    async def one_after_another() -> None:
        await asyncio.sleep(dice.random() * min(THINKS, seconds / 4))
        while time.monotonic() < until:
            name = run.name()
            await session(run, name, by_chance(dice, name, until), dice)

    await asyncio.gather(*(one_after_another() for _ in range(sessions)))


def by_chance(dice: random.Random, name: str, until: float) -> Iterator[Call]:
    for number in range(dice.randint(*CALLS)):
        if time.monotonic() < until:
            yield drawn(dice, name, number)


async def session(run: Run, name: str, calls: Iterator[Call], dice: random.Random | None = None) -> None:
    """Opened, used by one agent, closed; its last state must agree with its agent."""
    journal = run.folder / "sessions" / name / "llm_trajectory.jsonl"
    opened = await run.proxy.open(name, journal)
    run.journals.append((name, journal))
    agent = Agent(opened.port, opened.key, run.engine)
    reports = []
    for call in calls:
        reports.append(await agent.make(call))
        if dice is not None:
            await asyncio.sleep(dice.random() * THINKS)
    agent.hang_up()
    state = await run.proxy.close(opened.session)
    recorded = sum(1 for report in reports if report.call.seen.outcome is not None)
    if (state["calls"], state["in_flight"], state["journal_failed"]) != (recorded, 0, None):
        run.wrong.append(f"{name}: its agent made {recorded} calls, its last state says {state}")
    run.counts["calls"] += state["calls"]
    run.counts["complete"] += state["complete_calls"]
    run.reports += reports


async def weigh(proxy: ProxyProcess) -> Weight:
    """Measured when idle: connections to the engine are kept for three seconds."""
    await asyncio.sleep(4)
    tasks = 0
    for _ in range(50):
        figures = await proxy.metrics()
        tasks = int(figures["capture_tasks"])
        if figures["capture_in_flight"] == 0 and figures["capture_sessions"] == 1:
            break
        await asyncio.sleep(0.1)
    return Weight(proxy.memory(), proxy.descriptors(), tasks)


def left_behind(before: Weight, after: Weight, figures: dict[str, float], slack: float) -> list[str]:
    wrong = []
    for name in ("memory", "descriptors", "tasks"):
        was, now = getattr(before, name), getattr(after, name)
        besides = {"memory": slack * 2**20, "descriptors": 1, "tasks": 0}[name]
        if now > was * (1 + SLACK) + besides:
            wrong.append(f"{name}: {now:,} at the end, {was:,} before")
    if figures["capture_in_flight"] or figures["capture_sessions"] != 1 or figures["capture_journal_queue"]:
        wrong.append(f"the proxy's own figures are not those of an idle proxy: {figures}")
    return wrong


def counts(run: Run, books: Books, figures: dict[str, float]) -> list[str]:
    """Compares the counts of sessions' states and of the metrics with the journals."""
    wrong = []
    if run.counts["calls"] != books.lines or run.counts["complete"] != books.complete:
        wrong.append(
            f"the sessions count {dict(run.counts)}, the journals hold {books.lines} and {books.complete} complete"
        )
    outcomes: Counter[str] = Counter()
    for name, value in figures.items():
        if name.startswith("capture_calls_total{"):
            outcomes[name.partition('outcome="')[2].partition('"')[0]] += int(value)
    if outcomes != books.outcomes:
        wrong.append(f"the metrics count {dict(outcomes)}, the journals hold {dict(books.outcomes)}")
    if figures["capture_complete_calls_total"] != books.complete or figures["capture_journal_failures_total"]:
        wrong.append(
            f"the metrics count {figures['capture_complete_calls_total']} complete, the journals {books.complete}"
        )
    return wrong


def shown(weight: Weight) -> str:
    return f"{weight.memory / 2**20:.1f} MiB, {weight.descriptors} descriptors, {weight.tasks} tasks"


def report(run: Run, books: Books, before: Weight, after: Weight, wrong: list[str], seconds: float, cpu: float) -> None:
    print(f"\nwhat happened to {books.calls:,} calls of {run.begun:,} sessions:\n{table(books)}")
    print("recorded as: " + ", ".join(f"{name} {count:,}" for name, count in sorted(books.outcomes.items())))
    for sentence in wrong[:40]:
        print(f"WRONG  {sentence}")
    if len(wrong) > 40:
        print(f"WRONG  and {len(wrong) - 40:,} more")
    verdict = "all records agree" if not wrong else f"{len(wrong):,} disagreements"
    print(
        f"soak: {seconds:.0f} s, {run.begun:,} sessions, {books.calls:,} calls by clients, {books.attempts:,} requests "
        f"at the engine, {books.lines:,} lines in journals ({books.complete:,} complete, {books.ids:,} ids compared), "
        f"{cpu:.0f} s CPU; {shown(before)} -> {shown(after)}: {verdict}"
    )


if __name__ == "__main__":
    main()
