"""Records as verifiers' message nodes: their ids, end to end, are what the engine read and sampled."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.train.build import broken, conversation
from tests.train.online.groups import TWO_THREADS, records_of
from train.errors import BadInput
from train.online.rows import rows_of
from train.online.traces import calls_of, nodes_of


@pytest.mark.parametrize("calls", [conversation(1), conversation(3), TWO_THREADS, broken(3)])
def test_nodes_are_the_sequence(tmp_path: Path, calls: list[dict[str, object]]) -> None:
    [record] = records_of(tmp_path / "job", [{"calls": calls}])
    first = 0
    for row in rows_of(record):
        nodes = nodes_of(record, row, first)
        assert [token for node in nodes for token in node["token_ids"]] == row.prompt_ids + row.completion_ids
        mask = [int(value) for node in nodes for value in node["mask"]]
        assert mask == [0] * len(row.prompt_ids) + row.completion_mask
        sampled = [value for value, chosen in zip(row.logprobs, row.completion_mask, strict=True) if chosen]
        assert [value for node in nodes for value in node.get("logprobs", [])] == sampled
        assert [node["parent"] for node in nodes] == [None, *range(first, first + len(nodes) - 1)]
        for node in nodes:
            assert node["message"]["role"] == ("assistant" if node.get("sampled") else "user")
        first += len(nodes)


def test_a_node_has_what_its_call_added(tmp_path: Path) -> None:
    [record] = records_of(tmp_path / "job", [{"calls": conversation(2)}])
    [row] = rows_of(record)
    nodes = nodes_of(record, row)
    assert [node["message"]["content"] for node in nodes] == ["Name two colours.", "reply 0", "and then? 0", "reply 1"]
    calls = calls_of(record, row, nodes, 10)
    assert [call["node"] for call in calls] == [11, 13] and [call["finish_reason"] for call in calls] == [
        "stop",
        "stop",
    ]
    assert [call["usage"] for call in calls] == [
        {"prompt_tokens": 12, "completion_tokens": 4},
        {"prompt_tokens": 19, "completion_tokens": 4},
    ]


def test_tool_calls_are_flat(tmp_path: Path) -> None:
    [call] = conversation(1)
    tool = {"id": "c1", "type": "function", "function": {"name": "write", "arguments": '{"path": "a"}'}}
    call["response"]["body"]["choices"][0]["message"] = {"role": "assistant", "content": None, "tool_calls": [tool]}
    [record] = records_of(tmp_path / "job", [{"calls": [call]}])
    [row] = rows_of(record)
    assert nodes_of(record, row)[1]["message"] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "name": "write", "arguments": '{"path": "a"}'}],
    }


def test_without_verifiers_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(
        BadInput, match=r"train\.online\.verifiers needs verifiers .*: use it in a run of verifiers 0\.4"
    ):
        import train.online.verifiers  # noqa: F401 - the sentence is raised on the way
