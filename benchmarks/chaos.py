"""Chaos: kills, a full disk, a changed clock and more, done to a real proxy under load, and what must hold anyway.

    python -m benchmarks.chaos [--rounds 12] [NAME ...]

Each scenario checks what agents see, what the journals hold and what the log says. The clients, the engine double and
the comparison of their records are those of the soak. Exit 1 when anything does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from benchmarks.endurance.calls import DIALECTS, Call, named
from benchmarks.endurance.client import Agent, ClientReport
from benchmarks.endurance.crowd import AGENTS, Broken, Crowd, agree, lines, must, no_traceback, served
from benchmarks.endurance.engine import Engine
from benchmarks.endurance.ledger import reconcile
from benchmarks.endurance.server import ROOT, ProxyProcess


class CannotBe(Exception):
    """This machine cannot run a scenario; the text says what is missing."""


def unfinished(report: ClientReport) -> bool:
    return not report.finished


async def kill(folder: Path, rounds: int) -> str:
    """`kill -9` at a random moment, then another proxy on the same journals: no call whose end was seen is lost."""
    dice = random.Random(rounds)
    async with Engine(pause=0.005) as engine:
        crowd = Crowd(engine, folder / "out")
        for _ in range(rounds):
            async with ProxyProcess(engine.url, crowd.out) as proxy:
                async with crowd.at_work(proxy):
                    await crowd.until_served(served(engine) + AGENTS)
                    await asyncio.sleep(dice.random())
                    proxy.kill()
                no_traceback(proxy)
        books = reconcile(crowd.reports, engine.ledger, crowd.journals, excused=unfinished, torn=rounds)
    agree(books)
    finished = sum(report.finished for report in crowd.reports)
    must(finished > rounds * AGENTS, "too few calls ended for this to say anything")
    return (
        f"{rounds} kills, {finished:,} ends seen by clients and each in its journal, complete; {books.excused} calls "
        f"were in flight, {books.torn} lines torn"
    )


async def worker(folder: Path, rounds: int) -> str:
    """`kill -9` of a worker, of each in turn: it is restarted and its sessions continue their journals. No finished
    call is lost, and the other worker's calls are not affected."""
    dice = random.Random(rounds)
    kills = min(rounds, 4)  # each worker twice: three times in a minute end the proxy
    async with Engine(pause=0.005) as engine:
        crowd = Crowd(engine, folder / "out")
        async with ProxyProcess(engine.url, crowd.out, "--workers", "2") as proxy:
            async with crowd.at_work(proxy):
                for number in range(kills):
                    await crowd.until_served(served(engine) + AGENTS)
                    await asyncio.sleep(dice.random())
                    os.kill(proxy.workers()[0], signal.SIGKILL)  # the oldest: the other one, the next time
                    async with asyncio.timeout(30):
                        while proxy.log_text().count("is up again") <= number:  # noqa: ASYNC110 (a log cannot notify)
                            await asyncio.sleep(0.02)
                await crowd.until_served(served(engine) + 4 * AGENTS)
            code = await proxy.stop()
        no_traceback(proxy)
        books = reconcile(crowd.reports, engine.ledger, crowd.journals, excused=unfinished, torn=kills)
    agree(books)
    must(code == 0, f"exit code {code}")
    must(
        books.excused <= kills * AGENTS, f"{books.excused} calls broke off in {kills} kills of half of {AGENTS} agents"
    )
    return f"{kills} kills of two workers; {books.calls:,} calls, {books.excused} broke off, {books.torn} lines torn"


