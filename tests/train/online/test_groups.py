"""Groups for trainers that call once per sample: one request for all members, and what each is given."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.train.online.groups import Service, records_of
from train.errors import BadInput, ServiceUnavailable
from train.online.groups import GroupMembers, GroupRequest, connect, read_group, sampling_of, wait_groups


def request(size: int, key: str = "step-1") -> GroupRequest:
    return GroupRequest(key, size, seed=3, sampling={"temperature": 1.0})


def test_records_come_in_the_order_of_the_verdict(tmp_path: Path) -> None:
    records = records_of(tmp_path / "job", [{"reward": float(number)} for number in range(4)])
    group = read_group(Service(records), request(4))  # type: ignore[arg-type]
    assert group.complete and [group.reward(place) for place in range(4)] == [0.0, 1.0, 2.0, 3.0]
    assert [len(group.rows(place)) for place in range(4)] == [1, 1, 1, 1]
    assert len(group.seconds) == 4 and all(seconds >= 0 for seconds in group.seconds)


def test_nothing_of_a_withheld_group_is_trained(tmp_path: Path) -> None:
    records = records_of(tmp_path / "job", [{}, {"calls": None}])
    group = read_group(Service(records, state="withheld", detail="one has no reward"), request(3))  # type: ignore[arg-type]
    assert not group.complete and [group.rows(place) for place in range(3)] == [[], [], []]
    assert [group.why(place) for place in range(3)] == ["one has no reward"] * 3
    for place in range(3):
        row = group.masked(place)
        assert row.prompt_ids and len(row.completion_ids) == len(row.completion_mask) == len(row.logprobs) > 0
        assert not any(row.completion_mask) and not any(row.logprobs)
    assert group.masked(0).completion_ids == group.records[0]["segments"][0]["completion_ids"]  # type: ignore[index]
    assert group.masked(1).completion_ids == group.masked(2).completion_ids == [0]


async def test_members_of_a_group_share_one_request(tmp_path: Path) -> None:
    records = records_of(tmp_path / "job", [{"reward": float(number)} for number in range(4)])
    service, members = Service(records), GroupMembers()

    async def member(key: str) -> tuple[float | None, int]:
        group, place = await members.join(service, key, lambda size: request(size, key))  # type: ignore[arg-type]
        return group.reward(place), place

    got = await asyncio.gather(*(member(key) for key in "abababa"))
    assert got == [(0, 0), (0, 0), (1, 1), (1, 1), (2, 2), (2, 2), (3, 3)]
    assert sorted((asked["key"], asked["size"]) for asked in service.asked) == [("a", 4), ("b", 3)]


async def test_a_size_that_is_known_is_not_waited_for(tmp_path: Path) -> None:
    records = records_of(tmp_path / "job", [{}, {}])
    service, members = Service(records), GroupMembers()

    async def member() -> int:
        _, place = await members.join(service, "k", request, size=2)  # type: ignore[arg-type]
        return place

    first = await member()  # its rollouts run although nobody else has called
    assert service.asked[0]["size"] == 2
    assert [first, await member()] == [0, 1] and len(service.asked) == 1
    assert await member() == 0 and len(service.asked) == 2


async def test_every_member_gets_the_error() -> None:
    members = GroupMembers()
    service = Service([], error=ServiceUnavailable("the service does not answer"))
    joined = (members.join(service, "k", request) for _ in range(3))  # type: ignore[arg-type]
    got = await asyncio.gather(*joined, return_exceptions=True)
    assert [str(error) for error in got] == ["the service does not answer"] * 3


async def test_a_group_is_cancelled_with_its_last_member() -> None:
    service, members = Service([], block=True), GroupMembers()
    tasks: list[asyncio.Task[Any]] = [
        asyncio.create_task(members.join(service, "k", request))  # type: ignore[arg-type]
        for _ in range(2)
    ]
    while not service.asked:
        await asyncio.sleep(0.01)
    tasks[0].cancel()
    await asyncio.sleep(0.05)
    assert service.cancelled == [] and not tasks[1].done()
    tasks[1].cancel()
    assert await asyncio.to_thread(service.stopped.wait, 10)
    assert service.cancelled == ["step-1"]


async def test_the_first_group_that_fails_cancels_the_others() -> None:
    class Half(Service):
        def group(self, **request: Any) -> Any:
            if request["key"] == "b":
                raise ServiceUnavailable("gone")
            return super().group(**request)

    service = Half([], block=True)
    with pytest.raises(ServiceUnavailable, match="gone"):
        await wait_groups(service, [request(1, "a"), request(1, "b")])  # type: ignore[arg-type]
    assert await asyncio.to_thread(service.stopped.wait, 10)
    assert service.cancelled == ["a"]


def test_what_a_trainer_does_not_say_about_sampling_is_plain() -> None:
    given = {"temperature": 0.5, "top_p": None, "logprobs": 1, "max_tokens": 9}
    assert sampling_of(given, training=True) == {"temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    assert sampling_of(given, training=False) == {"temperature": 0.5}


@pytest.mark.parametrize("training", [True, False])
def test_a_top_k_that_cuts_nothing_is_one_that_every_engine_takes(training: bool) -> None:
    assert sampling_of({"top_k": 0}, training=training)["top_k"] == -1
    assert sampling_of({"top_k": 20}, training=training)["top_k"] == 20


def test_logprobs_that_are_not_the_trainers_withhold_the_group(tmp_path: Path) -> None:
    """vLLM's logprobs are by default those at temperature 1, whatever was sampled with."""
    records = records_of(tmp_path / "job", [{"sampling": {"temperature": 0.7}}, {"sampling": {"temperature": 0.7}}])
    group = read_group(Service(records), GroupRequest("k", 2, seed=0, ratios=0.7))  # type: ignore[arg-type]
    assert group.reason is not None and group.rows(0) == group.rows(1) == []
    assert "no ratio can be built on the logprobs of write-number__00000000: call 0: " in group.reason
    assert read_group(Service(records), GroupRequest("k", 2, seed=0)).complete  # type: ignore[arg-type]
    plain = records_of(tmp_path / "plain", [{}])
    assert read_group(Service(plain), GroupRequest("k", 1, seed=0, ratios=1.0)).complete  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "task", "seed"),
    [
        ({"task": "count", "prompt": "Write it."}, "count", None),
        ({"prompt": [{"role": "user", "content": " Write it.\n"}]}, "write-number", None),
        ({"prompt": "count"}, "count", None),
        ({"prompt": [{"role": "user", "content": "Something else."}]}, None, 3),
        ({"prompt": []}, None, 3),
    ],
)
def test_a_task_is_named_or_is_the_prompts_or_the_seeds(given: dict[str, Any], task: str, seed: int) -> None:
    service = Service([])
    read_group(service, GroupRequest("k", 1, seed=3, **given))  # type: ignore[arg-type]
    assert (service.asked[0]["task"], service.asked[0]["seed"]) == (task, seed)


def test_a_service_is_named_by_an_argument_or_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BENCHFLOW_SERVE_URL", raising=False)
    with pytest.raises(BadInput, match="set url, or BENCHFLOW_SERVE_URL"):
        connect()
    monkeypatch.setenv("BENCHFLOW_SERVE_URL", "http://127.0.0.1:1/")
    assert connect().url == "http://127.0.0.1:1"
    assert connect("http://127.0.0.1:2").url == "http://127.0.0.1:2"
