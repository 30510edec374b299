"""A disk that is full: what the trainer is told, and that its group is whole or withheld, and counted once."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.scripted_engine import ScriptedEngine
from tests.sandbox.service.support import Model, Service, until, write_tasks
from tests.sandbox.support import WAIT

pytestmark = pytest.mark.slow


@pytest.fixture
def service(tmp_path: Path, engine: ScriptedEngine) -> Iterator[Service]:
    write_tasks(tmp_path / "tasks")
    with Service(tmp_path, engine, concurrency=2, retries=0) as running:
        yield running


@contextlib.contextmanager
def full_disk(service: Service) -> Iterator[None]:
    """A limit of zero bytes on the size of files replaces the disk."""
    soft, hard = resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (0, hard))
    yield
    resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (soft, hard))


def test_a_group_is_refused_in_one_sentence_and_accepted_when_there_is_space(service: Service) -> None:
    with full_disk(service):
        refused = service.post(key="g", task="write-42", size=2)
        policy = service.http.post("/policy", json={"version": "2"})
    assert refused.status_code == policy.status_code == 507
    assert "the group is not accepted: cannot write" in refused.json()["error"]["message"]
    assert "the policy is not changed: cannot write" in policy.json()["error"]["message"]
    assert service.http.get("/groups").json() == {"groups": []}
    *records, verdict = service.group("g")
    assert len(records) == 2 and verdict["state"] == "complete"
    assert service.http.get("/status").json()["policy_version"] != "2"


def test_a_group_whose_rollouts_cannot_be_written_is_withheld(service: Service, model: Model) -> None:
    model.gate.clear()
    lines: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: lines.extend(service.lines("g")))
    thread.start()
    until(lambda: model.calls == 2)
    with full_disk(service):
        model.gate.set()
        thread.join(WAIT)
    *records, verdict = lines
    assert verdict["state"] == "withheld" and verdict["detail"] and verdict["advantages"] is None
    assert all(not record["sequences"] for record in records)
    assert "Traceback" not in service.log.read_text()
    again = service.group("g")
    assert again[-1] == verdict
    assert max(Counter(result["group"]["index"] for result in service.rollouts()).values(), default=1) == 1
