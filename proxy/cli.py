"""`bench proxy`: the stand-alone proxy's command line. Every option has an environment variable."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from proxy.env import read_capture, read_top_logprobs
from proxy.runtime.fd_limits import log_when_none_are_left
from proxy.runtime.logs import log_to_stderr
from proxy.runtime.loop import run
from proxy.runtime.memory import start_gc_timer, trim_malloc, tune_gc
from proxy.sampling import read_sampling
from proxy.server import serve
from proxy.sessions.registry import say_stopped
from proxy.settings import Settings

log = logging.getLogger("proxy")
app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


def proxy(**options: Any) -> None:
    """Proxy agents' calls to their engine, and record every token that was sampled.

    Point an agent's OpenAI base URL at http://127.0.0.1:8100/v1. Set BENCHFLOW_CAPTURE_TOKEN_LOGPROBS=0 to record calls
    without asking for tokens, BENCHFLOW_CAPTURE_TOP_LOGPROBS=N for N alternatives per token.
    """
    log_to_stderr()
    settings = read_settings(options, os.environ)
    trim_malloc()
    if settings.workers > 1:
        # It imports httpx, which a single process has no use for.
        from proxy.workers.supervisor import start

        code = start(settings)
    else:
        run(_serve(settings))
        code = 0
    raise typer.Exit(code)


def _signature() -> inspect.Signature:
    """An option and its environment variable for each setting that has a help text."""
    kinds = get_type_hints(Settings) | {"sampling": str | None, "force_sampling": str | None}
    kinds |= {name: list[str] | None for name, kind in kinds.items() if kind == list[str]}
    return inspect.Signature(
        [
            inspect.Parameter(
                setting.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=setting.metadata["default"],
                annotation=Annotated[
                    kinds[setting.name],
                    typer.Option(envvar=f"CAPTURE_{setting.name.upper()}", help=setting.metadata["help"]),
                ],
            )
            for setting in fields(Settings)
            if "help" in setting.metadata
        ]
    )


proxy.__signature__ = _signature()  # type: ignore[attr-defined]
app.command("proxy")(proxy)


def read_settings(options: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """The settings of the command's options and the two variables for capture. Raises `SettingsError`."""
    given = {name: value for name, value in options.items() if value not in (None, "")}
    for name in ("upstream", "forward_header"):  # several words of one variable, or several options
        given[name] = [item for word in given.get(name, ()) for item in word.replace(",", " ").split()]
    for name, word in (("sampling", "--sampling"), ("force_sampling", "--force-sampling")):
        given[name] = read_sampling([given[name]] if name in given else [], word)
    return Settings(**given, capture=read_capture(environ, default=True), top_logprobs=read_top_logprobs(environ))


async def _serve(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    made_key = settings.admin_key is None
    async with serve(settings) as proxy:
        tune_gc()
        start_gc_timer()
        log_when_none_are_left()
        default, sessions = proxy.sessions.default, proxy.sessions
        assert default is not None
        log.info("agents: %s%s", proxy.base_url, "" if settings.key is None else " (with the key you gave)")
        log.info("journal: %s", default.journal.path)
        if proxy.admin_url:
            log.info("admin: %s%s", proxy.admin_url, f" (key {proxy.settings.admin_key})" if made_key else "")
        await stop.wait()
        log.info("stopping: finishing calls in flight, at most %g s", settings.grace)
    say_stopped("", sessions)
