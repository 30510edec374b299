"""The chat of a record's calls: linear in size, and whole again for a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.schemas import validator
from tests.train.build import conversation, line, make_job, make_rollout, uncaptured
from train.groups.groups import DEFAULT_BY, group_key
from train.online.chat import choices_of, messages_of, tools_of
from train.rollouts.rollouts import find_rollouts
from train.stream.records import Encode, record
from train.tokens.rollout_tokens import read_log

SCHEMA = validator("rollout_stream.v1")


def record_of(job: Path, *, chat: bool = True) -> dict[str, Any]:
    [rollout] = find_rollouts(job)
    made = record(rollout, read_log(rollout, chat=chat), group_key(rollout, DEFAULT_BY), Encode(text=False))
    SCHEMA.validate(made)
    return made


def test_each_call_names_the_one_it_continues_and_its_messages_are_whole_again(tmp_path: Path) -> None:
    calls = conversation(3)
    make_rollout(tmp_path, calls=calls)
    made = record_of(tmp_path)
    chats = [call["chat"] for call in made["calls"]]
    assert [chat["continues"] for chat in chats] == [None, 0, 1]
    assert [len(chat["messages"]) for chat in chats] == [1, 2, 2]
    for index, call in enumerate(calls):
        assert messages_of(made, index) == call["request"]["body"]["messages"]
        assert tools_of(made, index) == (call["request"]["body"].get("tools") or [])
    assert [choices_of(made, index)[0]["message"]["content"] for index in range(3)] == ["reply 0", "reply 1", "reply 2"]


def test_interleaved_conversations_continue_their_own(tmp_path: Path) -> None:
    one, two = conversation(2, first=100), conversation(2, first=500)
    for call in two:
        call["request"]["body"]["messages"][0] = {"role": "user", "content": "Name two rivers."}
    calls = [one[0], two[0], one[1], two[1]]
    for number, call in enumerate(calls):
        call["metadata"]["call"] = number
    make_rollout(tmp_path, calls=calls)
    made = record_of(tmp_path)
    assert [call["chat"]["continues"] for call in made["calls"]] == [None, None, 0, 1]
    assert messages_of(made, 3)[0]["content"] == "Name two rivers."


def test_other_tools_begin_anew(tmp_path: Path) -> None:
    calls = conversation(2)
    tool = {"type": "function", "function": {"name": "other", "parameters": {}}}
    calls[1]["request"]["body"]["tools"] = [tool]
    make_rollout(tmp_path, calls=calls)
    made = record_of(tmp_path)
    assert made["calls"][1]["chat"]["continues"] is None
    assert tools_of(made, 1) == [tool]


def test_a_call_without_messages_has_no_chat(tmp_path: Path) -> None:
    call = line(0, [1, 2], [3])
    call["request"] |= {"path": "/v1/completions", "body": {"prompt": "The sea"}}
    make_rollout(tmp_path, calls=[call])
    made = record_of(tmp_path)
    assert made["calls"][0]["chat"] is None
    assert messages_of(made, 0) == [] and choices_of(made, 0) == [] and tools_of(made, 0) == []


def test_without_asking_there_is_no_chat(tmp_path: Path) -> None:
    make_job(tmp_path, [{"calls": conversation(2)}])
    assert all("chat" not in call for call in record_of(tmp_path, chat=False)["calls"])


def test_uncaptured_calls_have_none(tmp_path: Path) -> None:
    make_rollout(tmp_path, calls=uncaptured(2))
    assert record_of(tmp_path)["calls"] == []
