"""`bench serve`: the command line of the rollout service."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from capture.engines.llamacpp import LlamaCpp
from proxy import TOKEN_LOGPROBS, check_key, is_loopback
from sandbox.agents import find_agent
from sandbox.embedded_engine import EmbeddedEngine, is_file
from sandbox.errors import JobError
from sandbox.rollouts import options
from sandbox.rollouts.job import default_job_name
from sandbox.rollouts.model_endpoint import BASE_URL, MODEL_FORMS, read_provider
from sandbox.rollouts.options import for_the_agent, read_env, session_options, warn_before
from sandbox.rollouts.plan import RolloutPlan
from sandbox.rollouts.progress import Progress
from sandbox.service.group_service import GroupService, ServiceOptions
from sandbox.service.server import ServerOptions, serve
from sandbox.tasks.task import find_tasks

LLAMACPP = LlamaCpp.name
#: Calls that the engine of `--gguf` runs at once, each with memory for its context; further calls wait there.
MOST_SLOTS = 8


def serve_command(
    context: typer.Context,
    tasks: options.Tasks,
    agent: Annotated[str, typer.Option("--agent", "-a", help="mini, pi, claude, codex, ...: bench agents list")],
    model: options.Model = None,
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
    jobs_dir: options.JobsDir = Path("jobs"),
    job: options.JobName = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a job: finished rollouts are kept, open groups continue.")
    ] = False,
    agent_env: options.AgentEnv = None,
    concurrency: options.Concurrency = 4,
    queue: Annotated[int, typer.Option(min=1, help="Rollouts that may wait; a group beyond them gets 429.")] = 1024,
    retries: options.Retries = 1,
    timeout: options.Timeout = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that running rollouts have at a stop.")] = 60.0,
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
) -> None:
    """Offer rollouts over HTTP to a trainer: groups of one task, scored, with exact tokens and advantages.

    Exit codes: 2 bad input, or no Docker; 130 Ctrl-C, 143 SIGTERM: containers are gone, and --resume continues the
    groups that were not finished.
    """
    check_key(key or None)
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
    if chosen.needs_model and not model:
        raise JobError(f"this agent needs a model; give -m {MODEL_FORMS}, or --gguf FILE for an engine of its own")
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
    found = find_tasks(tasks)
    progress = Progress(sys.stderr, live=False, command="bench serve")
    warn_before(found, provider, progress)
    secret = key or secrets.token_urlsafe(24)

    def on_start(url: str, service: GroupService) -> None:
        with_key = "" if key else f", key {secret}"
        what = f"{len(found)} task" + ("s" if len(found) > 1 else "")
        progress.status(f"rollouts of {what} with {chosen.name} on {url}{with_key} -> {service.job.dir.path}")

    server_options = ServerOptions(secret, host, port, jobs_dir, resume, grace)
    limits = ServiceOptions(concurrency, queue, retries)
    raise typer.Exit(serve(plan, found, limits, server_options, progress, engine=engine, on_start=on_start))


def own_engine(gguf: Path, model: str | None, env: Mapping[str, str], calls: int) -> EmbeddedEngine:
    """The engine of `--gguf`, for so many calls at once. Raises `JobError` where the options do not fit it."""
    prefix, _, name = (model or f"{LLAMACPP}/policy").partition("/")
    if prefix != LLAMACPP or not name:
        raise JobError(f"-m {model}: with --gguf the engine is llama.cpp; give -m {LLAMACPP}/NAME, or leave -m out")
    if BASE_URL in env:
        raise JobError(f"--gguf starts an engine; leave out --agent-env {BASE_URL}, or --gguf")
    if not is_file(gguf):
        raise JobError(f"--gguf {gguf}: there is no such file; give a GGUF file")
    return EmbeddedEngine(gguf.absolute(), model=name, slots=min(calls, MOST_SLOTS), exact=True)
