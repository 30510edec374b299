"""Kills the service, its trainer or the engine's proxy at random moments, and counts what must agree afterwards.

    python -m benchmarks.serve.chaos [--kills 20] [--groups 12] [--size 3] [--seed 1]

Rollouts run in Docker, with the agent mini and a scripted engine behind a proxy that is killed too. Exit 1 when a group
is not whole, a rollout counts twice, the trainer's book differs from the ledger, or a container or a port is left.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.proxy.targets import free_port
from benchmarks.serve.processes import ROOT, Process, service, solve
from benchmarks.serve.trainer import whole_lines
from tests.sandbox.scripted_engine import ScriptedEngine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--groups", type=int, default=12)
    parser.add_argument("--size", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ScriptedEngine(solve) as engine:
        return chaos(Path(folder), engine, given.kills, given.groups, given.size, random.Random(given.seed))


def chaos(folder: Path, engine: ScriptedEngine, kills: int, groups: int, size: int, dice: random.Random) -> int:
    engine_port, port = free_port(), free_port()
    front = Process(
        ["proxy", "--upstream", engine.base_url, "--port", str(engine_port), "--no-probe", "--out", f"{folder}/out"],
        folder / "front.log", f"http://127.0.0.1:{engine_port}/v1/models",
    )  # fmt: skip
    front.start()
    serving = service(f"http://127.0.0.1:{engine_port}/v1", folder, port, "--retries", "3", "--grace", "60")
    serving.start()
    book = folder / "trainer.jsonl"
    trainer = start_trainer(port, book, groups, size)
    killed: Counter[str] = Counter()
    for number in range(kills):
        time.sleep(dice.uniform(0.2, 4))
        who = dice.choice(["service", "service", "trainer", "proxy"])
        killed[who] += 1
        print(f"kill {number + 1} of {kills}: {who}; {len(whole_lines(book))} of {groups} groups", flush=True)
        if who == "service":
            serving.kill()
            serving.start("--resume")
        elif who == "proxy":
            front.kill()
            time.sleep(dice.uniform(0, 1))
            front.start()
        else:
            trainer.kill()
            trainer.wait()
            trainer = start_trainer(port, book, groups, size)
    if trainer.wait() != 0:
        trainer = start_trainer(port, book, groups, size)
        trainer.wait()
    code = serving.stop()
    front.stop()
    wrong = faults(folder, book, groups, size, port, code)
    states = Counter(json.loads(line)["verdict"]["state"] for line in whole_lines(book))
    results = len(list((folder / "jobs" / "job").glob("*/result.json")))
    print(f"killed: {dict(killed)}; groups: {dict(states)}; {results} results")
    for sentence in wrong:
        print(f"WRONG: {sentence}")
    print("FAILED" if wrong else "every book agrees, nothing is left")
    return 1 if wrong else 0


def start_trainer(port: int, book: Path, groups: int, size: int) -> subprocess.Popen[bytes]:
    words = [
        sys.executable,
        "-m",
        "benchmarks.serve.trainer",
        f"http://127.0.0.1:{port}",
        str(book),
        str(groups),
        str(size),
    ]
    return subprocess.Popen(words, cwd=ROOT)


def faults(folder: Path, book: Path, groups: int, size: int, port: int, code: int) -> list[str]:
    """What does not hold, a sentence each."""
    job = folder / "jobs" / "job"
    wrong = [] if code == 143 else [f"the service ended with {code}"]
    rows = [json.loads(line) for line in whole_lines(book)]
    if sorted(row["key"] for row in rows) != sorted(f"g{number}" for number in range(groups)):
        wrong.append("the trainer's book does not have every group once")
    ledger = [json.loads(line) for line in (job / "groups.jsonl").read_text().splitlines() if line]
    verdicts = Counter(row["verdict"]["key"] for row in ledger if "verdict" in row)
    wrong += [f"{key} has {count} verdicts" for key, count in verdicts.items() if count != 1]
    last = {row["verdict"]["key"]: row["verdict"] for row in ledger if "verdict" in row}
    wrong += [f"{row['key']}: the ledger has another verdict" for row in rows if last.get(row["key"]) != row["verdict"]]
    for row in rows:
        verdict = row["verdict"]
        members = [name for name in verdict["rollouts"] if name]
        if sorted(row["records"]) != sorted(members):
            wrong.append(f"{row['key']}: the trainer got {row['records']}, the verdict names {members}")
        if verdict["state"] == "complete" and len(set(members)) != size:
            wrong.append(f"{row['key']} is complete with {len(set(members))} rollouts")
    wrong += counted_twice(job)
    left = containers()
    wrong += [f"the container {name} is left" for name in left]
    with socket.socket() as sock:
        if sock.connect_ex(("127.0.0.1", port)) == 0:
            wrong.append(f"port {port} still answers")
    if (job / ".evaluation.lock").exists():
        wrong.append("the job's lock is left")
    for log in (folder / "service.log", folder / "front.log"):
        if "Traceback" in log.read_text():
            wrong.append(f"{log.name} has a traceback: {log.read_text()[-3000:]}")
    return wrong


def counted_twice(job: Path) -> list[str]:
    """Members that two final results claim."""
    results: list[dict[str, Any]] = [json.loads(path.read_text()) for path in job.glob("*/result.json")]
    replaced = {result["retry_of"] for result in results}
    final = Counter(
        (result["group"]["key"], result["group"]["index"])
        for result in results
        if result["rollout_name"] not in replaced
    )
    return [f"{key} has {count} results for member {index}" for (key, index), count in final.items() if count != 1]


def containers() -> list[str]:
    found = subprocess.run(
        ["docker", "ps", "-a", "--filter", "label=benchflow.job=job", "--format", "{{.Names}}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return found.stdout.split()


if __name__ == "__main__":
    sys.exit(main())
