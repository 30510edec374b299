"""`bench proxy`: the stand-alone proxy's command line. Every option has an environment variable."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from capture.token_in.bridge import MODES_HELP
from proxy.env import read_capture, read_top_logprobs
from proxy.errors import ProxyError, SettingsError
from proxy.runtime.fd_limits import say_when_none_are_left
from proxy.runtime.logs import log_to_stderr
from proxy.runtime.loop import run
from proxy.runtime.memory import start_gc_timer, trim_malloc, tune_gc
from proxy.sampling import misspelt_sampling
from proxy.server import serve
from proxy.sessions.registry import say_stopped
from proxy.settings import Settings

log = logging.getLogger("proxy")


def register(app: typer.Typer) -> None:
    """Adds `proxy` to the `bench` command."""
    app.command(name="proxy")(proxy)


def main() -> None:
    typer.run(proxy)


def proxy(
    upstream: Annotated[
        list[str] | None,
        typer.Option(envvar="CAPTURE_UPSTREAM", help="The engine, http://HOST:PORT/v1. Again for each replica."),
    ] = None,
    upstream_key: Annotated[
        str | None, typer.Option(envvar="CAPTURE_UPSTREAM_KEY", help="The engine's API key; no agent ever sees it.")
    ] = None,
    out: Annotated[
        Path,
        typer.Option(envvar="CAPTURE_OUT", help="Folder for journals: OUT/default/trajectory/llm_trajectory.jsonl."),
    ] = Path("captures"),
    host: Annotated[str, typer.Option(envvar="CAPTURE_HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="CAPTURE_PORT", help="Port to listen on; 0 takes a free one.")] = 8100,
    key: Annotated[
        str | None,
        typer.Option(envvar="CAPTURE_KEY", help="Key agents must send; needed beyond loopback."),
    ] = None,
    engine: Annotated[
        str, typer.Option(envvar="CAPTURE_ENGINE", help="auto, vllm, sglang, llamacpp, or other (text and usage only).")
    ] = "auto",
    model: Annotated[
        str | None, typer.Option(envvar="CAPTURE_MODEL", help="Send this model name whatever the agent asks for.")
    ] = None,
    probe: Annotated[
        bool, typer.Option(envvar="CAPTURE_PROBE", help="Make one tiny call at start and say what is captured.")
    ] = True,
    buffered: Annotated[
        bool,
        typer.Option(envvar="CAPTURE_BUFFERED", help="Call the engine unstreamed; agents still get a stream."),
    ] = False,
    fsync: Annotated[
        bool, typer.Option(envvar="CAPTURE_FSYNC", help="Sync each line to disk before the reply ends.")
    ] = False,
    token_in: Annotated[
        str,
        typer.Option(envvar="CAPTURE_TOKEN_IN", help=MODES_HELP),
    ] = "off",
    policy_version: Annotated[
        str | None, typer.Option(envvar="CAPTURE_POLICY_VERSION", help="Version of the weights, stamped on each call.")
    ] = None,
    sampling: Annotated[
        str | None,
        typer.Option(
            envvar="CAPTURE_SAMPLING", help='Defaults for calls that set none, as JSON: {"temperature": 1.0}.'
        ),
    ] = None,
    admin_host: Annotated[
        str, typer.Option(envvar="CAPTURE_ADMIN_HOST", help="Address of the admin routes.")
    ] = "127.0.0.1",
    admin_port: Annotated[
        int | None, typer.Option(envvar="CAPTURE_ADMIN_PORT", help="Open /sessions and /metrics on this port.")
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(envvar="CAPTURE_ADMIN_KEY", help="Key of the admin routes; made and shown if not given."),
    ] = None,
    workers: Annotated[
        int, typer.Option(envvar="CAPTURE_WORKERS", help="Processes; each session lives in one of them (Linux).")
    ] = 1,
    session_idle: Annotated[
        float,
        typer.Option(
            envvar="CAPTURE_SESSION_IDLE",
            help="Seconds without a call after which a session that its address made (/s/NAME/v1) ends; its next call "
            "opens it again, on the same journal. 0: never.",
        ),
    ] = 3600.0,
    history_mb: Annotated[
        int,
        typer.Option(
            envvar="CAPTURE_HISTORY_MB",
            help="Memory for what all sessions remember of their calls (last prompts, token-in, previous_response_id), "
            "in MiB.",
        ),
    ] = 1024,
    max_body_mb: Annotated[
        int, typer.Option(envvar="CAPTURE_MAX_BODY_MB", help="Larger request bodies get 413.")
    ] = 256,
    connect_timeout: Annotated[
        float, typer.Option(envvar="CAPTURE_CONNECT_TIMEOUT", help="Seconds to reach the engine.")
    ] = 10.0,
    first_byte_timeout: Annotated[
        float, typer.Option(envvar="CAPTURE_FIRST_BYTE_TIMEOUT", help="Seconds until the engine's answer begins.")
    ] = 1800.0,
    idle_timeout: Annotated[
        float, typer.Option(envvar="CAPTURE_IDLE_TIMEOUT", help="Seconds between two pieces of an answer.")
    ] = 300.0,
    grace: Annotated[
        float, typer.Option(envvar="CAPTURE_GRACE", help="Seconds that a stop waits for calls in flight.")
    ] = 30.0,
) -> None:
    """Stand between agents and their engine, and write down every token that was sampled.

    Point an agent's OpenAI base URL at http://127.0.0.1:8100/v1. Set BENCHFLOW_CAPTURE_TOKEN_LOGPROBS=0 to record calls
    without asking for tokens, BENCHFLOW_CAPTURE_TOP_LOGPROBS=N for N alternatives a token.
    """
    log_to_stderr()
    try:
        settings = Settings(
            upstream=[url for given in upstream or [] for url in given.replace(",", " ").split()],
            upstream_key=upstream_key or None,
            out=out,
            host=host,
            port=port,
            key=key or None,
            engine=engine,
            model=model or None,
            probe=probe,
            buffered=buffered,
            fsync=fsync,
            capture=read_capture(os.environ, default=True),
            top_logprobs=read_top_logprobs(os.environ),
            token_in=token_in,
            policy_version=policy_version or None,
            sampling=_sampling(sampling),
            admin_host=admin_host,
            admin_port=admin_port,
            admin_key=admin_key or None,
            session_idle=session_idle,
            history_mb=history_mb,
            max_body_mb=max_body_mb,
            connect_timeout=connect_timeout,
            first_byte_timeout=first_byte_timeout,
            idle_timeout=idle_timeout,
            grace=grace,
            workers=workers,
        )
        trim_malloc()
        if settings.workers > 1:
            from proxy.workers.supervisor import (
                start,  # it asks its workers over httpx, which a proxy of one process has no use for
            )

            code = start(settings)
        else:
            run(_serve(settings))
            code = 0
    except ProxyError as error:
        print(f"bench proxy: {error}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(2) from None
    raise typer.Exit(code)


async def _serve(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    made_key = settings.admin_key is None
    async with serve(settings) as proxy:
        tune_gc()
        start_gc_timer()
        say_when_none_are_left()
        default, told = proxy.sessions.default, proxy.sessions
        assert default is not None
        log.info("agents: %s%s", proxy.base_url, "" if settings.key is None else " (with the key you gave)")
        log.info("journal: %s", default.journal.path)
        if proxy.admin_url:
            log.info("admin: %s%s", proxy.admin_url, f" (key {settings.admin_key})" if made_key else "")
        await stop.wait()
        log.info("stopping: finishing calls in flight, at most %g s", settings.grace)
    say_stopped("", told)


def _sampling(text: str | None) -> dict[str, object]:
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"--sampling is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise SettingsError('--sampling must be a JSON object, such as {"temperature": 1.0}')
    if (sentence := misspelt_sampling(value)) is not None:
        raise SettingsError(sentence)
    return value
