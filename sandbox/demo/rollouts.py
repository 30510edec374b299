"""The second half of `bench demo`: sixteen real rollouts of one task: scored, grouped, and turned into rows for TRL."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from capture.command.terminal import printable
from proxy import SessionOptions
from sandbox.agents import find_agent
from sandbox.containers import images
from sandbox.containers.docker import connect
from sandbox.containers.local import WARNING, LocalPool
from sandbox.containers.pool import DockerPool, PoolFactory
from sandbox.embedded_engine import EmbeddedEngine
from sandbox.errors import DockerError, ImageError
from sandbox.rollouts.job import JobOptions, run_job
from sandbox.rollouts.model_endpoint import Provider
from sandbox.rollouts.plan import RolloutPlan
from sandbox.rollouts.progress import Progress
from sandbox.tasks.task import Task, load_task

TASK = Path(__file__).with_name("task") / "write-number"
GROUP_SIZE = 16
#: One call per rollout: the tool call or none. What this model replies to a tool's result is rarely to the point.
STEPS, MAX_TOKENS = "1", "96"
#: A model of 135 million parameters makes a tool call only after it has seen one in the form of its own turns.
SYSTEM = """You act by calling tools. Example:
<|im_start|>user
Write the number 7 to the file `/tmp/note.txt`.<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "write", "arguments": {"path": "/tmp/note.txt", "content": "7"}}
</tool_call><|im_end|>"""


def loop_demo(console: Console, engine: EmbeddedEngine, folder: Path, *, group_size: int = GROUP_SIZE) -> list[str]:
    """Rollouts, coverage, groups with advantages, rows: all of it measured, none of it made up.

    Returns a sentence for each part that failed.
    """
    task, jobs = load_task(TASK), folder / "jobs"
    make_pool, place = choose_pool(console, task)
    console.print(
        f"\n[bold]rollouts[/]  {group_size} × “{task.prompt}”, agent mini, temperature 1.0, {place}", highlight=False
    )
    provider = Provider(f"llamacpp/{engine.model}", "llamacpp", engine.model, engine.base_url, None, capture=True)
    plan = RolloutPlan(
        job="write-number",
        agent=find_agent("mini"),
        provider=provider,
        agent_env={"MINI_SYSTEM": SYSTEM, "MINI_STEPS": STEPS, "MINI_MAX_TOKENS": MAX_TOKENS},
        session=SessionOptions(sampling={"temperature": 1.0}),
    )
    options = JobOptions(jobs_dir=jobs, trials=group_size, concurrency=4)
    verdicts = Verdicts(console)
    outcome = run_job(plan, [task], options, verdicts, make_pool=make_pool)
    passed = sum(summary["passed"] for summary in outcome.summaries)
    console.print(f"{passed} of {group_size} right, by a model of 135 million parameters", highlight=False)
    failures = [f"{outcome.unscored} of {group_size} rollouts got no reward"] if outcome.unscored else []
    verdicts.print_repeated_errors()
    coverage = bench_train(console, failures, "token-coverage", str(jobs)).strip().splitlines()
    console.print(
        Text("\n".join([coverage[0], "...", coverage[-1]] if len(coverage) > 2 else coverage)), soft_wrap=True
    )
    group = ("--group-size", str(group_size), "--group-by", "task,agent,model")
    show_group(console, bench_train(console, failures, "stream", str(jobs), "--no-follow", *group))
    rows = folder / "rows" / "trl-sft.jsonl"
    row_options = ("--format", "trl-sft", "--row-mode", "exchange", "--out", str(rows))
    report = bench_train(console, failures, "convert", str(jobs), *row_options).strip()
    if report or rows.exists():
        console.print(report or f"rows are in {rows}", highlight=False, soft_wrap=True)
    return failures


def choose_pool(console: Console, task: Task) -> tuple[PoolFactory, str]:
    """Docker, if an engine answers and has or gets the task's image; else plain folders. And the words for it."""
    report = lambda text: console.print(text, highlight=False) if text else None  # noqa: E731
    try:
        api = connect(timeout=20)
        images.ensure_task_image(api, task, report)
    except (DockerError, ImageError) as error:
        return LocalPool, f"in a plain folder, which is not a sandbox ({str(error).partition(';')[0]})"
    return DockerPool, "each in a Docker container of its own"


class Verdicts(Progress):
    """Prints only how each rollout ended, an error that repeats only once, and the bar on a terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._shown = console
        self._errors: Counter[str] = Counter()

    def line(self, text: str) -> None:
        if not text.startswith(("[PASS]", "[FAIL]", "[ERROR]")):
            return
        with self._lock:
            self._last = time.monotonic()
            if text.startswith("[ERROR]"):
                self._errors[text] += 1
            if self._errors[text] <= 1:
                self._shown.print(Text(printable(text)), highlight=False, soft_wrap=True)

    def status(self, text: str) -> None:
        if text != WARNING:
            super().status(text)

    def print_repeated_errors(self) -> None:
        for text, count in self._errors.items():
            if count > 1:
                self._shown.print(Text(f"the same error {count} times: {printable(text)}"), soft_wrap=True)


def bench_train(console: Console, failures: list[str], *words: str) -> str:
    """Runs `bench train ...` as a user would, and returns its output; its status goes to the terminal as always.

    What it reports when it fails is printed once, and added to `failures` by name.
    """
    console.print(Text("\n$ bench train " + " ".join(words), style="bold"), soft_wrap=True)
    command = [sys.executable, "-m", "train", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = Counter(done.stderr.splitlines())
    for line, count in lines.items():
        print(line if count == 1 else f"{line} ({count} times)", file=sys.stderr)  # noqa: T201
    if done.returncode:
        failures.append(f"bench train {words[0]} ended with exit code {done.returncode}")
    return done.stdout


def show_group(console: Console, lines: str) -> None:
    """One line per rollout: its reward, its advantage, and whether its tokens are exact."""
    records: list[dict[str, Any]] = [json.loads(line) for line in lines.splitlines() if line.strip()]
    console.print(Text("(one JSON record per line; of each its path, reward and advantage)", style="dim"))
    for record in records:
        tokens = record["token_capture"]
        advantage = record["advantage"]
        shown = "null" if advantage is None else f"{advantage:+.3f}"
        grade = "exact" if tokens.get("training_grade") else str(tokens.get("status"))
        console.print(
            f"{record['rollout_path']}  reward {record['reward']}  advantage {shown}  tokens {grade}", highlight=False,
            soft_wrap=True,
        )  # fmt: skip
    rewards = {record["reward"] for record in records}
    if len(rewards) == 1:
        console.print(
            "All rewards are the same this time, so every advantage is 0 and there is nothing to learn; run it again."
        )
