"""The same rollouts by `bench serve` and by `bench run`: wall time, processor time and memory of each.

    python -m benchmarks.serve [--rollouts 200] [--concurrency 32] [--rounds 1]

Rollouts run in Docker, with the agent mini and a scripted engine in this process, whose time is not counted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.proxy.targets import free_port
from benchmarks.serve.processes import KEY, ROOT, TASK, capture, service, solve
from tests.sandbox.scripted_engine import MODEL, ScriptedEngine
from train.online.client import RolloutService

SIZE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    print("| by | wall s | processor s | peak MiB |\n| - | - | - | - |")
    for number in range(given.rounds):
        with tempfile.TemporaryDirectory() as folder, ScriptedEngine(solve) as engine:
            ways = [("bench run", by_run), ("bench serve", by_service)]
            for name, way in ways if number % 2 == 0 else reversed(ways):
                wall, cpu, peak = way(engine.base_url, Path(folder), given.rollouts, given.concurrency)
                print(f"| {name} | {wall:.1f} | {cpu:.1f} | {peak:.0f} |", flush=True)


def by_run(engine: str, folder: Path, rollouts: int, concurrency: int) -> tuple[float, float, float]:
    words = ["run", str(TASK), "-a", "mini", "-m", f"vllm/{MODEL}", "--trials", str(rollouts), "--jobs-dir",
             str(folder / "run"), "--concurrency", str(concurrency), *capture(engine)]  # fmt: skip
    began = time.monotonic()
    with (folder / "run.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "bench.py"), *words], cwd=ROOT, stdout=log, stderr=log,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        _, status, used = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit((folder / "run.log").read_text()[-2000:])
    return time.monotonic() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def by_service(engine: str, folder: Path, rollouts: int, concurrency: int) -> tuple[float, float, float]:
    port = free_port()
    began = time.monotonic()
    serving = service(engine, folder, port, "--concurrency", str(concurrency), "--queue", str(rollouts))
    serving.start()
    with RolloutService(f"http://127.0.0.1:{port}", KEY) as client:

        def ask(number: int) -> None:
            group = client.group(key=f"g{number}", task="write-number", size=SIZE)
            list(group)
            assert group.verdict is not None and group.verdict["state"] == "complete", group.verdict

        with ThreadPoolExecutor(rollouts // SIZE) as pool:
            list(pool.map(ask, range(rollouts // SIZE)))
    cpu, peak = serving.cpu_and_memory()
    serving.stop()
    return time.monotonic() - began, cpu, peak


if __name__ == "__main__":
    main()
