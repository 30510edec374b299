"""New weights while rollouts run: calls held and made to the new version, and the service's own engine reloaded."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from capture.journal.journal import JournalReader
from sandbox.embedded_engine import find_weights
from tests.sandbox.scripted_engine import ScriptedEngine
from tests.sandbox.service.support import Model, Service, until, write_tasks
from tests.sandbox.support import WAIT

pytestmark = pytest.mark.slow


@pytest.fixture
def service(tmp_path: Path, engine: ScriptedEngine) -> Iterator[Service]:
    write_tasks(tmp_path / "tasks")
    with Service(tmp_path, engine, concurrency=4, queue=8) as running:
        yield running


def started(service: Service, key: str, **fields: Any) -> tuple[threading.Thread, list[dict[str, Any]]]:
    lines: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: lines.extend(service.group(key, **fields)))
    thread.start()
    return thread, lines


def versions(service: Service) -> set[str]:
    """Those that the calls of all rollouts were made to."""
    journals = service.job.glob("*/trajectory/llm_trajectory.jsonl")
    return {str(call.metadata["policy_version"]) for path in journals for call in JournalReader(path)}


def test_rollouts_wait_while_the_engine_is_paused_and_go_on_with_the_new_version(
    service: Service, model: Model
) -> None:
    assert service.http.post("/pause", json={"wait": 5}).json() == {"in_flight": 0}
    thread, lines = started(service, "paused", size=2)
    until(lambda: service.http.get("/status").json()["running"] == 2)
    time.sleep(0.5)
    assert model.calls == 0
    assert service.http.post("/resume", json={"version": "8"}).json() == {"paused": False}
    thread.join(WAIT)
    assert lines[-1]["state"] == "complete"
    assert versions(service) == {"8"}
    assert service.http.get("/status").json()["policy_version"] == "8"


def test_calls_in_flight_end_with_the_old_version_and_those_after_them_have_the_new_one(
    service: Service, model: Model
) -> None:
    model.gate.clear()
    thread, lines = started(service, "slow", size=2)
    until(lambda: model.calls == 2)
    assert service.http.post("/pause", json={"wait": 0.1}).json() == {"in_flight": 2}
    model.gate.set()
    assert service.http.post("/pause", json={"wait": WAIT}).json() == {"in_flight": 0}
    assert service.http.get("/status").json()["paused"] is True
    assert service.http.post("/resume", json={"version": "8"}).status_code == 200
    thread.join(WAIT)
    *records, verdict = lines
    assert verdict["state"] == "complete"
    for record in records:  # its first call was made before, the others after
        (sequence,) = record["sequences"]
        spans = [(span["policy_version"], span["policy_version_end"]) for span in sequence["version_spans"]]
        assert spans == [("0", None), *[("8", None)] * (len(spans) - 1)] and len(spans) > 1


def test_a_policy_with_a_name_of_its_own_reaches_rollouts_that_run(service: Service, model: Model) -> None:
    service.http.post("/pause", json={"wait": 5})
    thread, lines = started(service, "lora", size=1)
    until(lambda: service.http.get("/status").json()["running"] == 1)
    assert service.http.post("/policy", json={"model": "lora-v9"}).json() == {"policy_version": "9", "model": "lora-v9"}
    service.http.post("/resume")
    thread.join(WAIT)
    assert versions(service) == {"9"} and lines[-1]["state"] == "complete"
    (journal,) = service.job.glob("*/trajectory/llm_trajectory.jsonl")
    assert {call.metadata["provider_model"] for call in JournalReader(journal)} == {"lora-v9"}


@pytest.mark.parametrize(
    ("route", "body", "status", "words"),
    [
        ("/pause", {"wait": "x"}, 400, "`wait` is a number"),
        ("/resume", {"version": None}, 400, "give the policy's version"),
        ("/policy", {}, 400, "give the policy's version"),
        ("/weights", {"path": "/x.gguf"}, 400, "give the policy's version"),
        ("/weights", {"path": "/x.gguf", "version": "1"}, 409, "does not run its engine itself"),
    ],
)
def test_what_cannot_be_done_is_said(service: Service, route: str, body: Any, status: int, words: str) -> None:
    answer = service.http.post(route, json=body)
    assert answer.status_code == status and words in answer.json()["error"]["message"]
    assert service.http.post(route, json=body, headers={"authorization": "Bearer x"}).status_code == 401


def test_the_services_own_engine_serves_new_weights_while_a_rollout_runs(tmp_path: Path, model: Model) -> None:
    write_tasks(tmp_path / "tasks")
    copy, torn = tmp_path / "step-8.gguf", tmp_path / "torn.gguf"
    copy.symlink_to(find_weights())
    torn.write_bytes(b"GGUF" + bytes(100))
    agent_env = {"MINI_MAX_TOKENS": "16", "MINI_STEPS": "2"}
    with (
        ScriptedEngine(model) as unused,
        Service(tmp_path, unused, concurrency=2, gguf=str(find_weights()), agent_env=agent_env) as service,
    ):
        for body, status, words in (
            ({"path": str(torn)}, 400, "the old weights stay in use"),
            ({"path": str(tmp_path / "none.gguf")}, 400, "there is no file"),
            ({"path": 7}, 400, "give the path of a GGUF file"),
        ):
            answer = service.http.post("/weights", json={**body, "version": "8"})
            assert answer.status_code == status and words in answer.json()["error"]["message"], answer.text
        assert service.http.get("/status").json()["policy_version"] == "0"
        thread, lines = started(service, "g", size=2)
        until(lambda: len(list(service.job.glob("*/trajectory/llm_trajectory.jsonl"))) == 2)
        loaded = service.http.post("/weights", json={"path": str(copy), "version": "8"}, timeout=WAIT)
        assert loaded.json() == {"policy_version": "8"}, loaded.text
        thread.join(WAIT)
        assert lines[-1]["schema_version"] == "benchflow.group-verdict.v1"
        *records, verdict = service.group("after", size=1)
        assert {v for record in records for segment in record["segments"] for v in segment["policy_versions"]} == {"8"}
        journals = service.job.glob("*/trajectory/llm_trajectory.jsonl")
        calls = [call for path in journals for call in JournalReader(path)]
        assert all(call.outcome == "ok" and call.metadata["policy_version_end"] is None for call in calls)
        assert {call.metadata["policy_version"] for call in calls} <= {"0", "8"}
    assert verdict["size"] == 1
