"""Fixtures that every room may use: the embedded engine and the Docker engine, both real."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from hypothesis import settings

from sandbox.embedded_engine import EmbeddedEngine
from tests.examples import FAST

HERE = Path(__file__).parent
# A shell that starts the tests in the background has Ctrl-C ignored, and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile(FAST, max_examples=25, deadline=None)
#: For a test of `make live` alone. The engine's start is not counted: it has a bound of its own.
LIVE_SECONDS = 900
#: Task folders that the sandbox tests run agents on; their tests run inside a container.
collect_ignore_glob = ["sandbox/tasks/*", "tasks/*"]


@pytest.fixture(scope="session")
def engine() -> Iterator[EmbeddedEngine]:
    """llama.cpp with SmolLM2-135M-Instruct on a free port of this machine: `.base_url`, `.model`."""
    with EmbeddedEngine() as running:
        yield running


@pytest.fixture(scope="session")
def docker_client() -> Iterator[docker.DockerClient]:
    """This machine's Docker engine. Without one the test is skipped on a person's machine and fails in CI."""
    try:
        client = docker.from_env()
        client.ping()
    except docker.errors.DockerException as error:
        reason = f"no Docker engine answers ({error}): start Docker, or see .ci/run"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    yield client
    client.close()


def pytest_collection_finish() -> None:
    """A million objects of imported modules are no garbage: no collection looks at them again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Markers follow from a test's fixtures and its folder, so that none is forgotten."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "engine" in fixtures:
            item.add_marker("engine")
        if "docker_client" in fixtures:
            item.add_marker("docker")
        if "browser" in fixtures:
            item.add_marker("browser")
        if HERE / "proxy/workers" in item.path.parents:
            item.add_marker("workers")
        if HERE / "live" in item.path.parents:
            item.add_marker("live")
            limit = item.get_closest_marker("timeout")
            seconds = limit.args[0] if limit is not None else LIVE_SECONDS
            item.add_marker(pytest.mark.timeout(seconds, func_only=True), append=False)
