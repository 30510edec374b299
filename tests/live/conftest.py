"""Real vLLM and SGLang on the CPU for `make live`: started once, on a free port, and ended with all their processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "engines"
READY_SECONDS = 600


@dataclass(frozen=True)
class LiveEngine:
    """A real engine: `base_url` ends in `/v1`; `weights` is the float32 Hugging Face folder that it serves."""

    name: str
    base_url: str
    api_key: str | None
    model: str
    weights: Path
    python: Path
    log: Path


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    with serving("vllm", "dummy-key", tmp_path_factory.mktemp("vllm")) as engine:
        yield engine


@pytest.fixture(scope="session")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    with serving("sglang", None, tmp_path_factory.mktemp("sglang")) as engine:
        yield engine


@contextmanager
def serving(name: str, api_key: str | None, folder: Path, *arguments: str) -> Iterator[LiveEngine]:
    """Runs `engines/NAME-cpu.sh serve` with `arguments`; the block starts when GET /health answers."""
    home = Path.home() / ".cache"
    python = home / f"capture-{name}" / "venv" / "bin" / "python"
    weights = home / "capture-vllm" / "model"
    for needed in (python, weights):
        if not needed.exists():
            pytest.fail(f"{needed} is missing: `make live` installs it (about 3 GB, once)")
    port, log = free_port(), folder / "engine.log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            ["sh", SCRIPTS / f"{name}-cpu.sh", "serve", *arguments],
            env={**os.environ, "PORT": str(port)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_ready(child, f"http://127.0.0.1:{port}/health", log)
        yield LiveEngine(name, f"http://127.0.0.1:{port}/v1", api_key, "my-policy", weights, python, log)
    finally:
        end_group(child)


def wait_ready(child: subprocess.Popen[bytes], health: str, log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if child.poll() is not None:
            pytest.fail(f"the engine ended with code {child.returncode}: {tail(log)}")
        with suppress(OSError), urllib.request.urlopen(health, timeout=5):
            return
        time.sleep(1)
    pytest.fail(f"the engine was not ready in {READY_SECONDS} s: {tail(log)}")


def end_group(child: subprocess.Popen[bytes]) -> None:
    """Ends the whole process group, since engines fork workers: SIGTERM first, then SIGKILL."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            child.wait(20)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]
