"""`bench serve`: the command line of the rollout service."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from capture.engines.llamacpp import LlamaCpp
from proxy import TOKEN_LOGPROBS, is_loopback, option_help
from sandbox.agents import find_agent
from sandbox.cli import (
    ENV_HELP,
    ForceSampling,
    Grammars,
    MaxCalls,
    MaxOutputTokens,
    MaxSampledTokens,
    MaxSeconds,
    for_the_agent,
    read_env,
    session_options,
)
from sandbox.embedded_engine import EmbeddedEngine
from sandbox.errors import JobError
from sandbox.rollouts.job import default_job_name
from sandbox.rollouts.model_endpoint import BASE_URL, MODEL_FORMS, check_reachable, read_provider, without_tokens
from sandbox.rollouts.plan import RolloutPlan
from sandbox.rollouts.progress import Progress
from sandbox.service.server import ServerOptions, serve
from sandbox.service.service import GroupService, ServiceOptions
from sandbox.tasks.task import find_tasks

LLAMACPP = LlamaCpp.name
#: Calls that the engine of `--gguf` runs at once, each with memory for its context; more wait in it.
MOST_SLOTS = 8


def serve_command(
    context: typer.Context,
    tasks: Annotated[list[str], typer.Argument(help="Task folders, folders of tasks, or globs.")],
    agent: Annotated[str, typer.Option("--agent", "-a", help="mini, pi, claude, codex, ...: bench agents list")],
    model: Annotated[str | None, typer.Option("--model", "-m", help=f"{MODEL_FORMS}.")] = None,
    gguf: Annotated[
        Path | None,
        typer.Option(help="Serve this file with the embedded engine, as -m llamacpp/NAME; POST /weights replaces it."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback --key must be given.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8300,
    key: Annotated[
        str | None,
        typer.Option(envvar="BENCHFLOW_SERVE_KEY", help="Key that trainers send; generated and logged if not given."),
    ] = None,
    jobs_dir: Annotated[Path, typer.Option(help="Folder for job folders.")] = Path("jobs"),
    job: Annotated[str | None, typer.Option(help="Name of the job; default: the current time.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a job: finished rollouts are kept, open groups go on.")
    ] = False,
    agent_env: Annotated[list[str] | None, typer.Option(help=ENV_HELP)] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=1000, help="Number of rollouts that run at once.")] = 4,
    queue: Annotated[int, typer.Option(min=1, help="Rollouts that may wait; a group beyond them gets 429.")] = 1024,
    retries: Annotated[
        int, typer.Option(min=0, help="Retries after a failure of the infrastructure, not of the agent.")
    ] = 1,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds per prompt; overrides the task (default 900).")
    ] = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that running rollouts have at a stop.")] = 60.0,
    verifier_sandbox: Annotated[
        str | None, typer.Option(help="shared: the agent's container, cleaned; separate: a fresh one.")
    ] = None,
    policy_version: Annotated[str | None, typer.Option(help=option_help("policy_version"))] = None,
    sampling: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE or a JSON object; defaults for calls that set none: --sampling temperature=1.0"),
    ] = None,
    token_in: Annotated[str, typer.Option(envvar="CAPTURE_TOKEN_IN", help=option_help("token_in"))] = "off",
    force_sampling: ForceSampling = None,
    max_output_tokens: MaxOutputTokens = None,
    grammars: Grammars = "flag",
    max_calls: MaxCalls = None,
    max_sampled_tokens: MaxSampledTokens = None,
    max_seconds: MaxSeconds = None,
) -> None:
    """Offer rollouts over HTTP to a trainer: groups of one task, scored, with exact tokens and advantages.

    Exit codes: 2 bad input, or no Docker; 130 Ctrl-C, 143 SIGTERM: containers are gone, and --resume continues the
    groups that were not finished.
    """
    if verifier_sandbox not in (None, "shared", "separate"):
        raise JobError(f"--verifier-sandbox must be shared or separate, not {verifier_sandbox}")
    if key is None and not is_loopback(host):
        raise JobError(
            f"refusing to listen on {host} without a key: anybody who reaches the port could run agents here; give "
            "--key (or BENCHFLOW_SERVE_KEY), or listen on 127.0.0.1"
        )
    env = read_env(agent_env or [])
    chosen = find_agent(agent)
    engine: EmbeddedEngine | None = None
    if gguf is not None:
        engine = context.with_resource(own_engine(gguf, model, env, concurrency))
        model, env[BASE_URL] = f"{LLAMACPP}/{engine.model}", engine.base_url
    # Trainers come for tokens; 0 still turns the capture off.
    env.setdefault(TOKEN_LOGPROBS, "1")
    provider = read_provider(model, env) if chosen.needs_model else None
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
        ),
    )
    if "/" in plan.job or plan.job in (".", ".."):
        raise JobError(f"--job {plan.job}: a job's name is one folder's name; the folder above it is --jobs-dir")
    found = find_tasks(tasks)
    progress = Progress(sys.stderr, live=False, command="bench serve")
    for task in found:
        for warning in task.warnings:
            progress.status(warning)
    if provider is not None:
        check_reachable(provider)
        if (nothing := without_tokens(provider)) is not None:
            progress.status(nothing)
    secret = key or secrets.token_urlsafe(24)

    def on_start(url: str, service: GroupService) -> None:
        with_key = "" if key else f", key {secret}"
        what = f"{len(found)} task" + ("s" if len(found) > 1 else "")
        progress.status(f"rollouts of {what} with {chosen.name} on {url}{with_key} -> {service.job.dir.path}")

    options = ServerOptions(secret, host, port, jobs_dir, resume, grace)
    limits = ServiceOptions(concurrency, queue, retries)
    raise typer.Exit(serve(plan, found, limits, options, progress, engine=engine, on_start=on_start))


def own_engine(gguf: Path, model: str | None, env: Mapping[str, str], calls: int) -> EmbeddedEngine:
    """The engine of `--gguf`, for so many calls at once. Raises `JobError` where the options do not fit it."""
    prefix, _, name = (model or f"{LLAMACPP}/policy").partition("/")
    if prefix != LLAMACPP or not name:
        raise JobError(f"-m {model}: with --gguf the engine is llama.cpp; give -m {LLAMACPP}/NAME, or leave -m out")
    if BASE_URL in env:
        raise JobError(f"--gguf starts an engine; leave out --agent-env {BASE_URL}, or --gguf")
    if not gguf.is_file():
        raise JobError(f"--gguf {gguf}: there is no such file; give a GGUF file")
    return EmbeddedEngine(gguf.absolute(), model=name, slots=min(calls, MOST_SLOTS), exact=True)
