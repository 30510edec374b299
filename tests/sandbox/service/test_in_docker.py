"""The real thing: `bench serve` with containers, killed in the middle of a group, continued, and stopped."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import docker
import pytest

from benchmarks.proxy.targets import free_port
from benchmarks.serve.processes import KEY, service
from tests.sandbox.scripted_engine import Body, Said, ScriptedEngine, write_the_number
from tests.sandbox.support import WAIT
from train.online.client import RolloutService

pytestmark = pytest.mark.docker


def left(client: docker.DockerClient, job: str) -> list[str]:
    label = {"label": f"benchflow.job={job}"}
    return [row["Id"] for row in client.api.containers(all=True, filters=label)]


def test_a_killed_service_leaves_no_container_and_finishes_its_group(
    tmp_path: Path, docker_client: docker.DockerClient
) -> None:
    begun, gate = threading.Event(), threading.Event()

    def script(body: Body) -> Said:
        begun.set()
        assert gate.wait(WAIT)
        return write_the_number(body)

    job = f"served-{time.time_ns()}"
    with ScriptedEngine(script) as engine:
        serving = service(engine.base_url, tmp_path, free_port(), "--concurrency", "2", job=job)
        serving.start()
        client = RolloutService(serving.ready.removesuffix("/health"), KEY)
        got: list[dict[str, object]] = []
        group = client.group(key="g", task="write-number", size=3)
        reader = threading.Thread(target=lambda: got.extend(group))  # type: ignore[arg-type]
        reader.start()
        assert begun.wait(WAIT)
        serving.kill()
        assert left(docker_client, job)
        gate.set()
        serving.start("--resume")
        reader.join(WAIT)
        assert len(got) == 3 and group.verdict is not None
        assert (group.verdict["state"], group.verdict["advantages"]) == ("complete", [0.0] * 3)

        gate.clear()
        begun.clear()
        client.group(key="cancelled", task="write-number", size=2).close()
        assert begun.wait(WAIT)
        client.cancel("cancelled")
        while client.status()["running"]:
            time.sleep(0.05)
        assert left(docker_client, job) == []
        gate.set()
        assert serving.stop() == 143
    assert left(docker_client, job) == []
