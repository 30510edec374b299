"""Fuzzes for as long as one wants: `python -m tests.fuzz --seconds 3600 [--only NAME] [--atheris]`.

Every target gets the same share of the time, in rounds. Hypothesis looks for and shrinks what fails; with `--atheris`
(PyPI's, CPython 3.11 to 3.13) libFuzzer chooses the bytes by what code they reach. What is found is printed, and kept
under `.hypothesis` so that the next run begins with it. Exit 1 where something was found.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import traceback
from collections import Counter

from hypothesis.database import DirectoryBasedExampleDatabase

from tests.fuzz.targets import TARGETS, property_of

ROUND = 300


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--seconds", type=float, default=60)
    ask.add_argument("--only", action="append", choices=sorted(TARGETS))
    ask.add_argument("--atheris", action="store_true")
    options = ask.parse_args()
    names = options.only or sorted(TARGETS)
    found = by_coverage(names, options.seconds) if options.atheris else by_hypothesis(names, options.seconds)
    print(
        f"fuzz: {options.seconds:g} s, {len(names)} targets: "
        + (f"FOUND in {', '.join(found)}" if found else "nothing")
    )
    sys.exit(1 if found else 0)


def by_hypothesis(names: list[str], seconds: float) -> list[str]:
    until = time.monotonic() + seconds
    database = DirectoryBasedExampleDatabase(".hypothesis/fuzz")
    spent: Counter[str] = Counter()
    found: list[str] = []
    rounds: Counter[str] = Counter()
    while time.monotonic() < until and len(found) < len(names):
        name = min((name for name in names if name not in found), key=lambda target: spent[target])
        began = time.monotonic()
        examples = 20 if name == "jobs" else ROUND
        try:
            property_of(name, max_examples=examples, database=database)()
        except Exception:
            print(f"\n== {name}")
            traceback.print_exc()
            found.append(name)
        spent[name] += round((time.monotonic() - began) * 1000)
        rounds[name] += examples
    for name in names:
        print(f"  {name:<22}{rounds[name]:>9,} examples{spent[name] / 1000:>8.0f} s")
    return found


def by_coverage(names: list[str], seconds: float) -> list[str]:
    """libFuzzer ends its process: each target runs in one of its own."""
    script = (
        "import sys, atheris\n"
        "with atheris.instrument_imports(include=['capture', 'proxy', 'train']):\n"
        "    from tests.fuzz.targets import property_of\n"
        "one = property_of(sys.argv.pop()).hypothesis.fuzz_one_input\n"
        "def test(data): one(data)\n"
        "atheris.Setup(sys.argv, test)\n"
        "atheris.Fuzz()\n"
    )
    found = []
    for name in names:
        bounds = [f"-max_total_time={max(1, int(seconds / len(names)))}", "-max_len=4096", "-verbosity=0"]
        command = [sys.executable, "-c", script, *bounds, f"-artifact_prefix=.hypothesis/{name}-", name]
        done = subprocess.run(command, check=False)
        print(f"  {name:<22}{'nothing' if done.returncode == 0 else 'FOUND'}", flush=True)
        if done.returncode:
            found.append(name)
    return found


if __name__ == "__main__":
    main()