async def terminate(folder: Path, rounds: int) -> str:
    """SIGTERM under load: calls in flight finish or are recorded as aborted; each call at the engine has its line."""
    results = []
    for grace in ("20", "0.05"):
        async with Engine(pause=0.06) as engine:
            crowd = Crowd(engine, folder / f"out-{grace}")
            async with ProxyProcess(engine.url, crowd.out, "--grace", grace) as proxy, crowd.at_work(proxy):
                await crowd.until_served(2 * AGENTS)
                began = time.monotonic()
                code = await proxy.stop()
                seconds = time.monotonic() - began
            no_traceback(proxy)
            books = reconcile(crowd.reports, engine.ledger, crowd.journals, excused=unfinished)
            agree(books)
            must(code == 0, f"exit code {code}")
            must(seconds < float(grace) + 8, f"the stop took {seconds:.1f} s")
            must(books.lines == len(engine.ledger), f"{len(engine.ledger)} calls at the engine, {books.lines} lines")
            outcomes = dict(books.outcomes)
            must(set(outcomes) <= ({"ok"} if grace == "20" else {"ok", "aborted"}), f"recorded as {outcomes}")
            must(grace == "20" or outcomes.get("aborted", 0) > 0, "no call was in flight")
            results.append(f"grace {grace} s: {outcomes}, exit 0 after {seconds:.1f} s")
    return "; ".join(results)


