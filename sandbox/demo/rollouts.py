"""The second half of `bench demo`: sixteen real rollouts of one task, scored, grouped, and turned into rows for TRL."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

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
GROUP = 16
#: One call a rollout: the tool call or none. What this model says to a tool's result is rarely to the point.
STEPS, MAX_TOKENS = "1", "96"
#: A model of 135 million parameters makes a tool call only after it has seen one, written as its own turns are.
SYSTEM = """You act by calling tools. Example:
<|im_start|>user
Write the number 7 to the file `/tmp/note.txt`.<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "write", "arguments": {"path": "/tmp/note.txt", "content": "7"}}
</tool_call><|im_end|>"""


def loop_demo(console: Console, engine: EmbeddedEngine, folder: Path) -> None:
    """Rollouts, coverage, groups with advantages, rows. The model is as good as it is; nothing is made up."""
    task, jobs = load_task(TASK), folder / "jobs"
    make_pool, place = choose_pool(console, task)
    console.print(
        f"\n[bold]rollouts[/]  {GROUP} × “{task.prompt}”, agent mini, temperature 1.0, {place}", highlight=False
    )
    provider = Provider(f"llamacpp/{engine.model}", "llamacpp", engine.model, engine.base_url, None, capture=True)
    plan = RolloutPlan(
        job="write-number",
        agent=find_agent("mini"),
        provider=provider,
        agent_env={"MINI_SYSTEM": SYSTEM, "MINI_STEPS": STEPS, "MINI_MAX_TOKENS": MAX_TOKENS},
        session=SessionOptions(sampling={"temperature": 1.0}),
    )
    options = JobOptions(jobs_dir=jobs, trials=GROUP, concurrency=4)
    outcome = run_job(plan, [task], options, Verdicts(console), make_pool=make_pool)
    passed = sum(summary["passed"] for summary in outcome.summaries)
    console.print(f"{passed} of {GROUP} right, by a model of 135 million parameters", highlight=False)
    first, *_, last = ran(console, "token-coverage", str(jobs)).strip().splitlines()
    console.print(Text(f"{first}\n...\n{last}"), soft_wrap=True)
    group = ("--group-size", str(GROUP), "--group-by", "task,agent,model")
    show_group(console, ran(console, "stream", str(jobs), "--no-follow", *group))
    rows = folder / "rows" / "trl-sft.jsonl"
    said = ran(console, "convert", str(jobs), "--format", "trl-sft", "--row-mode", "exchange", "--out", str(rows))
    console.print(said.strip() or f"rows are in {rows}", highlight=False, soft_wrap=True)


def choose_pool(console: Console, task: Task) -> tuple[PoolFactory, str]:
    """Docker where an engine answers and has the task's image or can get it; else a plain folder, and that is said."""
    say = lambda text: console.print(text, highlight=False) if text else None  # noqa: E731 (a pull takes its time)
    try:
        api = connect(timeout=20)
        images.ensure_task_image(api, task, say)
    except (DockerError, ImageError) as error:
        return LocalPool, f"in a plain folder, which is no sandbox ({str(error).partition(';')[0]})"
    return DockerPool, "each in a Docker container of its own"


class Verdicts(Progress):
    """Only how each rollout ended, and the bar on a terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._shown = console

    def line(self, text: str) -> None:
        if text.startswith(("[PASS]", "[FAIL]", "[ERROR]")):
            with self._lock:
                self._last = time.monotonic()
                self._shown.print(Text(text), highlight=False)

    def status(self, text: str) -> None:
        if text != WARNING:
            super().status(text)


def ran(console: Console, *words: str) -> str:
    """Output of `bench train ...`, as a person would run it; its status goes to the terminal as always."""
    console.print(Text("\n$ bench train " + " ".join(words), style="bold"), soft_wrap=True)
    done = subprocess.run([sys.executable, "-m", "train", *words], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        console.print(f"(exit code {done.returncode})")
    return done.stdout


def show_group(console: Console, lines: str) -> None:
    """One line a rollout: its reward, its advantage, and whether it can be trained on token by token."""
    records: list[dict[str, Any]] = [json.loads(line) for line in lines.splitlines() if line.strip()]
    console.print(Text("(one JSON record a line; of each, where it is and what it earned)", style="dim"))
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
