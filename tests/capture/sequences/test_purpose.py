"""What a call was for: found by headers, by the words of known agents, and by what sets it apart from the others."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from capture.sequences.purpose import PURPOSES, Purposes, purpose


def call(system: str, opening: str, *tools: str, **more: Any) -> dict[str, Any]:
    made = [{"type": "function", "function": {"name": name}} for name in tools]
    messages = [{"role": "system", "content": system}, {"role": "user", "content": opening}]
    return {"messages": messages, **({"tools": made} if made else {}), **more}


MAIN = call("You are a coding agent.", "Fix it.", "bash", "edit", "agent")


@pytest.mark.parametrize(
    ("wanted", "body"),
    [
        ("agent", MAIN),
        ("agent", call("You are a shell agent.", "Fix it.")),
        ("title", call("You are a title generator. You output ONLY a thread title.", "Fix it.")),
        ("title", call("Name it.", "x", response_format={
            "type": "json_schema", "json_schema": {"schema": {"properties": {"title": {"type": "string"}}}}})),
        ("agent", call("Name it.", "x", response_format={
            "type": "json_schema", "json_schema": {"schema": {"properties": {"title": {}, "body": {}}}}})),
        ("summary", call("Summarize the session in two sentences.", "x")),
        ("compaction", call("You are a context summarization assistant.", "x")),
        ("compaction", call("You are a helpful AI assistant tasked with summarizing conversations.", "x", "Read")),
        ("compaction", call("You are a coding agent.",
                            "Your task is to create a detailed summary of the conversation so far", "bash")),
        ("compaction", call("", "You are performing a CONTEXT CHECKPOINT COMPACTION.", "shell")),
    ],
)  # fmt: skip
def test_known_shapes(wanted: str, body: dict[str, Any]) -> None:
    assert purpose(body, {}) == wanted and wanted in PURPOSES
    assert purpose(body, {"x-parent-session-id": "s"}) == "subagent"


def test_another_agent_in_the_same_rollout_is_a_subagent() -> None:
    purposes = Purposes()
    assert purposes.of(MAIN, {}) == "agent"
    assert purposes.of(call("You are a search specialist.", "Find it.", "bash"), {}) == "subagent"
    again = {**MAIN, "messages": [*MAIN["messages"], {"role": "assistant", "content": "ok"}]}
    assert purposes.of(again, {}) == "agent"


@pytest.mark.parametrize(
    "body",
    [
        call("You are a coding agent. It is Tuesday.", "Fix it.", "bash", "edit", "agent"),  # another date
        call("You are a coding agent.", "Here is what was done so far.", "bash"),  # compacted, fewer tools
        call("You are a coding agent in plan mode.", "Fix it.", "read"),  # another mode of the same conversation
        call("You are a coding agent. It is Tuesday.", "Here is what was done.", "bash", "edit", "agent"),
    ],
)
def test_what_shares_system_tools_or_opening_is_the_agents_own(body: dict[str, Any]) -> None:
    purposes = Purposes()
    purposes.of(MAIN, {})
    assert purposes.of(body, {}) == "agent"


def test_a_side_call_before_the_first_is_not_the_agent() -> None:
    purposes = Purposes()
    assert purposes.of(call("You are a title generator.", "Fix it."), {}) == "title"
    assert purposes.of(MAIN, {}) == "agent"


STRANGE: list[dict[str, Any]] = [
    {},
    {"messages": 5},
    {"messages": [5]},
    {"messages": [], "tools": [5, {"function": 5}]},
]


@pytest.mark.parametrize("body", STRANGE)
def test_unexpected_requests_are_agents(body: dict[str, Any]) -> None:
    assert Purposes().of(body, {}) == "agent"


#: What real agents sent, in the order of their calls, as chat and cut short: see `purpose` of each.
RECORDED = json.loads((Path(__file__).parent / "agent_calls.json").read_text())


@pytest.mark.parametrize(
    "calls", [pytest.param(list(calls), id=agent) for agent, calls in groupby(RECORDED, lambda call: call["agent"])]
)
def test_what_real_agents_sent(calls: list[dict[str, Any]]) -> None:
    purposes = Purposes()
    assert [purposes.of(call["body"], call["headers"]) for call in calls] == [call["purpose"] for call in calls]
