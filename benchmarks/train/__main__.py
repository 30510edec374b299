"""Speed and memory of the trainer side beside `json.loads` line by line doing the same work, in the same run.

    python -m benchmarks.train [--rollouts 1000] [--calls 20] [--prompt-ids 20000] [--folder FOLDER] [--repeat 1]

Makes the job where it is not there yet (about 4 GB at the defaults), reads it once to warm the page cache, then times
each command and its naive counterpart in turn, each in a process of its own, and prints rows and megabytes per second,
the peak of resident memory, and how many times faster ours is: by the clock, and by processor time, which other work on
the machine changes less. With `--repeat` the best of several runs counts, for both.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
MB = 1e6


# the naive way: every line parsed, ids as lists


def naive_calls(job: Path) -> Iterator[tuple[Row, list[Row]]]:
    for result in sorted(job.glob("*/result.json")):
        calls = []
        with (result.parent / "trajectory/llm_trajectory.jsonl").open() as file:
            for text in file:
                calls.append(json.loads(text))
        calls.sort(key=lambda call: call["metadata"]["call"])
        yield json.loads(result.read_text()), calls


def naive_sequence(calls: list[Row]) -> tuple[list[int], list[int], list[int], list[float]] | None:
    """Prompt, completion, mask and logprobs of a conversation; None where it breaks or is not complete."""
    sequence: list[int] = []
    prompt: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for number, call in enumerate(calls):
        capture = call["metadata"]["token_capture"]
        ids, choice = capture["prompt_token_ids"], capture["completions"][0]
        if capture["unavailable"] or len(choice["token_ids"]) != len(choice["logprobs"]):
            return None
        if number == 0:
            prompt = ids
        elif ids[: len(sequence)] != sequence:
            return None
        else:
            mask += [0] * (len(ids) - len(sequence))
            logprobs += [0.0] * (len(ids) - len(sequence))
        sequence = ids + choice["token_ids"]
        mask += [1] * len(choice["token_ids"])
        logprobs += choice["logprobs"]
    return prompt, sequence[len(prompt) :], mask, logprobs


def naive_coverage(job: Path, out: Path) -> int:
    rollouts = 0
    for _, calls in naive_calls(job):
        naive_sequence(calls)
        rollouts += 1
    return rollouts


def naive_ids(job: Path, out: Path) -> int:
    def row_of(prompt: list[int], completion: list[int], mask: list[int], logprobs: list[float]) -> dict[str, Any]:
        sampled = [token if bit else -100 for token, bit in zip(completion, mask, strict=True)]
        return {"input_ids": prompt + completion, "labels": [-100] * len(prompt) + sampled}

    return write_naive_rows(job, out, row_of)


def naive_grpo(job: Path, out: Path) -> int:
    def row_of(*parts: Any) -> dict[str, Any]:
        return dict(zip(("prompt_ids", "completion_ids", "env_mask", "logprobs"), parts, strict=True))

    return write_naive_rows(job, out, row_of)


def write_naive_rows(job: Path, out: Path, row_of: Callable[..., dict[str, Any]]) -> int:
    """A row of each rollout that is one sequence, of its prompt, completion, mask and logprobs; how many there are."""
    rows = 0
    with out.open("w") as file:
        for result, calls in naive_calls(job):
            found = naive_sequence(calls)
            if found is not None:
                file.write(json.dumps(row_of(*found) | {"reward": result["rewards"]["reward"]}) + "\n")
                rows += 1
    return rows


def naive_messages(job: Path, out: Path) -> int:
    rows = 0
    with out.open("w") as file:
        for result, calls in naive_calls(job):
            for call in calls:
                body = call["request"]["body"]
                reply = call["response"]["body"]["choices"][0]["message"]
                row = {"prompt": body["messages"], "completion": [reply], "tools": json.dumps(body["tools"])}
                file.write(json.dumps(row | {"reward": result["rewards"]["reward"]}) + "\n")
                rows += 1
    return rows


def naive_stream(job: Path, out: Path) -> int:
    rows = 0
    with out.open("w") as file:
        for result, calls in naive_calls(job):
            found = naive_sequence(calls)
            captures = [call["metadata"]["token_capture"] for call in calls]
            values = [
                {"prompt_token_ids": capture["prompt_token_ids"], "completions": capture["completions"]}
                for capture in captures
            ]
            names = ("prompt_ids", "completion_ids", "completion_mask", "completion_logprobs")
            sequence = dict(zip(names, found, strict=True)) if found else None
            file.write(json.dumps({"reward": result["rewards"]["reward"], "calls": values, "sequences": [sequence],
                                   "segments": [sequence]}) + "\n")  # fmt: skip
            rows += 1
    return rows


# ours, through the commands' own functions


def ours_coverage(job: Path, out: Path) -> int:
    from train.tokens.coverage import coverage

    return sum(1 for _ in coverage(job))


def ours_convert(form: str, mode: str) -> Callable[[Path, Path], int]:
    def run(job: Path, out: Path) -> int:
        from train.rows.convert import ConvertOptions, convert

        return convert(job, out, ConvertOptions(format=form, row_mode=mode)).rows

    return run


def ours_stream(job: Path, out: Path) -> int:
    from train.cli import app

    with out.open("w") as file:
        sys.stdout = file
        try:
            app(["stream", str(job), "--no-follow"], standalone_mode=False)
        finally:
            sys.stdout = sys.__stdout__
    with out.open("rb") as written:
        return sum(1 for _ in written)


WORK: dict[str, tuple[Callable[[Path, Path], int], Callable[[Path, Path], int]]] = {
    "token-coverage": (ours_coverage, naive_coverage),
    "convert trl-sft-ids": (ours_convert("trl-sft-ids", "rollout"), naive_ids),
    "convert trl-grpo": (ours_convert("trl-grpo", "rollout"), naive_grpo),
    "convert trl-sft (row per call)": (ours_convert("trl-sft", "exchange"), naive_messages),
    "stream --no-follow": (ours_stream, naive_stream),
}


def measure(name: str, side: int, job: Path) -> Row:
    """One side of one piece of work in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.train", "--one", name, str(side), "--folder", str(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    result: Row = json.loads(done.stdout.splitlines()[-1])
    return result


