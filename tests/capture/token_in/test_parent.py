"""Which call a conversation continues: what is forgiven, and what makes it another conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from capture.chat.messages import canonical_arguments, canonical_hash
from capture.record import Ids
from capture.token_in.parent import Conversation, Parent, PastCall, PastReply, parent

SYSTEM = {"role": "system", "content": "You are terse."}
USER = {"role": "user", "content": "List the files."}
CALL = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "ls will do",
    "tool_calls": [
        {"id": "call1", "type": "function", "function": {"name": "run", "arguments": '{"cmd": "ls", "n": 1}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call1", "content": "a\nb"}
TOOLS = [{"type": "function", "function": {"name": "run"}}]


def conversation(*messages: dict[str, Any], **more: Any) -> Conversation:
    made = Conversation.of({"model": "m", "messages": list(messages), "tools": TOOLS, **more})
    assert made is not None
    return made


def past_call(number: int, *messages: dict[str, Any], reply: dict[str, Any] = CALL, **more: Any) -> PastCall:
    ids = Ids.of([1, 2, number]).text
    return PastCall(
        number, conversation(*messages, **more), ids, ids, (PastReply(canonical_hash(reply), b"7,2", stop=2),)
    )


def sent_back(**change: Any) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(CALL))
    for name in ("arguments", "name"):
        if name in change:
            made["tool_calls"][0]["function"][name] = change.pop(name)
    if "id" in change:
        made["tool_calls"][0]["id"] = change.pop("id")
    made.update(change)
    return {name: value for name, value in made.items() if value is not ...}


@pytest.mark.parametrize(
    "back",
    [
        CALL,
        sent_back(arguments='{"n":1,"cmd":"ls"}'),
        sent_back(arguments='{"cmd": "\\u006cs", "n": 1.0}'),
        sent_back(arguments={"cmd": "ls", "n": 1}),
        sent_back(content=""),
        sent_back(content="  \n"),
        sent_back(content=...),
        sent_back(reasoning_content=...),
        sent_back(reasoning_content="something else"),
        sent_back(content="<think>\nls will do\n</think>\n\n"),
        sent_back(refusal=None, annotations=[], audio=None),
    ],
)
def test_ignored_differences_continue_the_call(back: dict[str, Any]) -> None:
    found = parent(conversation(SYSTEM, USER, back, RESULT), [past_call(3, SYSTEM, USER)])
    assert isinstance(found, Parent)
    assert found.past.call == 3


@pytest.mark.parametrize(
    ("back", "reason"),
    [
        (sent_back(arguments='{"cmd": "ls", "n": 2}'), "history_edited"),
        (sent_back(arguments='{"cmd": "ls", "n": true}'), "history_edited"),
        (sent_back(arguments='{"cmd": "ls "}'), "history_edited"),
        (sent_back(name="exec"), "history_edited"),
        (sent_back(id="call2"), "history_edited"),
        (sent_back(content="Sure."), "history_edited"),
        (sent_back(tool_calls=None, content="ls"), "history_edited"),
    ],
)
def test_another_reply_is_another_conversation(back: dict[str, Any], reason: str) -> None:
    assert parent(conversation(SYSTEM, USER, back, RESULT), [past_call(3, SYSTEM, USER)]) == reason


def test_inner_white_space_is_not_ignored() -> None:
    record = {"role": "assistant", "content": "def f():\n    return 1"}
    flat = {"role": "assistant", "content": "def f():\n  return 1"}
    earlier = past_call(3, USER, reply=record)
    assert parent(conversation(USER, flat, USER), [earlier]) == "history_edited"
    assert isinstance(
        parent(conversation(USER, {**record, "content": " def f():  \r\n    return 1\n"}, USER), [earlier]), Parent
    )


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (conversation(USER), "begins"),
        (conversation(SYSTEM, USER), "begins"),
        (conversation(SYSTEM, {"role": "user", "content": "Summary: files were listed."}), "begins"),
        (conversation(SYSTEM, USER, {"role": "assistant", "content": "a shot"}, USER), "history_edited"),
        (conversation(USER, {"role": "assistant", "content": "a shot"}, USER), "begins"),
        (conversation({**SYSTEM, "content": "Be kind."}, USER, CALL, RESULT), "system_changed"),
        (conversation(USER, CALL, RESULT), "system_changed"),
        (conversation(SYSTEM, {**USER, "content": "List the files!"}, CALL, RESULT), "history_edited"),
        (conversation(SYSTEM, CALL, RESULT), "history_edited"),
        (conversation(SYSTEM, USER, CALL, RESULT, {"role": "assistant", "content": "two"}, USER), "history_edited"),
        (conversation(SYSTEM, USER, CALL), "ends_with_reply"),
        (conversation(SYSTEM, USER, CALL, RESULT, tools=None), "tools_changed"),
        (conversation(SYSTEM, USER, CALL, RESULT, model="other"), "options_changed"),
        (conversation(SYSTEM, USER, CALL, RESULT, tool_choice="none"), "options_changed"),
        (conversation(SYSTEM, USER, CALL, RESULT, chat_template_kwargs={"x": 1}), "options_changed"),
    ],
)
def test_the_reason_why_no_parent_is_found(now: Conversation, reason: str) -> None:
    assert parent(now, [past_call(3, SYSTEM, USER)]) == reason


def test_a_required_tool_is_the_same_prompt() -> None:
    now = conversation(SYSTEM, USER, CALL, RESULT, tool_choice="required", temperature=0.3)
    assert isinstance(parent(now, [past_call(3, SYSTEM, USER)]), Parent)


def test_two_calls_that_gave_the_same_reply_are_ambiguous() -> None:
    now = conversation(SYSTEM, USER, CALL, RESULT)
    assert parent(now, [past_call(3, SYSTEM, USER), past_call(4, SYSTEM, USER)]) == "ambiguous_parent"


def test_of_several_choices_the_one_sent_back_is_followed() -> None:
    earlier = past_call(3, SYSTEM, USER)
    other = PastReply(canonical_hash({"role": "assistant", "content": "no"}), b"9,2", stop=2)
    both = PastCall(3, earlier.conversation, earlier.prompt_text, earlier.rendered_text, (other, *earlier.replies))
    found = parent(conversation(SYSTEM, USER, CALL, RESULT), [both])
    assert isinstance(found, Parent)
    assert found.reply.sampled == [7, 2]


def test_a_forgotten_parent_is_recognized() -> None:
    now = conversation(SYSTEM, USER, CALL, RESULT)
    assert parent(now, [], {canonical_hash(CALL)}) == "parent_forgotten"
    assert parent(now, []) == "begins"


def test_what_cannot_be_followed_says_why() -> None:
    earlier = past_call(3, SYSTEM, USER)
    cut = PastCall(
        3,
        earlier.conversation,
        earlier.prompt_text,
        earlier.rendered_text,
        (PastReply(canonical_hash(CALL), b"", unusable="stop_string"),),
    )
    assert parent(conversation(SYSTEM, USER, CALL, RESULT), [cut]) == "stop_string"


@pytest.mark.parametrize(
    "body", [{}, {"messages": "hi"}, {"messages": [1]}, {"messages": [{"role": "user", "content": "\ud800"}]}]
)
def test_what_is_not_a_conversation_is_none(body: dict[str, Any]) -> None:
    assert Conversation.of(body) is None


def test_unexpected_messages_are_compared_anyway() -> None:
    for message in (
        {"role": "assistant", "tool_calls": "run"},
        {"role": "assistant", "tool_calls": [None, 3, {"function": "x"}]},
        {"role": "assistant", "content": 3},
        {"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "x"}}, 3]},
        {},
    ):
        canonical_hash(message)


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ("", "{}", True),
        (None, "{}", True),
        ('{"a":1.0}', '{"a": 1}', True),
        ('{"a":1e3}', '{"a": 1000}', True),
        ('{"a":true}', '{"a": 1}', False),
        ('{"a":"1"}', '{"a": 1}', False),
        ("{not json", " {not json ", True),
    ],
)
def test_arguments_are_compared_as_json(ours: Any, theirs: Any, same: bool) -> None:
    assert (canonical_arguments(ours) == canonical_arguments(theirs)) is same
