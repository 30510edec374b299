"""`bench run`, `bench tasks`, `bench agents`, `bench doctor`, `bench demo`: the commands of this package."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from capture.command.terminal import echo
from proxy import option_help
from sandbox.agents import find_agent
from sandbox.containers import images, reaper
from sandbox.containers.docker import connect
from sandbox.containers.pool import ContainerPool
from sandbox.doctor import doctor_command
from sandbox.errors import JobError, Stopped, TaskError
from sandbox.rollouts import options
from sandbox.rollouts.job import JobOptions, JobOutcome, default_job_name, run_job
from sandbox.rollouts.model_endpoint import Provider, read_provider
from sandbox.rollouts.options import for_the_agent, read_env, session_options, warn_before
from sandbox.rollouts.plan import RolloutPlan
from sandbox.rollouts.progress import Progress
from sandbox.tasks.scaffold import write_task
from sandbox.tasks.task import Task, find_folders, find_tasks, load_task

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
tasks_app = typer.Typer(
    help="Check or create a task folder.", no_args_is_help=True, rich_markup_mode=None, add_completion=False
)
agents_app = typer.Typer(
    help="List agents, or build images with one installed.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)
app.command("doctor")(doctor_command)
app.add_typer(tasks_app, name="tasks")
app.add_typer(agents_app, name="agents")


@app.command("run")
def run_command(
    tasks: options.Tasks,
    agent: Annotated[
        str, typer.Option("--agent", "-a", help="oracle, nop, mini, pi, claude, codex, ...: bench agents list")
    ],
    model: options.Model = None,
    sandbox: Annotated[str, typer.Option(help="Where agents run; docker is the only choice.")] = "docker",
    jobs_dir: options.JobsDir = Path("jobs"),
    job: options.JobName = None,
    agent_env: options.AgentEnv = None,
    trials: Annotated[
        int, typer.Option(min=1, max=999, help="How often to repeat every task, each time in its own job.")
    ] = 1,
    concurrency: options.Concurrency = 4,
    timeout: options.Timeout = None,
    retries: options.Retries = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a job; finished rollouts are kept.")] = False,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="Stop at the first rollout that gets no reward.")
    ] = False,
    verifier_sandbox: options.VerifierSandbox = None,
    policy_version: options.PolicyVersion = None,
    sampling: options.Sampling = None,
    token_in: options.TokenIn = "off",
    force_sampling: options.ForceSampling = None,
    max_output_tokens: options.MaxOutputTokens = None,
    grammars: options.Grammars = "flag",
    max_calls: options.MaxCalls = None,
    max_sampled_tokens: options.MaxSampledTokens = None,
    max_seconds: options.MaxSeconds = None,
    purpose: Annotated[str, typer.Option(help=option_help("purpose"))] = "train",
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on standard output.")] = False,
) -> None:
    """Run agents on tasks in Docker sandboxes, and score them.

    Exit codes: 0 every rollout got a reward, whatever it is; 1 some got none, or --fail-fast stopped the job; 2 bad
    input, or no Docker; 130 Ctrl-C, 143 SIGTERM: containers are gone, finished rollouts are kept.
    """
    if sandbox != "docker":
        raise JobError(f"--sandbox {sandbox} is not known; docker is")
    env = read_env(agent_env or [])
    chosen = find_agent(agent)
    provider = read_provider(model, env) if chosen.needs_model else None
    found = find_tasks(tasks)
    plan = RolloutPlan(
        job=job or default_job_name(),
        agent=chosen,
        provider=provider,
        agent_env=for_the_agent(env),
        timeout=timeout,
        verifier_sandbox=verifier_sandbox,
        session=session_options(
            policy_version,
            sampling or [],
            token_in,
            provider,
            force_sampling or [],
            max_output_tokens=max_output_tokens,
            grammars=grammars,
            max_calls=max_calls,
            max_sampled_tokens=max_sampled_tokens,
            max_seconds=max_seconds,
            purpose=purpose,
        ),
    )
    progress = Progress(sys.stderr if as_json else None)
    warn_before(found, provider, progress)
    job_options = JobOptions(jobs_dir, trials, concurrency, retries, resume, fail_fast)
    with interruptible(progress) as guard:
        try:
            outcome = run_job(plan, found, job_options, progress, stop=guard.stop, on_pool=guard.watch)
        except Stopped:  # before the first rollout began
            raise typer.Exit(guard.exit_code or 1) from None
    report(outcome, provider, progress, as_json)
    raise typer.Exit(guard.exit_code or (1 if outcome.unscored or outcome.stopped else 0))


def report(outcome: JobOutcome, provider: Provider | None, progress: Progress, as_json: bool) -> None:
    if as_json:
        value: Any = outcome.summaries[0] if len(outcome.summaries) == 1 else {"trials": outcome.summaries}
        typer.echo(json.dumps(value, indent=2))
    for summary in outcome.summaries:
        errors = summary["errored"] + summary["verifier_errored"]
        words = f"{summary['passed']} passed, {summary['failed']} failed, {errors} without a reward"
        if provider is not None and provider.capture:
            words += f"; {summary['complete_calls']} of {summary['calls']} calls complete"
        stopped = "stopped: " if summary["stopped"] else ""
        progress.status(f"{stopped}{words}, {summary['elapsed_sec']:g} s -> {summary['path']}")


class SignalGuard:
    """What Ctrl-C and SIGTERM do: once stops cleanly, again leaves at once (the next run removes what is left)."""

    def __init__(self, progress: Progress) -> None:
        self.stop = threading.Event()
        self.exit_code = 0
        self._pool: ContainerPool | None = None
        self._progress = progress

    def watch(self, pool: ContainerPool) -> None:
        self._pool = pool

    def on_signal(self, number: int, _frame: object) -> None:
        if self.exit_code:
            raise KeyboardInterrupt
        self.exit_code = 128 + number
        self.stop.set()
        # Not here: a signal handler may interrupt code that holds a lock this needs.
        threading.Thread(target=self._end, name="stopping", daemon=True).start()

    def _end(self) -> None:
        self._progress.status("stopping; containers are being removed, finished rollouts are kept")
        if self._pool is not None:
            self._pool.kill()


@contextmanager
def interruptible(progress: Progress) -> Iterator[SignalGuard]:
    guard = SignalGuard(progress)
    before = {number: signal.signal(number, guard.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield guard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@tasks_app.command("check")
def check_command(
    tasks: Annotated[list[str], typer.Argument(help="Task folders, folders of tasks, or globs.")],
) -> None:
    """Report what is wrong with tasks. Exit codes: 0 nothing; 2 something."""
    wrong = 0
    for pattern in tasks:
        try:
            folders = find_folders([pattern])
        except TaskError as error:
            wrong += 1
            echo(f"{pattern}: {error}", err=True)
            continue
        for folder in folders:
            try:
                check_task(load_task(folder))
            except TaskError as error:
                wrong += 1
                echo(f"{folder.name}: {error}", err=True)
    raise typer.Exit(2 if wrong else 0)


def check_task(task: Task) -> None:
    """Says that it is good, and what could be better. Raises `TaskError`."""
    for warning in task.warnings:
        echo(f"warning: {warning}", err=True)
    if not (task.oracle_dir / "solve.sh").is_file():
        echo(f"warning: {task.name} has no {task.oracle_dir.name}/solve.sh, so nobody can prove it", err=True)
    script = (task.verifier_dir / "test.sh").read_bytes()
    if b"\r\n" in script or not script.startswith(b"#!"):
        raise TaskError(f"{task.verifier_dir}/test.sh must begin with #!/bin/bash and have Unix line ends")
    echo(f"{task.name}: good")


@tasks_app.command("init")
def init_command(
    name: Annotated[Path, typer.Argument(help="Folder to create; its last part is the task's name.")],
) -> None:
    """Create a small working task: prompt, verifier and solution to edit."""
    write_task(name)
    load_task(name)
    echo(f"{name}: made; try it with: bench run {name} -a oracle")


@agents_app.command("list")
def list_command() -> None:
    """List each agent: its name, its aliases, what it is, and what `bench run` installs."""
    from sandbox.agents import AGENTS

    names = [", ".join((agent.name, *agent.aliases)) for agent in AGENTS]
    wide = max(map(len, names))
    for name, agent in zip(names, AGENTS, strict=True):
        typer.echo(f"{name:<{wide}}  {agent.about}" + (f" ({agent.version})" if agent.version else ""))


@agents_app.command("build")
def build_command(
    agent: Annotated[str, typer.Argument(help="Agent to install.")],
    base: Annotated[str, typer.Option("--from", help="Image to install it in.")],
    tag: Annotated[str | None, typer.Option(help="Name of the new image; default: one that bench run finds.")] = None,
) -> None:
    """Build an image with an agent installed. `bench run` does so itself, and finds images built before."""
    chosen = find_agent(agent)
    if chosen.version is None:
        typer.echo(f"{chosen.name} has nothing to install", err=True)
        return
    api = connect()
    images.ensure_pulled(api, base, _report)
    labels = reaper.labels(job="build")
    typer.echo(
        images.build_agent_image(
            api, base, key=chosen.version, install=chosen.install, labels=labels, tag=tag, report=_report
        )
    )


agents_app.command("bake", hidden=True)(build_command)  # its name until 2026


def _report(text: str) -> None:
    if text:
        echo(text, err=True)


@app.command("demo")
def demo_command(
    out: Annotated[Path, typer.Option(help="Folder for what the demo writes.")] = Path("captures/demo"),
) -> None:
    """Run the whole loop on this machine: a real model, rollouts, rewards, and rows for a trainer.

    Exit codes: 0 every part worked; 1 some failed.
    """
    from rich.console import Console

    from sandbox.demo.captures import demo

    raise typer.Exit(1 if demo(Console(), out) else 0)
