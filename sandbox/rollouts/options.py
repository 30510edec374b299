"""The options that `bench run` and `bench serve` have in common, and how they are read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from proxy import TOKEN_LOGPROBS, TOP_LOGPROBS, SessionOptions, SettingsError, option_help, read_sampling
from sandbox.errors import JobError
from sandbox.rollouts.model_endpoint import API_KEY, BASE_URL, MODEL_FORMS, Provider, check_reachable, without_tokens
from sandbox.rollouts.progress import Progress
from sandbox.tasks.task import Task


def _check_job(name: str | None) -> str | None:
    if name is not None and ("/" in name or name in (".", "..")):
        raise JobError(f"--job {name}: a job's name is one folder's name; the folder above it is --jobs-dir")
    return name


def _check_verifier_sandbox(kind: str | None) -> str | None:
    if kind not in (None, "shared", "separate"):
        raise JobError(f"--verifier-sandbox must be shared or separate, not {kind}")
    return kind


Tasks = Annotated[list[str], typer.Argument(help="Task folders, folders of tasks, or globs.")]
Model = Annotated[str | None, typer.Option("--model", "-m", help=f"{MODEL_FORMS}.")]
JobsDir = Annotated[Path, typer.Option(help="Folder for job folders.")]
JobName = Annotated[str | None, typer.Option(help="Name of the job; default: the current time.", callback=_check_job)]
AgentEnv = Annotated[
    list[str] | None,
    typer.Option(
        help=f"NAME=VALUE for the agent; NAME alone copies it from this environment. {BASE_URL} and {API_KEY} say "
        f"where the engine is and stay outside the sandbox; {TOKEN_LOGPROBS}=1 captures token ids and logprobs, "
        f"{TOP_LOGPROBS}=N also N alternatives per token."
    ),
]
Concurrency = Annotated[int, typer.Option(min=1, max=1000, help="Number of rollouts that run at once.")]
Timeout = Annotated[float | None, typer.Option(min=0.001, help="Seconds per prompt; overrides the task (default 900).")]
Retries = Annotated[int, typer.Option(min=0, help="Retries after a failure of the infrastructure, not of the agent.")]
VerifierSandbox = Annotated[
    str | None,
    typer.Option(
        help="shared: the agent's container, cleaned; separate: a fresh one.", callback=_check_verifier_sandbox
    ),
]
# of the rollouts' sessions
PolicyVersion = Annotated[str | None, typer.Option(help=option_help("policy_version"))]
Sampling = Annotated[
    list[str] | None,
    typer.Option(help="NAME=VALUE or a JSON object; defaults for calls that set none: --sampling temperature=1.0"),
]
TokenIn = Annotated[str, typer.Option(envvar="CAPTURE_TOKEN_IN", help=option_help("token_in"))]
ForceSampling = Annotated[
    list[str] | None,
    typer.Option(help="NAME=VALUE or a JSON object; wins over what calls set: --force-sampling top_p=1.0"),
]
MaxOutputTokens = Annotated[int | None, typer.Option(help=option_help("max_output_tokens"))]
Grammars = Annotated[str, typer.Option(help=option_help("grammars"))]
MaxCalls = Annotated[int | None, typer.Option(help=option_help("max_calls"))]
MaxSampledTokens = Annotated[int | None, typer.Option(help=option_help("max_sampled_tokens"))]
MaxSeconds = Annotated[float | None, typer.Option(help=option_help("max_seconds"))]


def read_env(words: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` and bare `NAME`s. Raises `JobError`."""
    env = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or (not equals and name not in os.environ):
            raise JobError(f"--agent-env {name or word}: give NAME=VALUE, or the NAME of a variable that is set here")
        env[name] = value if equals else os.environ[name]
    return env


def for_the_agent(env: dict[str, str]) -> dict[str, str]:
    """The variables that go into the sandbox: where the engine is stays outside."""
    return {name: value for name, value in env.items() if name not in (BASE_URL, API_KEY)}


def session_options(
    policy_version: str | None,
    sampling: list[str],
    token_in: str,
    provider: Provider | None,
    force_sampling: Sequence[str] = (),
    **controls: Any,
) -> SessionOptions:
    """What the sessions of the job's rollouts have; `controls` are further fields of `SessionOptions`. Raises
    `JobError`.
    """
    if token_in != "off" and provider is not None and provider.engine == "other":
        raise JobError(f"--token-in needs token ids, which {provider.model} does not return; leave it out")
    capture = provider is None or provider.capture
    try:
        options = SessionOptions(
            capture=capture,
            top_logprobs=provider.top_logprobs if provider else None,
            token_in=token_in,
            policy_version=policy_version,
            sampling=read_sampling(sampling),
            force_sampling=read_sampling(force_sampling, "--force-sampling"),
            **controls,
        )
        options.check()
    except SettingsError as error:
        raise JobError(str(error)) from error
    return options


def warn_before(tasks: Sequence[Task], provider: Provider | None, progress: Progress) -> None:
    """Says what is odd about the tasks and the engine. Raises `JobError` where the engine cannot be used."""
    for task in tasks:
        for warning in task.warnings:
            progress.status(warning)
    if provider is not None:
        check_reachable(provider)
        if (without := without_tokens(provider)) is not None:
            progress.status(without)
