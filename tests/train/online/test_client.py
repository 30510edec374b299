"""The client of the rollout service: whole records, one verdict, and one sentence for whatever goes wrong."""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.train.online.scripted_service import KEY, Answer, ndjson, ok, refusal, scripted_service, verdict
from train.errors import BadInput, ServiceBusy, ServiceError, ServiceRefused, ServiceUnavailable
from train.online.client import Group, RolloutService

RECORDS: list[dict[str, Any]] = [{"rollout": f"write-number__{n}", "reward": float(n % 2)} for n in range(4)]


def answers(*scripted: Answer) -> Callable[[str, str, Any], Answer]:
    """One after the other; the last one again and again."""
    remaining = list(scripted)
    return lambda *_: remaining.pop(0) if len(remaining) > 1 else remaining[0]


def whole(key: str = "g") -> Answer:
    return 200, {}, [b"\n", *ndjson(*RECORDS), b"\n", *ndjson(verdict(key, RECORDS))]


def ask(url: str, key: str = "g", **options: Any) -> Group:
    return RolloutService(url, KEY, **{"patience": 5.0, **options}).group(key=key, size=4, seed=3)


def test_a_group_gives_its_records_and_then_its_verdict() -> None:
    with scripted_service(lambda *_: whole()) as service:
        group = RolloutService(service.url, KEY).group(
            key="g",
            size=4,
            task="write-number",
            sampling={"temperature": 1.0},
            deadline=60,
            purpose="eval",
            max_calls=5,
        )
        assert group.verdict is None
        assert [record["rollout"] for record in group] == [record["rollout"] for record in RECORDS]
        assert group.verdict is not None and group.verdict["state"] == "complete"
        assert list(group) == []
    assert service.requests == [
        (
            "POST",
            "/groups",
            {
                "key": "g", "size": 4, "task": "write-number", "sampling": {"temperature": 1.0}, "deadline": 60,
                "purpose": "eval", "max_calls": 5,
            },
        )
    ]  # fmt: skip


def test_a_lost_connection_is_joined_again_and_no_record_comes_twice() -> None:
    rows = ndjson(*RECORDS)
    assert rows[2] is not None
    cut = [*rows[:2], rows[2][:9], None]
    with scripted_service(answers((200, {}, cut), (200, {}, [None]), whole())) as service:
        group = ask(service.url)
        assert [record["rollout"] for record in group] == [record["rollout"] for record in RECORDS]
        assert group.verdict is not None
    assert len(service.requests) == 3 and len({json.dumps(request) for request in service.requests}) == 1


def test_an_answer_that_ends_without_a_verdict_is_asked_for_again() -> None:
    with scripted_service(answers((200, {}, ndjson(*RECORDS[:3])), whole())) as service:
        assert len(list(ask(service.url))) == 4


def test_an_answer_that_never_has_a_verdict_is_an_error_and_no_endless_loop() -> None:
    with (
        scripted_service(lambda *_: (200, {}, ndjson(*RECORDS))) as service,
        pytest.raises(ServiceUnavailable, match="without a verdict"),
    ):
        list(ask(service.url, patience=0.3))


def test_a_service_that_is_away_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ServiceUnavailable, match="start bench serve"):
        RolloutService("http://127.0.0.1:9", KEY, patience=0.4).tasks()
    (warning,) = caplog.messages
    assert "does not answer" in warning and "trying again for" in warning


def test_a_silent_service_is_asked_again_after_the_timeout() -> None:
    release = threading.Event()
    calls = []

    def answer(*request: Any) -> Answer:
        calls.append(request)
        if len(calls) == 1:
            release.wait(10)
        return whole()

    with scripted_service(answer) as service:
        began = time.monotonic()
        assert len(list(ask(service.url, timeout=0.2))) == 4
        assert time.monotonic() - began < 8 and len(calls) == 2
        release.set()


def test_texts_with_other_line_separators_and_split_lines_stay_whole() -> None:
    record = RECORDS[0] | {"text": "one\u2028two\x85three\x1cfour\u2029five\r\x0b"}
    body = b"".join(part or b"" for part in ndjson(record, *RECORDS[1:], verdict("g", RECORDS)))
    single_bytes = [body[at : at + 1] for at in range(len(body))]
    with scripted_service(lambda *_: (200, {}, list(single_bytes))) as service:
        assert next(ask(service.url)) == record


def test_a_full_queue_is_asked_again_when_the_service_says_so() -> None:
    busy = refusal(429, "8 groups wait, and no more may", Retry_After="0.2")
    with scripted_service(answers(busy, busy, whole())) as service:
        assert len(list(ask(service.url))) == 4
    with scripted_service(lambda *_: busy) as service:
        with pytest.raises(ServiceBusy, match="8 groups wait") as caught:
            ask(service.url, patience=0)
        assert caught.value.retry_after == pytest.approx(0.2)


