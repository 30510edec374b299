"""OpenEnv's sessions over the service: turns thread by thread, and no error that would stop a trainer's run."""

from __future__ import annotations

import functools
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.train.build import broken, conversation, failed, line
from tests.train.online import openenv_double
from tests.train.online.records import interleaved, service_record
from tests.train.online.scripted_service import (
    KEY,
    Answer,
    ScriptedService,
    ndjson,
    ok,
    refusal,
    scripted_service,
    verdict,
)
from train.errors import BadInput, ServiceRefused
from train.online.openenv import Session, SessionFactory, turn_fields

TASKS = [
    {"name": "write-number", "digest": "sha256:1", "prompt": "Write the number."},
    {"name": "write-word", "digest": "sha256:2", "prompt": "Write the word."},
]


@pytest.fixture(autouse=True)
def openenv(monkeypatch: pytest.MonkeyPatch) -> None:
    openenv_double.install(monkeypatch)


def answering(groups: Callable[[Any], Answer]) -> Callable[[str, str, Any], Answer]:
    """A service with two tasks; `groups` answers each POST /groups."""

    def answer(method: str, path: str, body: Any) -> Answer:
        if path == "/tasks":
            return ok({"tasks": TASKS})
        return groups(body) if method == "POST" else ok({"key": path.rpartition("/")[2]})

    return answer


def one(record: Mapping[str, Any], **given: Any) -> Callable[[Any], Answer]:
    return lambda body: (200, {}, ndjson(record, verdict(body["key"], [dict(record)], **given)))


def none(state: str, detail: str) -> Callable[[Any], Answer]:
    return lambda body: (
        200,
        {},
        ndjson(verdict(body["key"], [], size=1, state=state, detail=detail, rollouts=[None], advantages=None)),
    )


def ended(service: ScriptedService, **options: Any) -> Session:
    """A session whose rollout has ended."""
    session = SessionFactory(service.url, KEY, **options).create("Write the number.", seed=3, episode_id="e-1")
    session.wait_for_completion(10)
    return session


# turns


def test_turns_carry_what_each_call_sampled_with_its_messages(tmp_path: Path) -> None:
    calls = conversation(3)
    record = service_record(tmp_path, calls)
    turns = list(turn_fields(record))
    assert len({turn["node_id"] for turn in turns}) == 3
    for turn, call in zip(turns, calls, strict=True):
        capture = call["metadata"]["token_capture"]
        sampled = capture["completions"][0]
        assert turn["prompt_token_ids"] == capture["prompt_token_ids"]
        assert turn["completion_token_ids"] == sampled["token_ids"]
        assert turn["per_token_logps"] == sampled["logprobs"]
        assert turn["loss_mask"] == [0] * len(turn["prompt_token_ids"]) + [1] * len(sampled["token_ids"])
        assert turn["request"]["messages"] == call["request"]["body"]["messages"]
        assert turn["response"]["choices"][0]["message"] == call["response"]["body"]["choices"][0]["message"]


def test_interleaved_agents_come_thread_by_thread(tmp_path: Path) -> None:
    record = service_record(tmp_path, interleaved(conversation(3, first=100), conversation(3, first=500)))
    turns = list(turn_fields(record))
    assert [turn["metadata"]["index"] for turn in turns] == [0, 2, 4, 1, 3, 5]
    for before, after in pairwise(turns[:3]):
        held = before["prompt_token_ids"] + before["completion_token_ids"]
        assert after["prompt_token_ids"][: len(held)] == held


def test_a_rewritten_history_begins_another_row_and_loses_no_turn(tmp_path: Path) -> None:
    turns = list(turn_fields(service_record(tmp_path, broken(2))))
    assert [turn["metadata"]["index"] for turn in turns] == [0, 1]
    held = turns[0]["prompt_token_ids"] + turns[0]["completion_token_ids"]
    assert turns[1]["prompt_token_ids"][: len(held)] != held


def test_calls_that_are_not_whole_are_no_turns(tmp_path: Path) -> None:
    calls = conversation(2)
    calls[1]["metadata"]["token_capture"]["completions"][0]["logprobs"] = None
    calls[1]["metadata"]["token_capture"]["unavailable"] = {"logprobs": {"reason": "not_returned"}}
    turns = list(turn_fields(service_record(tmp_path, [*calls, failed(2)])))
    assert [turn["metadata"]["index"] for turn in turns] == [0]