async def disk_full(folder: Path, rounds: int) -> str:
    """No space left: agents get their replies, complete lines stay, the log says so; with space, lines are written."""
    out = folder / "small"
    out.mkdir()
    with_mount = os.geteuid() == 0 and _run("mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(out))
    if not with_mount:
        raise CannotBe("mounting a tmpfs needs root")
    try:
        async with Engine(pause=0.002) as engine:
            crowd = Crowd(engine, out, agents=8)
            async with ProxyProcess(engine.url, out) as proxy:
                async with crowd.at_work(proxy):
                    await crowd.until_served(300)
                full = await proxy.metrics()
                lost = int(full["capture_journal_failures_total"])
                states = json.loads((await proxy.admin("GET", "/sessions"))[1])["sessions"]
                must(lost > 0, "the disk never filled up")
                must(any("No space left" in str(state["journal_failed"]) for state in states), "no session says so")
                must("No space left" in proxy.log_text(), "the log does not say so")
                must(_run("mount", "-o", "remount,size=64m", str(out)), "no more room could be made")
                before = len(crowd.reports)
                async with crowd.at_work(proxy):
                    await crowd.until_served(before + 80)
                after = int((await proxy.metrics())["capture_journal_failures_total"])
                must(after == lost, f"with room again {after - lost} lines were lost")
                await proxy.stop()
            no_traceback(proxy)
            early = {report.call.name for report in crowd.reports[:before]}
            books = reconcile(
                crowd.reports, engine.ledger, crowd.journals, excused=lambda report: report.call.name in early
            )
    finally:
        _run("umount", "-l", str(out))
    agree(books)
    answered = sum(report.client == "answered" and report.wrong is None for report in crowd.reports)
    must(answered == len(crowd.reports), f"{len(crowd.reports) - answered} agents did not get their answer")
    must(books.lines + lost == books.calls, f"{books.calls} calls, {books.lines} lines, {lost} reported lost")
    return f"{books.calls:,} calls, each answered: {books.lines:,} lines and {lost} losses, every one of them counted"


async def folder_removed(folder: Path, rounds: int) -> str:
    """A session's folder is deleted: its agent continues, losses are logged and counted, others lose nothing."""
    async with Engine(pause=0.002) as engine:
        crowd = Crowd(engine, folder / "out", agents=8)
        gone = crowd.names[0]
        async with ProxyProcess(engine.url, crowd.out) as proxy:
            async with crowd.at_work(proxy):
                await crowd.until_served(80)
                shutil.rmtree(crowd.out / gone)
                await crowd.until_served(240)
            figures = await proxy.metrics()
            state = json.loads((await proxy.admin("GET", f"/sessions/{gone}"))[1])
            await proxy.stop()
        no_traceback(proxy)
        books = reconcile(
            crowd.reports, engine.ledger, crowd.journals, excused=lambda report: report.call.name.startswith(f"{gone}.")
        )
    agree(books)
    must(all(report.client == "answered" for report in crowd.reports), "an agent did not get its answer")
    must("deleted or moved" in str(state["journal_failed"]), f"the session does not say so: {state}")
    must(proxy.log_text().count("deleted or moved") == 1, "the log says it once, not for each call")
    lost = int(figures["capture_journal_failures_total"])
    must(0 < lost <= books.excused, f"{lost} losses counted of {books.excused} calls of that session")
    return f"{books.calls:,} calls, each answered; {lost} losses counted and logged, {books.lines:,} lines of others"


async def clock(folder: Path, rounds: int) -> str:
    """The wall clock is set two hours ahead, a day back, and right again: no call notices, durations stay durations."""
    library = faketime()
    offset = folder / "clock"
    offset.write_text("+0\n")
    env = {
        "LD_PRELOAD": str(library), "FAKETIME_TIMESTAMP_FILE": str(offset), "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }  # fmt: skip
    async with Engine() as engine:
        crowd = Crowd(engine, folder / "out")
        options = ("--idle-timeout", "8", "--first-byte-timeout", "8")
        async with ProxyProcess(engine.url, crowd.out, *options, env=env) as proxy, crowd.at_work(proxy):
            for step in ("+7200\n", "-86400\n", "+0\n"):
                await asyncio.sleep(0.5)
                temp_path = offset.with_suffix(".new")
                temp_path.write_text(step)
                temp_path.replace(offset)
            await asyncio.sleep(0.5)
        no_traceback(proxy)
        books = reconcile(crowd.reports, engine.ledger, crowd.journals)
    agree(books)
    days = set()
    longest = 0.0
    for line in lines(crowd):
        days.add(line.request["timestamp"][:13])
        longest = max(longest, line.duration_ms or 0)
        must(0 < (line.duration_ms or -1) < 30_000, f"a call took {line.duration_ms} ms")
    must(len(days) >= 3, f"the clock was not set: all calls began in {days}")
    read = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-m", "train", "token-coverage", str(crowd.out)], cwd=ROOT, capture_output=True
    )
    must(b"Traceback" not in read.stderr, f"token-coverage: {read.stderr.decode()[-500:]}")
    return f"{books.calls:,} calls over {len(days)} different hours, all recorded; the longest took {longest:.0f} ms"


async def other_engine(folder: Path, rounds: int) -> str:
    """The engine dies and returns with another model and version: 502 meanwhile, and each record names its engine."""
    async with Engine() as first:
        crowd = Crowd(first, folder / "out")
        async with ProxyProcess(first.url, crowd.out) as proxy, crowd.at_work(proxy):
            await crowd.until_served(2 * AGENTS)
            await first.stop()
            await asyncio.sleep(0.5)
            async with Engine(model="other-policy", version="0.33.0", port=first.port) as second:
                crowd.engine = second
                await crowd.until_served(2 * AGENTS)
                await crowd.finished()
        no_traceback(proxy)
    ledger = first.ledger | second.ledger
    books = reconcile(crowd.reports, ledger, crowd.journals, excused=unfinished)
    agree(books)
    results = {"0.32.0": 0, "0.33.0": 0}
    for line in lines(crowd):
        if line.outcome == "ok":
            by = second if line.metadata["engine_version"] == "0.33.0" else first
            name = named(line.raw)
            must(name is not None and by.ledger[name[0]].whole, f"{name} is recorded as answered by {by.version}")
            must(line.response_body["model"] == by.model, f"{name} is recorded with the model of the other engine")
            results[by.version] += 1
    must(min(results.values()) > 0, f"only one of the engines answered: {results}")
    refused = sum(report.client == "status" and report.status == 502 for report in crowd.reports)
    must(refused > 0, "no call came while the engine was away")
    first_calls, second_calls = results.values()
    return f"{first_calls} calls recorded as of the first engine, {second_calls} as of the second, {refused} got 502"


async def key_revoked(folder: Path, rounds: int) -> str:
    """A session is closed during calls: they finish or are recorded as aborted, and its key is refused from then on."""
    results = []
    for grace, outcome in (("20", "ok"), ("0.2", "aborted")):
        async with Engine(pause=0.05) as engine:
            journal = folder / f"session-{grace}" / "llm_trajectory.jsonl"
            async with ProxyProcess(engine.url, folder / f"out-{grace}", "--grace", grace) as proxy:
                session, key, port = await proxy.open("k0", journal)
                forms = [(dialect, streams) for streams in (True, False) for dialect in DIALECTS]
                calls = [Call(f"k0.{n}", dialect, "plain", streams, 30) for n, (dialect, streams) in enumerate(forms)]
                sending = [asyncio.ensure_future(Agent(port, key, engine).make(call)) for call in calls]
                while len(engine.ledger) < len(calls):  # noqa: ASYNC110 (the ledger cannot notify)
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.2)
                closing = asyncio.ensure_future(proxy.close(session))
                await asyncio.sleep(0.05)
                late = await Agent(port, key, engine).make(Call("k0.99", "openai-chat", "plain", True, 5))
                must(late.status == 401, f"a key of a session that closes got {late.status}")
                state = await closing
                reports = await asyncio.gather(*sending)
                again = await Agent(port, key, engine).make(Call("k0.98", "openai-chat", "plain", False, 5))
                must(again.status == 401, f"a key of a closed session got {again.status}")
                await proxy.stop()
            no_traceback(proxy)
            books = reconcile(reports, engine.ledger, [("k0", journal)], excused=unfinished)
        agree(books)
        must(
            books.outcomes == {outcome: len(calls)} and state["calls"] == len(calls),
            f"recorded as {dict(books.outcomes)}",
        )
        wrong = [f"{report.call.dialect}: {report.wrong}" for report in reports if report.wrong is not None]
        must(not wrong, f"what an ended call's agent got: {wrong}")
        results.append(f"grace {grace} s: {len(calls)} calls {outcome}")
    return "; ".join(results) + "; the key got 401 from then on"