def test_a_service_that_shuts_down_is_asked_again() -> None:
    with scripted_service(answers(refusal(503, "shutting down"), whole())) as service:
        assert len(list(ask(service.url))) == 4
    with scripted_service(lambda *_: refusal(503, "shutting down")) as service:
        with pytest.raises(ServiceUnavailable, match="shutting down"):
            ask(service.url, patience=0)


@pytest.mark.parametrize(
    ("status", "says"),
    [(404, "there is no task x"), (409, "another body"), (400, "size must be an integer"), (401, "not the key")],
)
def test_what_is_refused_is_not_asked_again(status: int, says: str) -> None:
    with scripted_service(lambda *_: refusal(status, says)) as service:
        with pytest.raises(ServiceRefused, match=says) as caught:
            ask(service.url)
        assert caught.value.status == status and len(service.requests) == 1 and "\n" not in str(caught.value)


def test_a_wrong_key_is_a_sentence() -> None:
    with scripted_service(lambda *_: whole()) as service:
        for key in (None, "wrong"):
            with pytest.raises(ServiceRefused, match="refuses the key: this is not the key"):
                RolloutService(service.url, key).tasks()


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b'"x"', b"\xff\xfe"])
def test_an_address_that_is_no_rollout_service_is_a_sentence(body: bytes) -> None:
    with scripted_service(lambda *_: (200, {}, [body + b"\n"])) as service:
        with pytest.raises(ServiceRefused, match="is it a rollout service"):
            RolloutService(service.url, KEY).tasks()
        with pytest.raises(ServiceRefused, match="is it a rollout service"):
            next(ask(service.url))


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://no-such-host.invalid", "http://127.0.0.1:9/"])
def test_nobody_there_is_a_sentence(url: str) -> None:
    with pytest.raises(ServiceUnavailable, match=r"does not answer .*: start bench serve, or check the address"):
        RolloutService(url, KEY, patience=0).tasks()


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://x", "http://", "http://[::1", "http://x:y", "/tmp/x", "http://\x00"]
)
def test_what_cannot_be_an_address_is_a_sentence(url: str) -> None:
    with pytest.raises(BadInput, match="give one as http://HOST:PORT"):
        RolloutService(url, KEY)


@pytest.mark.parametrize("key", ["schlüssel", "two\nlines", "\x00"])
def test_what_cannot_be_a_key_is_a_sentence(key: str) -> None:
    with pytest.raises(BadInput, match="the one it was started with"):
        RolloutService("http://127.0.0.1:9", key)


def test_the_other_routes() -> None:
    def answer(method: str, path: str, body: Any) -> Answer:
        return ok({"tasks": [{"name": "a", "digest": None, "prompt": "p"}], "in_flight": 2, "status": "ok"})

    with scripted_service(answer) as scripted, RolloutService(scripted.url, KEY) as service:
        assert service.tasks() == [{"name": "a", "digest": None, "prompt": "p"}]
        assert service.status()["status"] == "ok"
        service.cancel("a/b c")
        service.set_policy(8)
        service.set_policy(9, "lora-v9")
        assert service.pause(2.5) == 2
        service.resume()
        service.resume("9")
        service.load_weights("/shared/step-8.gguf", 8)
    assert scripted.requests == [
        ("GET", "/tasks", None),
        ("GET", "/status", None),
        ("DELETE", "/groups/a%2Fb%20c", None),
        ("POST", "/policy", {"version": "8"}),
        ("POST", "/policy", {"version": "9", "model": "lora-v9"}),
        ("POST", "/pause", {"wait": 2.5}),
        ("POST", "/resume", {}),
        ("POST", "/resume", {"version": "9"}),
        ("POST", "/weights", {"path": "/shared/step-8.gguf", "version": "8"}),
    ]


def test_it_can_be_pickled_and_used_by_many_threads() -> None:
    with scripted_service(lambda *_: whole()) as scripted:
        service = pickle.loads(pickle.dumps(RolloutService(scripted.url, KEY, timeout=7)))
        assert service.timeout == 7
        found: list[int] = []
        threads = [
            threading.Thread(target=lambda n=n: found.append(len(list(service.group(key=f"k{n}", size=4, seed=n)))))
            for n in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [4] * 20


def test_leaving_early_closes_the_connection_and_cancels_nothing() -> None:
    with scripted_service(lambda *_: whole()) as scripted:
        with ask(scripted.url) as group:
            next(group)
        with pytest.raises((StopIteration, httpx.StreamError, ServiceError)):
            while True:
                next(group)
        assert [method for method, _, _ in scripted.requests].count("DELETE") == 0
