"""What it costs to follow a job of 100,000 rollouts: finding them, and each look at a job where little happens.

    python -m benchmarks.train.stream_follow [--rollouts 100000] [--polls 50]

Beside our own figures stand those of the obvious way, a recursive search for `result.json` at each poll.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from train import stream_rollouts
from train.rollouts.follow import Tree

RESULT = {
    "task_name": "write-number", "rewards": {"reward": 1.0}, "agent": "pi-acp", "model": "vllm/my-policy",
    "agent_result": {"n_input_tokens": 2842, "n_output_tokens": 48}, "error": None, "verifier_error": None,
    "usage_tracking": {"endpoint_kind": "sandbox"}, "started_at": "2026-11-04 17:52:13.000001",
    "finished_at": "2026-11-04 17:53:01.000001", "timing": {"total": 48.0},
}  # fmt: skip


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--rollouts", type=int, default=100_000)
    ask.add_argument("--polls", type=int, default=50)
    ask.add_argument("--dir", type=Path, help="where the job is made (default: a temporary folder)")
    options = ask.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.dir))
    try:
        measure(folder / "job", options.rollouts, options.polls)
    finally:
        shutil.rmtree(folder)


def measure(job: Path, count: int, polls: int) -> None:
    make(job, count)
    tree = Tree(job, print)
    began = time.perf_counter()
    assert len(tree.poll()[1]) == count
    print(f"first look at {count} finished rollouts   {time.perf_counter() - began:8.3f} s")

    time.sleep(2.1)  # a folder that changed just now is listed again, for disks with coarse clocks
    tree.poll()
    print(f"a look while nothing happens           {milliseconds(tree.poll, polls):8.3f} ms")

    unfinished = [one_rollout(job, f"running__{number:03d}", finished=False) for number in range(64)]
    tree.poll()
    time.sleep(2.1)
    tree.poll()
    print(f"  with 64 rollouts running             {milliseconds(tree.poll, polls):8.3f} ms")
    finish(unfinished[0])
    assert len(tree.poll()[1]) == 1

    def one_more() -> None:
        one_rollout(job, f"new__{time.monotonic_ns()}")
        assert len(tree.poll()[1]) == 1

    print(f"  where a rollout was added            {milliseconds(one_more, max(polls // 5, 3)):8.3f} ms")
    obvious = milliseconds(lambda: sum(1 for _ in job.rglob("result.json")), 1)
    print(f"the obvious way: rglob('result.json')  {obvious:8.3f} ms")

    (job / ".evaluation.lock").unlink()
    (job / "summary.json").write_text("{}")
    began = time.perf_counter()
    streamed = sum(1 for _ in stream_rollouts(job))
    took = time.perf_counter() - began
    print(f"all of it as records, without calls    {took:8.1f} s, {streamed / took:.0f} rollouts/s")
    print(f"peak memory                            {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:8.0f} MB")


def milliseconds(act: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        act()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e3


def make(job: Path, count: int) -> None:
    job.mkdir()
    (job / "evaluation.json").write_text('{"config": {"retry": {"max_retries": 2}}}')
    (job / ".evaluation.lock").write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    for number in range(count):
        one_rollout(job, f"write-number__{number:08x}")


def one_rollout(job: Path, name: str, finished: bool = True) -> Path:
    folder = job / name
    (folder / "trajectory").mkdir(parents=True)
    if finished:
        finish(folder)
    return folder


def finish(folder: Path) -> None:
    (folder / "result.json").write_text(json.dumps({**RESULT, "rollout_name": folder.name}))


if __name__ == "__main__":
    main()
