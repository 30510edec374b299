"""AsyncGRPO's rollout worker: the fields that TRL reads, the order of rows, and how it ends."""

from __future__ import annotations

import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.train.build import broken, conversation
from tests.train.online.groups import TWO_THREADS, records_of
from tests.train.online.scripted_service import KEY, Answer, ndjson, ok, refusal, scripted_service, verdict
from train.errors import BadInput, ServiceError, ServiceRefused, ServiceUnavailable
from train.online.client import RolloutService
from train.online.trl import RolloutWorker, samples, task_prompts

PLAIN = {"sent": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}}


def until(happened: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def worker(url: str, **options: Any) -> RolloutWorker:
    service = RolloutService(url, KEY, patience=options.pop("patience", 0.5))
    options = {"num_generations": 2, "concurrent_groups": 1, "sample_type": SimpleNamespace, **options}
    return RolloutWorker(service, **options)


def versioned(*versions: str) -> list[dict[str, Any]]:
    calls = conversation(len(versions), sampling=PLAIN)
    for call, version in zip(calls, versions, strict=True):
        call["metadata"]["policy_version"] = version
    return calls


class Groups:
    """Answers each POST /groups with the same records; `requests` are the bodies."""

    def __init__(self, records: list[dict[str, Any]], **given: Any) -> None:
        self.records, self.given = records, given
        self.requests: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self.versions: list[str] = []

    def __call__(self, method: str, path: str, body: Any) -> Answer:
        if method == "DELETE":
            self.cancelled.append(path.rpartition("/")[2])
            return ok({})
        if path == "/policy":
            self.versions.append(body["version"])
            return ok({})
        self.requests.append(body)
        return 200, {}, ndjson(*self.records[::-1], verdict(body["key"], self.records, **self.given))


def take(running: RolloutWorker, number: int) -> list[Any]:
    return [running.rollout_buffer.get(timeout=20) for _ in range(number)]


def test_a_sample_has_the_whole_sequence_and_its_mask(tmp_path: Path) -> None:
    [record] = records_of(tmp_path, [{"calls": versioned("4", "4", "5"), "reward": 0.25}])
    [fields] = samples(record, version=9)
    segment = record["segments"][0]
    prompt = len(segment["prompt_ids"])
    assert fields["input_ids"].tolist() == segment["prompt_ids"] + segment["completion_ids"]
    assert fields["completion_mask"].tolist() == [0] * prompt + segment["action_mask"]
    assert fields["old_log_probs"].tolist() == pytest.approx([0.0] * prompt + segment["logprobs"])
    assert [fields[name].dtype for name in ("input_ids", "completion_mask", "old_log_probs")] == [
        np.int64, np.int64, np.float32,
    ]  # fmt: skip
    assert not fields["old_log_probs"][fields["completion_mask"] == 0].any()
    assert fields["model_version"] == 4
    assert fields["metrics"] == {"reward": 0.25, "rewards/verifier": 0.25}
    assert [message["role"] for message in fields["prompt"]] == ["user"]
    roles = [message["role"] for message in fields["completion"]]
    assert roles == ["assistant", "user", "assistant", "user", "assistant"]


def test_interleaved_agents_and_broken_rollouts_give_a_row_per_exact_sequence(tmp_path: Path) -> None:
    two, parts, unscored = records_of(
        tmp_path, [{"calls": TWO_THREADS}, {"calls": broken(2)}, {"calls": conversation(1), "reward": None}]
    )
    assert [fields["input_ids"][0] for fields in samples(two, 1)] == [100, 500]
    assert [int(fields["completion_mask"].sum()) for fields in samples(parts, 1)] == [4, 4]
    [fields] = samples(unscored, 7)
    assert math.isnan(fields["metrics"]["reward"]) and fields["model_version"] == 7


def test_rows_come_with_the_advantage_of_their_rollout(tmp_path: Path) -> None:
    records = records_of(tmp_path, [{"calls": TWO_THREADS, "reward": 1.0}, {"calls": versioned("2"), "reward": 0.0}])
    groups = Groups(records, advantages=[0.5, -0.5], group_std=0.25)
    with scripted_service(groups) as service:
        running = worker(service.url, tasks=["b", "a"], run="run", group_options={"deadline": 60, "max_calls": 9})
        running.update_model_version(1)
        running.start()
        rows = take(running, 3 * 2)
        running.stop()
        running.check_health(300)
    assert groups.versions == ["1"]
    assert [(row.advantage, row.group_id, row.model_version) for row in rows] == [
        (0.5, 0, 1), (0.5, 0, 1), (-0.5, 0, 2), (0.5, 1, 1), (0.5, 1, 1), (-0.5, 1, 2),
    ]  # fmt: skip
    assert rows[0].metrics == {"reward": 1.0, "rewards/verifier": 1.0, "reward_std": 0.25}
    assert rows[0].metrics is not rows[1].metrics
    assert all(abs(row.enqueued_at - time.time()) < 30 for row in rows)
    assert groups.requests[0] == {
        "key": "run-0", "size": 2, "task": "b", "policy_version": "1", "deadline": 60, "max_calls": 9,
        "purpose": "train", "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
        "advantage": {"kind": "grpo", "ddof": 0, "eps": 1e-8},
    }  # fmt: skip
    assert [request["task"] for request in groups.requests[:2]] == ["b", "a"]
    assert {"rollout/group_s", "rollout/generated_tok_s"} <= set(running.metrics_queue.get_nowait())


def test_each_version_of_an_adapter_has_a_model_name_of_its_own() -> None:
    with scripted_service(lambda *_: ok({})) as service:
        worker(service.url, lora_name="trl-policy").update_model_version(3)
    assert service.requests == [("POST", "/policy", {"version": "3", "model": "trl-policy-v3"})]


def test_without_tasks_the_groups_number_picks_one(tmp_path: Path) -> None:
    groups = Groups(records_of(tmp_path, [{}, {}]))
    with scripted_service(groups) as service:
        running = worker(service.url, run="r", first_group=5)
        running.start()
        take(running, 4)
        running.stop()
    assert [(request["key"], request["seed"]) for request in groups.requests[:2]] == [("r-5", 5), ("r-6", 6)]


def test_a_full_buffer_holds_back_the_next_group(tmp_path: Path) -> None:
    groups = Groups(records_of(tmp_path, [{}, {}]))
    with scripted_service(groups) as service:
        running = worker(service.url, queue_size=1)
        running.start()
        until(running.rollout_buffer.full)
        time.sleep(0.3)
        assert len(groups.requests) == 1
        take(running, 3)
        until(lambda: len(groups.requests) == 2)
        running.stop()
    waits = []
    while not running.metrics_queue.empty():
        waits.append(running.metrics_queue.get_nowait().get("rollout/backpressure_s", 0.0))
    assert max(waits) >= 0.2  # type: ignore[type-var]


def test_a_withheld_group_gives_no_rows_and_many_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    groups = Groups(records_of(tmp_path, [{}, {}]), state="withheld", advantages=None, detail="one has no reward")
    with scripted_service(groups) as service, caplog.at_level(logging.WARNING):
        running = worker(service.url, max_withheld=3)
        running.start()
        until(lambda: len(groups.requests) == 3)
        with pytest.raises(ServiceError, match=r"3 groups in a row gave no rows.*one has no reward"):
            until(lambda: running.check_health(300))
        running.stop()
    assert running.rollout_buffer.empty() and len(groups.requests) == 3
    assert caplog.text.count("is withheld: one has no reward") == 3


def test_what_ended_the_worker_is_raised_in_the_trainer() -> None:
    with scripted_service(lambda *_: refusal(404, "there is no task 'x'")) as service:
        running = worker(service.url, tasks=["x"])
        running.start()
        with pytest.raises(ServiceRefused, match="there is no task 'x'"):
            until(lambda: running.check_health(300))
        running.stop()
    running = worker("http://127.0.0.1:9", patience=0)
    running.start()
    with pytest.raises(ServiceUnavailable, match="does not answer"):
        until(lambda: running.check_health(300))
    running.stop()


def test_a_full_queue_of_the_service_is_waited_for(tmp_path: Path) -> None:
    groups = Groups(records_of(tmp_path, [{}, {}]))
    refused = []

    def busy_at_first(method: str, path: str, body: Any) -> Answer:
        if len(refused) < 3:
            refused.append(body["key"])
            return refusal(429, "the queue is full", Retry_After="0.1")
        return groups(method, path, body)

    with scripted_service(busy_at_first) as service:
        running = worker(service.url, patience=0, run="r")
        running.start()
        assert take(running, 1)
        running.check_health(300)
        running.stop()
    assert refused == ["r-0"] * 3 and groups.requests[0]["key"] == "r-0"


def test_stopping_cancels_what_runs(tmp_path: Path) -> None:
    cancelled = threading.Event()
    asked: queue.Queue[str] = queue.Queue()
    records = records_of(tmp_path, [{}, {}])

    def slow(method: str, path: str, body: Any) -> Answer:
        if method == "DELETE":
            cancelled.set()
            return ok({})
        asked.put(body["key"])
        assert cancelled.wait(20)
        return 200, {}, ndjson(verdict(body["key"], records, state="cancelled", advantages=None))

    with scripted_service(slow) as service:
        running = worker(service.url, run="r")
        running.start()
        assert asked.get(timeout=20) == "r-0"
        running.stop()
        running.stop()
        assert cancelled.is_set()
        running.check_health(300)
    assert not any(thread.name.startswith("rollouts-") for thread in threading.enumerate())


APPLIED = {"temperature": "applied", "truncation": "not_applied", "values": "logprobs", "source": "probe"}


@pytest.mark.parametrize(
    ("sent", "logprobs", "said"),
    [
        ({"top_p": 0.9}, APPLIED, "it was sampled with top_p 0.9, which the trainer's own logprobs do not have"),
        ({"temperature": 0.7}, APPLIED | {"temperature": "not_applied"}, "its logprobs are those at temperature 1"),
        ({"temperature": 1.0}, APPLIED, "it was sampled at temperature 1, and the trainer divides its logits by 0.7"),
    ],
)
def test_logprobs_that_are_not_those_of_the_loss_are_withheld(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sent: dict[str, Any], logprobs: dict[str, str], said: str
) -> None:
    plain = PLAIN["sent"] | {"temperature": 0.7}
    right = conversation(2, sampling={"sent": plain})
    wrong = conversation(2, sampling={"sent": plain | sent})
    for calls, meaning in ((right, APPLIED), (wrong, logprobs)):
        for call in calls:
            call["metadata"]["logprobs"] = meaning
    groups = Groups(records_of(tmp_path, [{"calls": right}, {"calls": wrong}]))
    with scripted_service(groups) as service, caplog.at_level(logging.WARNING):
        running = worker(service.url, temperature=0.7, max_withheld=2)
        running.start()
        until(lambda: caplog.text.count("is withheld: no ratio can be built on the logprobs of") == 2)
        running.stop()
        with pytest.raises(ServiceError, match="2 groups in a row gave no rows"):
            until(lambda: running.check_health(300))
    assert said in caplog.text
    assert running.rollout_buffer.empty()


def test_a_temperature_that_the_engine_applies_is_trained(tmp_path: Path) -> None:
    calls = conversation(2, sampling={"sent": PLAIN["sent"] | {"temperature": 0.7}})
    for call in calls:
        call["metadata"]["logprobs"] = APPLIED
    groups = Groups(records_of(tmp_path, [{"calls": calls}, {"calls": calls}]))
    with scripted_service(groups) as service:
        running = worker(service.url, temperature=0.7)
        running.start()
        take(running, 2)
        running.stop()


@pytest.mark.parametrize("options", [{"num_generations": 0}, {"concurrent_groups": 0}, {"tasks": []}])
def test_settings_that_can_never_give_rows_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        worker("http://127.0.0.1:9", **options)


def test_without_trl_it_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(BadInput, match="AsyncGRPO needs the trl extra"):
        worker("http://127.0.0.1:9", sample_type=None)


def test_prompts_of_the_tasks_are_the_datasets_rows() -> None:
    tasks = [{"name": name, "digest": None, "prompt": f"do {name}"} for name in ("a", "b")]
    with scripted_service(lambda *_: ok({"tasks": tasks})) as scripted:
        service = RolloutService(scripted.url, KEY)
        assert task_prompts(service, ["b"]) == [{"prompt": [{"role": "user", "content": "do b"}], "task": "b"}]
        assert [row["task"] for row in task_prompts(service)] == ["a", "b"]
        with pytest.raises(BadInput, match="no task 'c': it has a, b"):
            task_prompts(service, ["c"])
