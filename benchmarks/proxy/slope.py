"""Whether the cost of a call grows with sessions, calls of its session, bytes in its journal, or ids.

    python -m benchmarks.proxy.slope [--repeat 5] [--require 1.3]

Measures processor time per call on one proxy, with 1 to 1,000 sessions open and in use, at the first and the thousandth
call of a session, and behind a journal of 100 MB; then a call's cost against its prompt's ids. The load is that of the
case `small` (compare.py); each figure is the least of `--repeat` in turn, which other work on the machine
changes least. With `--require N` the exit code is 1 where the last row of a table costs more than N times its first.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.proxy.compare import CASES, pace, request
from benchmarks.proxy.load import Load
from benchmarks.proxy.targets import Ours, free_port

SMALL = replace(CASES["small"], requests=400, limit=60)


class WithAdmin(Ours):
    def command(self) -> list[str]:
        self.admin = free_port()
        self.more = ("--admin-port", str(self.admin), "--admin-key", "boss")
        return super().command()

    def open(self, name: str) -> bytes:
        """A session; its key."""
        connection = http.client.HTTPConnection("127.0.0.1", self.admin, timeout=30)
        journal = str(self.folder / "sessions" / name / "llm_trajectory.jsonl")
        body = json.dumps({"name": name, "journal": journal})
        connection.request("POST", "/sessions", body, {"authorization": "Bearer boss"})
        made: dict[str, Any] = json.load(connection.getresponse())
        connection.close()
        return str(made["api_key"]).encode()

    def cost(self, requests: list[bytes], count: int) -> float:
        """Microseconds of processor time per call."""
        load = Load(self.port, SMALL.streams)
        before = self.cpu()
        result = load.run(requests, count, limit=120)
        self.settle()
        load.close()
        if result.failed or result.whole != count:
            sys.exit(f"benchmarks.proxy.slope: {result.failed} of {count} calls failed: {result.failure}")
        return (self.cpu() - before) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--require", type=float, help="the most that a last row may cost, in first rows")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="capture-slope-"))
    engine = subprocess.Popen([sys.executable, "-m", "benchmarks.proxy.fake_vllm"], stdout=subprocess.PIPE)
    assert engine.stdout is not None
    target = WithAdmin(int(engine.stdout.readline()), folder)
    try:
        target.start()
        pace(target.engine_port, SMALL)
        tables = [sessions(target, options.repeat), calls(target, options.repeat), journal(target, options.repeat)]
        ids(target, options.repeat)
    finally:
        target.stop()
        engine.kill()
        shutil.rmtree(folder, ignore_errors=True)
    if options.require and any(rows[-1] > options.require * rows[0] for rows in tables):
        sys.exit(1)


def with_key(target: WithAdmin, key: bytes) -> bytes:
    return request(target, SMALL).replace(b"sk-bench", key)


def sessions(target: WithAdmin, repeat: int) -> list[float]:
    """All sessions are opened and used first, then few and many are measured in turn."""
    requests = [with_key(target, target.open(f"session-{number}")) for number in range(1000)]
    target.cost(requests, 2000)
    rows = {count: float("inf") for count in (1, 10, 100, 1000)}
    for _ in range(repeat):
        for count in rows:
            rows[count] = min(rows[count], target.cost(requests[:count], SMALL.requests))
    return shown("sessions in use, of 1,000 that are open", rows)


def calls(target: WithAdmin, repeat: int) -> list[float]:
    """Sessions of their own, each measured at its beginning and further on."""
    rows = {1: float("inf"), 1000: float("inf"), 5000: float("inf")}
    for number in range(repeat):
        requests = [with_key(target, target.open(f"long-{number}"))]
        done = 0
        for count in rows:
            if count - 1 > done:
                target.cost(requests, count - 1 - done)
            rows[count] = min(rows[count], target.cost(requests, SMALL.requests))
            done = count - 1 + SMALL.requests
    return shown("from this call of a session on", rows)


def journal(target: WithAdmin, repeat: int) -> list[float]:
    """Calls of an empty journal, and of one with 100 MB."""
    rows = {0: float("inf"), 100: float("inf")}
    for number in range(min(repeat, 3)):
        requests = [with_key(target, target.open(f"full-{number}"))]
        rows[0] = min(rows[0], target.cost(requests, SMALL.requests))
        big = replace(SMALL, body_kb=500, prompt_ids=100)
        target.cost([request(target, big).replace(b"sk-bench", requests[0].split(b"Bearer ")[1].split(b"\r")[0])], 200)
        rows[100] = min(rows[100], target.cost(requests, SMALL.requests))
    return shown("MB in the session's journal", rows)


def ids(target: WithAdmin, repeat: int) -> list[float]:
    rows = {count: float("inf") for count in (100, 1000, 10_000, 100_000)}
    for _ in range(min(repeat, 3)):
        for count in rows:
            pace(target.engine_port, replace(SMALL, prompt_ids=count))
            rows[count] = min(rows[count], target.cost([request(target, SMALL)], 100))
    return shown("ids of the prompt", rows)


def shown(what: str, rows: dict[int, float]) -> list[float]:
    print(f"\n| {what} | CPU us per call |\n| - | - |")
    for name, cost in rows.items():
        print(f"| {name:,} | {cost:,.0f} |", flush=True)
    return list(rows.values())


if __name__ == "__main__":
    main()