def test_rounding_above_zero_is_zero_and_more_is_no_logprob(tmp_path: Path) -> None:
    [turn] = turn_fields(service_record(tmp_path / "rounding", [line(0, [1, 2], [3, 4], logprobs=(1e-7, -0.5))]))
    assert turn["per_token_logps"] == [0.0, -0.5]
    assert turn["loss_mask"] == [0, 0, 1, 1]
    assert not list(turn_fields(service_record(tmp_path / "more", [line(0, [1, 2], [3, 4], logprobs=(3.0, -0.5))])))


def test_the_policy_versions_of_a_call_are_in_its_metadata(tmp_path: Path) -> None:
    calls = conversation(1, policy_version="7", policy_version_end="8")
    [turn] = turn_fields(service_record(tmp_path, calls))
    assert (turn["metadata"]["policy_version"], turn["metadata"]["policy_version_end"]) == ("7", "8")


@pytest.mark.parametrize(("temperature", "trained"), [(1.0, [1, 1]), (0.7, [0, 1])])
def test_a_call_without_a_ratio_is_context(
    tmp_path: Path, temperature: float, trained: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    calls = conversation(2)
    for call, value in zip(calls, (temperature, 1.0), strict=True):
        call["metadata"]["sampling"] = {"sent": {**plain, "temperature": value}}
    turns = list(turn_fields(service_record(tmp_path, calls), 1.0))
    assert [max(turn["loss_mask"]) for turn in turns] == trained
    assert ("sampled at temperature 0.7" in caplog.text) == (trained == [0, 1])


# sessions


def test_a_session_is_a_group_of_one_with_what_the_trainer_demands(tmp_path: Path) -> None:
    record = service_record(tmp_path, conversation(2), reward=0.25)
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    with scripted_service(answering(one(record))) as service:
        session = ended(service, sampling=sampling, deadline=60, max_calls=9)
        assert session.wait_for_completion() == 0
        assert len(session.fetch_training_trace().turns) == 2
        assert session.verify([]).env_reward == 0.25
        session.close()
        body = next(body for _, path, body in service.requests if path == "/groups")
    assert body == {
        "key": "e-1", "size": 1, "task": "write-number", "sampling": sampling, "deadline": 60, "purpose": "train",
        "max_calls": 9,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("write-word", {"task": "write-word"}),
        ([{"role": "system", "content": "x"}, {"role": "user", "content": "Write the word."}], {"task": "write-word"}),
        ("Something else", {"seed": 3}),
        ([{"role": "user", "content": ""}], {"seed": 3}),
    ],
)
def test_the_prompt_chooses_the_task_and_else_the_seed(tmp_path: Path, prompt: Any, asked: dict[str, Any]) -> None:
    record = service_record(tmp_path, conversation(1))
    with scripted_service(answering(one(record))) as service:
        SessionFactory(service.url, KEY).create(prompt, seed=3).wait_for_completion(10)
        body = next(body for _, path, body in service.requests if path == "/groups")
    assert {name: body[name] for name in ("task", "seed") if name in body} == asked


def test_without_a_seed_a_prompt_must_name_a_task() -> None:
    with scripted_service(answering(none("withheld", "x"))) as service:
        with pytest.raises(BadInput, match="write-number, write-word"):
            SessionFactory(service.url, KEY).create("Something else")


def test_a_factory_can_be_pickled(tmp_path: Path) -> None:
    record = service_record(tmp_path, conversation(1))
    with scripted_service(answering(one(record))) as service:
        made = functools.partial(SessionFactory, service.url, KEY)
        factory = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(made))(sampling={"temperature": 1.0})))
        assert factory.create("write-word", seed=0).wait_for_completion(10) == 0


def test_openenvs_own_base_classes_know_both(tmp_path: Path) -> None:
    record = service_record(tmp_path, conversation(1))
    with scripted_service(answering(one(record))) as service:
        factory = SessionFactory(service.url, KEY)
        assert isinstance(factory, openenv_double.ResourceSessionFactory)
        session = factory.create("write-word")
        assert isinstance(session, openenv_double.ResourceSession)
        assert session.initial_messages() == [{"role": "user", "content": "Write the word."}]
        assert session.list_tools() == [] and "sandbox" in session.call_tool("run", {}).error


# what goes wrong


def test_a_wrong_key_ends_the_run_at_its_start() -> None:
    with scripted_service(answering(none("withheld", "x"))) as service:
        with pytest.raises(ServiceRefused, match="refuses the key"):
            SessionFactory(service.url, "another")


