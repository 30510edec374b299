"""What a command costs before it does anything, beside `python -c pass`.

    python -m benchmarks.startup [--rounds 7] [--require 'bench --version<=10'] ...

Figures are medians over the rounds: wall clock and processor time in seconds, and processor time as a multiple of
`python -c pass`, which a busy or slow machine changes least. `--require` compares that multiple.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.train.make_jobs import make_job

BARE = "python -c pass"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--require", action="append", default=[], metavar="'COMMAND<=MULTIPLE'")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        job = make_job(Path(folder) / "job", rollouts=3, calls=3, prompt_ids=200)
        commands = {BARE: [sys.executable, "-c", "pass"]} | {
            f"bench {words}": [sys.executable, "-m", "bench", *words.replace("JOB", str(job)).split()]
            for words in (
                "--version", "--help", "train --help", "train token-coverage JOB", "train stream JOB --no-follow",
                f"train convert JOB --format trl-grpo -o {folder}/rows.jsonl", "run --help", "proxy --help",
            )
        }  # fmt: skip
        runs = {name: [measure(command) for command in [commands[name]] * options.rounds] for name in commands}
    medians = {
        name: [statistics.median(column) for column in zip(*rounds, strict=True)] for name, rounds in runs.items()
    }
    multiples = {name: cpu / medians[BARE][1] for name, (_, cpu) in medians.items()}
    print("| command | wall s | processor s | times `python -c pass` |\n| - | - | - | - |")
    for name, (wall, cpu) in medians.items():
        print(f"| `{name.replace(folder + '/', '')}` | {wall:.3f} | {cpu:.3f} | {multiples[name]:.1f} |")
    failed = False
    for text in options.require:
        name, _, most = text.rpartition("<=")
        if name not in multiples:
            parser.error(f"--require {text!r}: the commands are {', '.join(map(repr, multiples))}")
        holds = multiples[name] <= float(most)
        print(f"{'holds' if holds else 'FAILS'}: {name} {multiples[name]:.1f}<={most}")
        failed |= not holds
    return int(failed)


def measure(command: list[str]) -> tuple[float, float]:
    """Wall clock and processor time of one run, in seconds. Raises where the command fails."""
    began = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return time.perf_counter() - began, used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