def measure_job(name: str, side: int, job: Path) -> None:
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        out = Path(folder) / "rows.jsonl"
        began, busy = time.perf_counter(), time.process_time()
        rows = WORK[name][side](job, out)
        seconds, busy = time.perf_counter() - began, time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"rows": rows, "seconds": seconds, "busy": busy, "peak": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--prompt-ids", type=int, default=20_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--only", help="one piece of work, by its name")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    name = f"capture-bench-{asked.rollouts}x{asked.calls}x{asked.prompt_ids}"
    job = asked.folder or Path(tempfile.gettempdir()) / name
    if asked.one:
        measure_job(asked.one[0], int(asked.one[1]), job)
        return
    numbers = [str(asked.rollouts), "--calls", str(asked.calls), "--prompt-ids", str(asked.prompt_ids)]
    here = Path(__file__).parent
    # In a process of its own: a child's peak of memory begins where its parent's stands.
    subprocess.run([sys.executable, here / "make_jobs.py", job, "--rollouts", *numbers], check=True)
    size = 0
    for path in job.glob("*/trajectory/*.jsonl"):
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                size += len(block)
    calls = asked.rollouts * asked.calls
    print(
        f"{asked.rollouts} rollouts, {calls} calls, {size / MB:,.0f} MB of journals, {size / calls / 1e3:.0f} kB/call"
    )
    print(f"{'':<32}{'ours':>7}{'':>25}{'naive':>14}")
    print(f"{'':<32}{'rows':>7}{'rows/s':>9}{'MB/s':>7}{'peak MB':>9}{'MB/s':>14}{'peak MB':>9}", end="")
    print(f"{'times faster':>14}{'by CPU':>8}")
    for work in WORK:
        if asked.only not in (None, work):
            continue
        runs = [(measure(work, 0, job), measure(work, 1, job)) for _ in range(asked.repeat)]
        ours, naive = (
            {name: (max if name == "peak" else min)(run[side][name] for run in runs) for name in runs[0][side]}
            for side in (0, 1)
        )
        assert ours["rows"] == naive["rows"], (work, ours, naive)
        print(
            f"{work:<32}{ours['rows']:>7}{ours['rows'] / ours['seconds']:>9,.0f}{size / MB / ours['seconds']:>7,.0f}"
            f"{ours['peak'] / MB:>9,.0f}{size / MB / naive['seconds']:>14,.0f}{naive['peak'] / MB:>9,.0f}"
            f"{naive['seconds'] / ours['seconds']:>14.1f}{naive['busy'] / ours['busy']:>8.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
