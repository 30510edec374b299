"""Groups over HTTP: lines and verdicts, the same key twice, cancelling, deadlines, refusals, and a clean stop."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture.journal.layout import JobDir
from sandbox.service.ledger import Ledger
from tests.sandbox.scripted_engine import ScriptedEngine
from tests.sandbox.service.local_service import KEY
from tests.sandbox.service.support import Model, Service, until, write_tasks
from tests.sandbox.support import WAIT
from tests.schemas import validator
from train import stream_rollouts

pytestmark = pytest.mark.slow


@pytest.fixture
def service(tmp_path: Path, engine: ScriptedEngine) -> Iterator[Service]:
    write_tasks(tmp_path / "tasks", "write-42", "write-it-too")
    with Service(tmp_path, engine, concurrency=4, queue=8) as running:
        yield running


def test_a_group_is_records_and_a_verdict(service: Service) -> None:
    *records, verdict = service.group("g1", size=3, policy_version="7", advantage={"kind": "dr-grpo"})
    assert [record["schema_version"] for record in records] == ["benchflow.rollout-stream.v1"] * 3
    for record in records:
        assert not list(validator("rollout_stream.v1").iter_errors(record))
        assert (record["reward"], record["task"], record["group"]["group"]) == (1.0, "write-42", "g1")
        (sequence,) = record["sequences"]
        assert sum(sequence["completion_mask"]) > 0
        assert {version for segment in record["segments"] for version in segment["policy_versions"]} == {"7"}
    assert sorted(verdict["rollouts"]) == sorted(record["rollout"] for record in records)
    assert (verdict["state"], verdict["advantages"], verdict["advantage_kind"]) == ("complete", [0.0] * 3, "dr-grpo")
    assert [r["group"] for r in service.rollouts()].count({"key": "g1", "index": 1, "size": 3}) == 1


def test_a_group_controls_its_sessions_and_is_marked_as_an_evaluation(service: Service, engine: ScriptedEngine) -> None:
    controls = {
        "purpose": "eval",
        "max_calls": 1,
        "max_output_tokens": 64,
        "sampling": {"temperature": 0.5, "top_k": 3},
    }
    *records, verdict = service.group("eval", size=2, **controls)
    assert verdict["purpose"] == "eval" and {record["purpose"] for record in records} == {"eval"}
    assert all(record["token_capture"]["training_grade"] for record in records)
    assert {record["token_capture"]["budget"] for record in records} == {"max_calls 1"}
    asked = [body for body in engine.seen if body.get("tools")]
    assert {(body["temperature"], body["top_k"], body["max_tokens"]) for body in asked} == {(0.5, 3, 64)}
    for result in service.rollouts():
        assert (result["purpose"], result["stop_reason"], result["error"]) == ("eval", "budget_reached", None)
        assert result["budget"]["reached"] == "max_calls" and result["token_capture"]["calls"] == 1
    assert len(service.group("train", size=2)) == 3
    assert {record["group"]["group"] for record in stream_rollouts(service.job, follow=False)} == {"train"}


def test_the_same_key_joins_and_nothing_runs_twice(service: Service) -> None:
    answers: list[list[dict[str, Any]]] = []
    threads = [threading.Thread(target=lambda: answers.append(service.group("same"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert len(answers) == 4 and all(answer == answers[0] for answer in answers)
    assert len(service.rollouts()) == 2
    assert service.group("same") == answers[0]
    skipped = service.http.get("/groups/same?from=2").text.splitlines()
    assert [json.loads(line) for line in skipped] == answers[0][2:]
    assert service.http.get("/groups/same?from=3").text == ""
    refused = service.post(key="same", task="write-42", size=3)
    assert refused.status_code == 409 and "other fields" in refused.json()["error"]["message"]


def test_a_trainer_that_leaves_comes_back(service: Service, model: Model) -> None:
    model.gate.clear()
    with service.http.stream("POST", "/groups", json={"key": "left", "task": "write-42", "size": 2}):
        pass
    model.gate.set()
    assert len(service.group("left")) == 3
    assert len(service.rollouts()) == 2


def test_a_cancelled_group_frees_its_sandboxes(service: Service, model: Model) -> None:
    model.gate.clear()
    lines = service.lines("gone", size=6)
    threading.Thread(target=lambda: next(lines)).start()
    until(lambda: service.http.get("/status").json()["running"] == 4)
    until(lambda: model.calls == 4)
    began = time.monotonic()
    assert service.http.delete("/groups/gone").json()["state"] in ("open", "cancelled")
    until(lambda: service.http.get("/groups").json()["groups"][0]["state"] == "cancelled")
    assert time.monotonic() - began < 30
    status = service.http.get("/status").json()
    assert (status["running"], status["queued"]) == (0, 0)
    assert (status["logprobs"]["temperature"], status["logprobs"]["source"]) == ("not_applied", "probe")
    assert service.rollouts() == []
    model.gate.set()
    assert service.group("next")[-1]["state"] == "complete"


def test_a_cancelled_group_stays_cancelled_after_a_kill(service: Service, model: Model) -> None:
    model.gate.clear()
    lines = service.lines("gone", size=2)
    threading.Thread(target=lambda: suppressed(lines)).start()
    until(lambda: model.calls == 2)
    service.process.send_signal(signal.SIGSTOP)  # so that the kill comes before the verdict
    with (service.job / "groups.jsonl").open("ab") as file:
        file.write(b'{"cancel": "gone"}\n')
    service.kill(signal.SIGKILL)
    model.gate.set()
    service.start(resume=True)
    (verdict,) = service.group("gone", size=2)
    assert (verdict["state"], service.rollouts()) == ("cancelled", [])


def test_a_deadline_withholds_what_is_not_whole(service: Service, model: Model) -> None:
    model.gate.clear()
    (verdict,) = service.group("late", deadline=1.5)
    assert (verdict["state"], verdict["reason"]) == ("withheld", "group_incomplete")
    assert verdict["detail"] == ("the group's deadline of 1.5 s passed when 0 of the group's 2 rollouts had finished")
    model.gate.set()


@pytest.mark.parametrize("error", ["\ud83d alone", 2**70])
def test_a_record_is_sent_whatever_its_texts_hold(service: Service, error: object) -> None:
    service.group("odd", size=1)
    (path,) = service.job.glob("*/result.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"error": error, "export_error": error}))
    lines = service.http.get("/groups/odd").text.splitlines()
    assert [json.loads(line)["schema_version"] for line in lines] == [
        "benchflow.rollout-stream.v1",
        "benchflow.group-verdict.v1",
    ]
    assert "Traceback" not in service.log.read_text()


def test_a_seed_picks_one_task_for_the_whole_group(service: Service) -> None:
    for seed, task in ((0, "write-42"), (1, "write-it-too"), (7, "write-it-too"), (-2, "write-42")):
        verdict = service.group(f"seed{seed}", task=None, seed=seed, size=1)[-1]
        assert verdict["task"] == task


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"key": "k", "task": "write-43"}, 404, "there is no task 'write-43' here; this service has write-42"),
        ({"task": "write-42"}, 400, "`key` must be"),
        ({"key": "a b", "task": "write-42"}, 400, "`key` must be"),
        ({"key": "k", "task": "write-42", "size": 0}, 400, "`size` must be"),
        ({"key": "k", "task": "write-42", "size": True}, 400, "`size` must be"),
        ({"key": "k", "task": "write-42", "size": 9}, 400, "does not fit into the queue of 8"),
        ({"key": "k"}, 400, "give the name of a `task`"),
        ({"key": "k", "seed": "1"}, 400, "give the name of a `task`"),
        ({"key": "k", "task": "write-42", "deadline": -1}, 400, "`deadline` must be"),
        ({"key": "k", "task": "write-42", "sampling": 3}, 400, "is of the wrong type"),
        ({"key": "k", "task": "write-42", "advantage": {"kind": "ppo"}}, 400, "--advantage must be one of"),
        ({"key": "k", "task": "write-42", "advantage": [1]}, 400, "`advantage` must be"),
        ({"key": "k", "task": "write-42", "sise": 3}, 400, "unknown field 'sise'"),
        ({"key": "..", "task": "write-42"}, 400, "`key` must be"),
        ({"key": "k", "task": "write-42", "policy_version": True}, 400, "is of the wrong type"),
        ({"key": "k", "task": "write-42", "policy_version": "a\x1b[31m"}, 400, "a policy version must be"),
        ({"key": "k", "task": "write-42", "sampling": {"temperature": "1"}}, 400, "temperature: give a number"),
        ({"key": "k", "task": "write-42", "deadline": 1e308}, 400, "at most 31536000, not 1e+308"),
        ({"key": "k", "task": "write-42", "advantage": {"kind": []}}, 400, "`kind` must be a name"),
        ({"key": "k", "task": "write-42", "advantage": {"eps": "x"}}, 400, "`eps` a number"),
        ({"key": "k", "task": "write-42", "advantage": {"eps": True}}, 400, "`eps` a number"),
        ({"key": "k", "task": "write-42", "advantage": {"ddof": 1.0}}, 400, "`ddof` 0 or 1"),
        ([1], 400, "no JSON object"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(
    shared_service: Service, body: Any, status: int, sentence: str
) -> None:
    reply = shared_service.http.post("/groups", json=body)
    assert reply.status_code == status
    assert sentence in reply.json()["error"]["message"]


@pytest.fixture(scope="module")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """For requests that start nothing."""
    folder = tmp_path_factory.mktemp("shared")
    write_tasks(folder / "tasks")
    with ScriptedEngine(Model()) as engine, Service(folder, engine, queue=8) as running:
        yield running


def test_keys_and_unknown_groups(shared_service: Service) -> None:
    bare = httpx.Client(base_url=shared_service.url, trust_env=False)
    assert bare.get("/health").json() == {"status": "ok"}
    for path in ("/tasks", "/status", "/groups", "/metrics", "/groups/x"):
        reply = bare.get(path, headers={"authorization": "Bearer wrong"})
        assert reply.status_code == 401 and "needs its key" in reply.json()["error"]["message"]
    assert shared_service.http.get("/groups/x").status_code == 404
    assert shared_service.http.delete("/groups/x").status_code == 404
    (task,) = shared_service.http.get("/tasks").json()["tasks"]
    assert task["name"] == "write-42" and "Write 42" in task["prompt"]
    assert "bench_serve_running 0.0" in shared_service.http.get("/metrics").text
    assert shared_service.http.post("/groups", content=b"{").status_code == 400


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nope", 404), ("PUT", "/groups", 405)])
def test_a_route_that_does_not_exist_is_an_error_like_any_other(
    shared_service: Service, method: str, path: str, status: int
) -> None:
    reply = shared_service.http.request(method, path)
    assert reply.status_code == status
    assert reply.json()["error"]["message"] == f"there is no {method} {path} here; docs/serve.md lists the routes"
    assert ("allow" in reply.headers) == (status == 405)


def test_a_client_that_leaves_in_its_body_leaves_no_traceback(shared_service: Service) -> None:
    host, _, port = shared_service.url.removeprefix("http://").partition(":")
    head = f"POST /groups HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 99\r\n\r\n"
    for _ in range(3):
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(head.encode() + b'{"key"')
    assert shared_service.http.get("/status").status_code == 200
    assert "Traceback" not in shared_service.log.read_text()


def test_pauses_that_wait_hold_up_no_other_request(service: Service, model: Model) -> None:
    model.gate.clear()
    threads = [threading.Thread(target=lambda: suppressed(service.lines("held", size=1)), daemon=True)]
    threads[0].start()
    until(lambda: model.calls == 1)
    for _ in range(40):  # more than the event loop has threads of its own
        threads.append(threading.Thread(target=lambda: service.http.post("/pause", json={"wait": WAIT}), daemon=True))
        threads[-1].start()
    until(lambda: service.http.get("/status", timeout=WAIT / 2).json()["paused"])
    assert service.http.post("/resume", timeout=WAIT / 2).json() == {"paused": False}
    model.gate.set()
    for thread in threads:
        thread.join(WAIT)


def test_a_group_that_ended_leaves_no_timer(service: Service) -> None:
    def threads() -> int:
        return len(list(Path(f"/proc/{service.process.pid}/task").iterdir()))

    service.group("warm", size=4)
    before = threads()
    for number in range(5):
        service.group(f"k:smile:{number}", size=1, deadline=86400)
    assert threads() - before < 5
    assert "group k:smile:0: complete" in service.log.read_text()


def test_a_full_queue_says_when_to_ask_again(service: Service, model: Model) -> None:
    model.gate.clear()
    with service.http.stream("POST", "/groups", json={"key": "a", "task": "write-42", "size": 8}):
        until(lambda: service.http.get("/status").json()["running"] == 4)
        with service.http.stream("POST", "/groups", json={"key": "b", "task": "write-42", "size": 4}):
            refused = service.post(key="c", task="write-42", size=1)
            assert refused.status_code == 429 and refused.headers["retry-after"] == "5"
            assert "8 rollouts wait and 4 run" in refused.json()["error"]["message"]
    model.gate.set()


def test_a_new_policy_reaches_rollouts_that_run(service: Service, model: Model) -> None:
    model.gate.clear()
    lines = service.lines("moved", size=1, policy_version="1")
    records: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: records.extend(lines))
    thread.start()
    until(lambda: model.calls == 1)
    assert service.http.post("/policy", json={"version": 2}).json() == {"policy_version": "2"}
    model.gate.set()
    thread.join(WAIT)
    assert [span["policy_versions"] for span in records[0]["segments"]] == [["1", "2"]]
    assert service.http.post("/policy", json={}).status_code == 400


def test_a_job_folder_like_any_other(service: Service) -> None:
    service.group("one")
    service.group("two")
    rows = list(stream_rollouts(service.job, follow=False, group_size=2))
    assert sorted(row["group"]["group"] or "" for row in rows) == ["one", "one", "two", "two"]
    assert all(row["advantage"] == 0.0 for row in rows)
    assert service.kill(signal.SIGTERM) == 143
    assert json.loads((service.job / "summary.json").read_text())["passed"] == 4
    assert not (service.job / ".evaluation.lock").exists()


def test_a_stop_lets_rollouts_end_and_a_restart_goes_on(service: Service, model: Model) -> None:
    model.gate.clear()
    lines = service.lines("half", size=6)
    received: list[dict[str, Any]] = []

    def read() -> None:
        received.extend(lines)

    thread = threading.Thread(target=read)
    thread.start()
    until(lambda: model.calls == 4)
    service.process.send_signal(signal.SIGTERM)
    until(lambda: "stopping; rollouts that run may end" in service.log.read_text())
    assert service.post(key="new", task="write-42").status_code == 503
    model.gate.set()
    thread.join(WAIT)
    assert service.kill(signal.SIGTERM) == 143
    assert len(received) == 4 and len(service.rollouts()) == 4
    assert "--resume continues" in service.log.read_text()
    service.start(resume=True)
    *records, verdict = service.group("half", size=6)
    assert len(records) == 6 and verdict["state"] == "complete"
    assert len(service.rollouts()) == 6


def test_a_second_signal_ends_what_runs(tmp_path: Path, engine: ScriptedEngine, model: Model) -> None:
    write_tasks(tmp_path / "tasks")
    model.gate.clear()
    with Service(tmp_path, engine, grace=WAIT * 2) as service:
        threading.Thread(target=suppressed, args=[service.lines("cut", size=2)]).start()
        until(lambda: model.calls == 2)
        service.process.send_signal(signal.SIGTERM)
        until(lambda: "stopping; rollouts that run may end" in service.log.read_text())
        assert service.kill(signal.SIGTERM) == 143
        model.gate.set()
        assert service.rollouts() == []
        assert "1 group is not finished; --job job --resume continues" in service.log.read_text()


@pytest.mark.parametrize("wait", [0.0, 0.3, 0.8])
def test_a_killed_service_continues_its_groups(service: Service, model: Model, wait: float) -> None:
    before = service.group("before")
    lines = service.lines("cut", size=6)
    threading.Thread(target=lambda: suppressed(lines)).start()
    until(lambda: any(group["key"] == "cut" for group in service.http.get("/groups").json()["groups"]))
    time.sleep(wait)  # a kill at another moment
    service.kill(signal.SIGKILL)
    service.start(resume=True)
    assert service.group("before") == before
    *records, verdict = service.group("cut", size=6)
    assert len(records) == 6 and verdict["state"] == "complete"
    finished = [result["group"] for result in service.rollouts()]
    assert sorted(group["index"] for group in finished if group["key"] == "cut") == list(range(6))


def suppressed(lines: Iterator[dict[str, Any]]) -> None:
    with contextlib.suppress(httpx.HTTPError):
        list(lines)


def test_a_killed_service_knows_which_policy_it_serves(service: Service, model: Model) -> None:
    model.gate.clear()
    lines = service.lines("old", size=1, policy_version="1")
    threading.Thread(target=lambda: suppressed(lines)).start()
    until(lambda: model.calls == 1)
    service.http.post("/policy", json={"version": "2"})
    later = service.lines("new", size=1, policy_version="2b")
    threading.Thread(target=lambda: suppressed(later)).start()
    until(lambda: model.calls == 2)
    service.kill(signal.SIGKILL)
    model.gate.set()
    service.start(resume=True)
    assert service.http.get("/status").json()["policy_version"] == "2"
    stamped = {
        key: service.group(key, size=1, policy_version=version)[0]["segments"][0]["policy_versions"]
        for key, version in (("old", "1"), ("new", "2b"))
    }
    assert stamped == {"old": ["2"], "new": ["2b"]}


def test_a_client_that_does_not_read_holds_up_no_stop(service: Service) -> None:
    service.group("long", size=2)
    for path in service.job.glob("*/result.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"error": "x" * 8_000_000}))
    host, _, port = service.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(f"GET /groups/long HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode())
        assert sock.recv(10)
        assert service.kill(signal.SIGTERM) == 143
    assert "Traceback" not in service.log.read_text()


def test_a_restart_keeps_the_order_of_the_lines(service: Service) -> None:
    """Though a disk may say that the rollouts finished in another one."""
    before = service.group("before", size=3)
    service.kill(signal.SIGKILL)
    for place, record in enumerate(before[:-1]):
        os.utime(service.job / record["rollout"] / "result.json", (1e9 - place, 1e9 - place))
    service.start(resume=True)
    assert service.group("before", size=3) == before


def test_a_torn_line_of_the_ledger_is_left_out(service: Service) -> None:
    service.group("whole")
    service.kill(signal.SIGKILL)
    with (service.job / "groups.jsonl").open("ab") as file:
        file.write(b'{"request": {"key": "to')
    service.start(resume=True)
    assert [group["key"] for group in service.http.get("/groups").json()["groups"]] == ["whole"]
    assert service.group("after")[-1]["state"] == "complete"


@pytest.mark.parametrize(
    "line",
    [
        {"policy": {}},
        {"policy": {"version": None}},
        {"verdict": {"key": "whole"}},
        {"verdict": {"key": "whole", "state": [1]}},
        {"verdict": {"state": "complete"}},
        {"request": 5},
        [1],
    ],
)
def test_a_line_of_the_ledger_that_is_none_is_left_out(tmp_path: Path, line: Any) -> None:
    ledger = Ledger(JobDir(tmp_path))
    ledger.change_policy("1", None, None)
    ledger.accept({"key": "whole"}, "write-42")
    ledger.end({"key": "whole", "state": "complete"})
    ledger.close()
    with ledger.path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    read = Ledger(JobDir(tmp_path))
    read.close()
    assert (read.policy or {})["version"] == "1" and read.tasks == {"whole": "write-42"}
    assert read.ended == {"whole": {"key": "whole", "state": "complete"}} and list(read.accepted) == ["whole"]


def test_a_group_that_a_seed_picked_keeps_its_task_when_the_job_has_others(service: Service, model: Model) -> None:
    model.gate.clear()
    threading.Thread(target=lambda: suppressed(service.lines("picked", task=None, seed=1, size=2))).start()
    until(lambda: model.calls == 2)
    service.kill(signal.SIGKILL)
    model.gate.set()
    write_tasks(service.folder / "tasks", "a-new-one")
    service.start(resume=True)
    assert service.group("picked", task=None, seed=1, size=2)[-1]["task"] == "write-it-too"
    service.kill(signal.SIGKILL)
    shutil.rmtree(service.folder / "tasks" / "write-it-too")
    with pytest.raises(
        AssertionError, match=r"the group picked of .*groups.jsonl cannot be continued \(there is no task"
    ):
        service.start(resume=True)


def test_a_dead_engine_is_the_groups_trouble(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks")
    with ScriptedEngine(Model()) as engine:
        service = Service(tmp_path, engine, retries=0).start()
    try:
        *records, verdict = service.group("dead")
        assert all(record["reward"] is None or not record["sequences"] for record in records)
        assert verdict["state"] == "withheld" and verdict["detail"]
    finally:
        service.kill(signal.SIGKILL)
