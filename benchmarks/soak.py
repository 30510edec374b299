"""Endurance: sessions of mixed dialects, clients that leave, an engine that misbehaves; nothing may be left behind.

    python -m benchmarks.soak [--seconds 600] [--sessions 256]

A real proxy process stands between clients and a double of vLLM's HTTP side. Each call is told in its own text what
will become of it, so afterwards three books are compared call by call: what each client saw, what the engine did, what
the journals say (ids and logprobs one by one). Memory, descriptors and tasks are weighed after a first part of the run,
when everything has happened once, and at the end, both times with every session closed. Exit 1 on any disagreement.
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
from benchmarks.endurance.client import Agent, Heard
from benchmarks.endurance.engine import Engine
from benchmarks.endurance.ledger import Books, reconcile, table
from benchmarks.endurance.server import ProxyProcess

#: Of the whole time, the part after which things are weighed for the first time.
WARMUP = 0.3
#: Calls of one session.
CALLS = (1, 40)
#: Seconds between two calls of a session, at most.
THINKS = 2.0
SLACK = 0.10


@dataclass(frozen=True, slots=True)
class Weight:
    """What the proxy holds while nothing is asked of it."""

    memory: int
    descriptors: int
    tasks: int


@dataclass
class Run:
    proxy: ProxyProcess
    engine: Engine
    folder: Path
    heard: list[Heard] = field(default_factory=list)
    journals: list[tuple[str, Path]] = field(default_factory=list)
    told: Counter[str] = field(default_factory=Counter)
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
    """Everything that was wrong; prints the figures."""
    began = time.monotonic()
    timeouts = ("--first-byte-timeout", f"{2 * patience:g}", "--idle-timeout", f"{patience:g}")
    async with Engine() as engine, ProxyProcess(engine.url, folder / "captures", *timeouts) as proxy:
        run = Run(proxy, engine, folder)
        dice = random.Random(seed)
        await one_of_each(run, dice)
        await part(run, dice, sessions, seconds * WARMUP)
        before = await weigh(proxy)
        print(f"after {time.monotonic() - began:.0f} s: {len(run.heard):,} calls, {said(before)}", flush=True)
        await part(run, dice, sessions, seconds * (1 - WARMUP))
        after = await weigh(proxy)
        figures = await proxy.metrics()
        cpu = proxy.seconds()
        code = await proxy.stop()
        log = proxy.said()
    books = reconcile(run.heard, engine.ledger, run.journals)
    wrong = run.wrong + books.disagreements + left_behind(before, after, figures, slack)
    wrong += counts(run, books, figures)
    if code != 0 or "Traceback" in log:
        wrong.append(f"the proxy ended with {code}; the last it said: {log[-2000:]}")
    report(run, books, before, after, wrong, time.monotonic() - began, cpu)
    return wrong


async def one_of_each(run: Run, dice: random.Random) -> None:
    """Everything happens once in every dialect and form, however short the run is."""

    async def one(dialect: str, streams: bool) -> None:
        name = run.name()
        await session(run, name, iter(every(dice, name, dialect, streams)))

    await asyncio.gather(*(one(dialect, streams) for dialect in DIALECTS for streams in (True, False)))


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
    """Opened, used by one agent, closed; its last state must say what its agent knows."""
    journal = run.folder / "sessions" / name / "llm_trajectory.jsonl"
    opened = await run.proxy.open(name, journal)
    run.journals.append((name, journal))
    agent = Agent(opened.port, opened.key, run.engine)
    heard = []
    for call in calls:
        heard.append(await agent.make(call))
        if dice is not None:
            await asyncio.sleep(dice.random() * THINKS)
    agent.hang_up()
    state = await run.proxy.close(opened.session)
    recorded = sum(1 for one in heard if one.call.seen.outcome is not None)
    if (state["calls"], state["in_flight"], state["journal_failed"]) != (recorded, 0, None):
        run.wrong.append(f"{name}: its agent made {recorded} calls, its last state says {state}")
    run.told["calls"] += state["calls"]
    run.told["complete"] += state["complete_calls"]
    run.heard += heard


async def weigh(proxy: ProxyProcess) -> Weight:
    """When it has come to rest: connections to the engine are kept for three seconds."""
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
        wrong.append(f"the proxy's own figures do not come to rest: {figures}")
    return wrong


def counts(run: Run, books: Books, figures: dict[str, float]) -> list[str]:
    """The sums that each side keeps for itself: the sessions' states and the metrics against the journals."""
    wrong = []
    if run.told["calls"] != books.lines or run.told["complete"] != books.complete:
        wrong.append(f"the sessions told of {run.told}, the journals hold {books.lines} and {books.complete} complete")
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


def said(weight: Weight) -> str:
    return f"{weight.memory / 2**20:.1f} MiB, {weight.descriptors} descriptors, {weight.tasks} tasks"


def report(run: Run, books: Books, before: Weight, after: Weight, wrong: list[str], seconds: float, cpu: float) -> None:
    print(f"\nwhat happened to {books.calls:,} calls of {run.begun:,} sessions:\n{table(books)}")
    print("recorded as: " + ", ".join(f"{name} {count:,}" for name, count in sorted(books.outcomes.items())))
    for sentence in wrong[:40]:
        print(f"WRONG  {sentence}")
    if len(wrong) > 40:
        print(f"WRONG  and {len(wrong) - 40:,} more")
    verdict = "every book agrees" if not wrong else f"{len(wrong):,} disagreements"
    print(
        f"soak: {seconds:.0f} s, {run.begun:,} sessions, {books.calls:,} calls by clients, {books.attempts:,} requests "
        f"at the engine, {books.lines:,} lines in journals ({books.complete:,} complete, {books.ids:,} ids compared), "
        f"{cpu:.0f} s CPU; held {said(before)} -> {said(after)}: {verdict}"
    )


if __name__ == "__main__":
    main()