@pytest.mark.parametrize(
    "groups",
    [
        none("withheld", "the engine does not answer: start it again"),
        lambda _: refusal(404, "there is no task write-number"),
        lambda _: refusal(409, "this key has another body"),
        lambda _: (200, {}, [b"no JSON\n"]),
    ],
)
def test_a_rollout_that_failed_has_no_turns_and_no_reward(
    groups: Callable[[Any], Answer], caplog: pytest.LogCaptureFixture
) -> None:
    with scripted_service(answering(groups)) as service:
        session = ended(service)
        assert session.wait_for_completion() == 1
        assert session.fetch_training_trace().turns == []
        result = session.verify([])
        assert result.env_reward is None and result.artifacts["error"]
    assert result.artifacts["error"] in caplog.text and "Traceback" not in caplog.text


def test_an_unscored_rollout_has_turns_and_no_reward(tmp_path: Path) -> None:
    record = service_record(
        tmp_path, conversation(2), reward=None, error="the agent crashed", result={"error_category": "acp_error"}
    )
    with scripted_service(answering(one(record, state="withheld"))) as service:
        session = ended(service)
        assert session.wait_for_completion() == 1
        assert session.verify([]).env_reward is None
        assert len(session.fetch_training_trace().turns) == 2


def test_a_rollout_out_of_time_is_flagged_and_its_turns_are_there(tmp_path: Path) -> None:
    record = service_record(
        tmp_path, conversation(2), reward=0.0, error="Agent prompt exceeded wall-clock budget 9s",
        result={"error_category": "timeout"},
    )  # fmt: skip
    with scripted_service(answering(one(record))) as service:
        session = SessionFactory(service.url, KEY).create("write-word", episode_id="e-1")
        with pytest.raises(TimeoutError, match="wall-clock budget 9s"):
            session.wait_for_completion(10)
        assert len(session.fetch_training_trace().turns) == 2 and session.verify([]).env_reward == 0.0


def test_a_turn_that_openenv_refuses_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record = service_record(tmp_path, conversation(2))
    record["segments"][0]["call_spans"][0]["length"] = 2

    def refuse(self: openenv_double.TrainingTurn) -> None:
        if len(self.completion_token_ids) == 2:
            raise ValueError("1 validation error for TrainingTurn\n  loss_mask must cover prompt plus completion")

    monkeypatch.setattr(openenv_double.TrainingTurn, "__post_init__", refuse)
    with scripted_service(answering(one(record))) as service:
        assert len(ended(service).fetch_training_trace().turns) == 1
    assert "is left out: 1 validation error for TrainingTurn loss_mask must cover" in caplog.text


def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    record = service_record(tmp_path, conversation(1))
    answers: Iterator[Callable[[Any], Answer]] = iter([lambda _: refusal(429, "full", Retry_After="0.1"), one(record)])
    with scripted_service(answering(lambda body: next(answers)(body))) as service:
        assert ended(service).wait_for_completion() == 0


def running(cancelled: threading.Event) -> Callable[[str, str, Any], Answer]:
    """A service whose group ends when it is cancelled."""

    def groups(body: Any) -> Answer:
        cancelled.wait(20)
        return none("cancelled", "the trainer cancelled it")(body)

    answer = answering(groups)

    def with_cancel(method: str, path: str, body: Any) -> Answer:
        if method == "DELETE":
            cancelled.set()
        return answer(method, path, body)

    return with_cancel


def test_close_from_another_thread_cancels_and_unblocks() -> None:
    cancelled = threading.Event()
    with scripted_service(running(cancelled)) as service:
        session = SessionFactory(service.url, KEY).create("write-word", episode_id="e-1")
        result: list[int] = []
        waiting = threading.Thread(target=lambda: result.append(session.wait_for_completion()))
        waiting.start()
        began = time.monotonic()
        session.close()
        waiting.join(5)
        session.close()
        assert result == [1] and time.monotonic() - began < 5
        assert session.fetch_training_trace().turns == [] and session.verify([]).env_reward is None
        assert ("DELETE", "/groups/e-1", None) in service.requests


def test_a_wait_that_is_over_cancels_the_rollout() -> None:
    cancelled = threading.Event()
    with scripted_service(running(cancelled)) as service:
        session = SessionFactory(service.url, KEY).create("write-word", episode_id="e-1")
        with pytest.raises(TimeoutError, match=r"did not end within 0\.05 s"):
            session.wait_for_completion(0.05)
        assert cancelled.wait(5)


def test_closing_a_session_that_ended_cancels_nothing(tmp_path: Path) -> None:
    record = service_record(tmp_path, conversation(1))
    with scripted_service(answering(one(record))) as service:
        ended(service).close()
        assert not [method for method, _, _ in service.requests if method == "DELETE"]