async def descriptors(folder: Path, rounds: int) -> str:
    """Connections until the proxy has no descriptor left: running calls finish, later connections are accepted."""
    async with Engine(pause=0.05) as engine:
        crowd = Crowd(engine, folder / "out", agents=4)
        async with ProxyProcess(engine.url, crowd.out) as proxy:
            async with crowd.at_work(proxy):
                await crowd.until_served(4)
                _, hard = resource.prlimit(proxy.process.pid, resource.RLIMIT_NOFILE)
                resource.prlimit(proxy.process.pid, resource.RLIMIT_NOFILE, (proxy.descriptors() + 20, hard))
                idle = [await asyncio.open_connection("127.0.0.1", proxy.port) for _ in range(60)]
                await asyncio.sleep(1)
                before = proxy.descriptors()
                for _, writer in idle:
                    writer.close()
                await crowd.until_served(served(engine) + 8)
            await proxy.stop()
        books = reconcile(crowd.reports, engine.ledger, crowd.journals, excused=unfinished)
    agree(books)
    return f"60 idle connections on {before} descriptors; {books.calls} calls, {books.calls - books.excused} answered"


def faketime() -> Path:
    """The library that shifts a program's wall clock and not its monotonic clock."""
    found = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    if found is None:
        raise CannotBe("libfaketime is missing: apt-get install libfaketime")
    return found


def _run(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


SCENARIOS: dict[str, Callable[[Path, int], Coroutine[Any, Any, str]]] = {
    "kill": kill, "worker": worker, "terminate": terminate, "disk-full": disk_full, "folder-removed": folder_removed,
    "clock": clock, "other-engine": other_engine, "key-revoked": key_revoked, "descriptors": descriptors,
}  # fmt: skip


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--rounds", type=int, default=12, help="of kill -9")
    ask.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SCENARIOS)}; all without")
    options = ask.parse_args()
    unknown = sorted(set(options.names) - set(SCENARIOS))
    if unknown:
        ask.error(f"there is no {unknown[0]}; there are {', '.join(SCENARIOS)}")
    broken, left_out = 0, 0
    began = time.monotonic()
    for name in options.names or SCENARIOS:
        folder = Path(tempfile.mkdtemp(prefix=f"chaos-{name}-"))
        try:
            result = "holds   " + asyncio.run(SCENARIOS[name](folder, options.rounds))
        except CannotBe as reason:
            left_out += 1
            result = f"NOT RUN {reason}"
        except Exception as error:
            broken += 1
            if not isinstance(error, Broken):
                traceback.print_exc()
            result = f"BROKEN  {type(error).__name__}: {error}"
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(f"{name:<15}{result}", flush=True)
    total = len(options.names or SCENARIOS)
    print(
        f"chaos: {total - broken - left_out} of {total} hold, {broken} broken, {left_out} not run, "
        f"{time.monotonic() - began:.0f} s"
    )
    sys.exit(1 if broken or (left_out and os.environ.get("CI")) else 0)


if __name__ == "__main__":
    main()
