"""Which call a call was meant to continue, when its tokens continue none."""

from __future__ import annotations

from typing import Any

import pytest

from capture.breaks.breaks import CallView
from capture.breaks.lineage import predecessor
from capture.record import Ids

Message = dict[str, Any]
SYSTEM: Message = {"role": "system", "content": "You are an agent."}
TASK: Message = {"role": "user", "content": "Write 42 to the file."}
RESULT: Message = {"role": "tool", "content": "ok"}


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def call_view(call: int, prompt: list[int], messages: list[Message] | None, reply: Message | None = None) -> CallView:
    return CallView(call, Ids.of(prompt), Ids.of([90 + call]), messages=messages, reply=reply)


FIRST = call_view(0, [1, 2, 3], [SYSTEM, TASK], says("I write it."))


def follows(call: CallView, *earlier: CallView) -> int | None:
    found = predecessor(call, earlier or [FIRST])
    return None if found is None else found.call


def test_messages_that_continue_a_call_follow_it_whatever_their_tokens() -> None:
    assert follows(call_view(1, [7, 8], [SYSTEM, TASK, says("I write it."), RESULT])) == 0


def test_arguments_white_space_and_reasoning_in_another_form_are_the_same_message() -> None:
    def calls(arguments: str) -> Message:
        return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "w", "arguments": arguments}}]}

    before = call_view(0, [1, 2], [SYSTEM, TASK, calls('{"a": 1}'), says("<think>\nhm\n</think>\n\nok")], says("done"))
    after = call_view(1, [5], [SYSTEM, TASK, calls('{"a":1}'), says("ok "), says("done"), RESULT])
    assert follows(after, before) == 0


def test_a_prompt_that_keeps_the_whole_of_an_earlier_one_follows_it() -> None:
    assert follows(call_view(1, [1, 2, 3, 50], None)) == 0


def test_a_changed_system_prompt_still_follows() -> None:
    other = {**SYSTEM, "content": "You are an agent. It is Monday."}
    assert follows(call_view(1, [9], [other, TASK, says("I write it."), RESULT])) == 0


def test_a_shortened_history_follows_the_call_that_it_shares_most_with() -> None:
    second = call_view(1, [1, 2, 3, 4, 5], [SYSTEM, TASK, says("a"), RESULT], says("b"))
    assert follows(call_view(2, [1, 2, 9], [SYSTEM, TASK, says("b"), RESULT]), FIRST, second) == 1


def test_a_summary_of_an_earlier_reply_follows_it() -> None:
    summary = "The number 42 was written to the file, and the file was checked."
    before = call_view(0, [1, 2], [SYSTEM, TASK], says(summary))
    assert follows(call_view(1, [1, 9], [SYSTEM, {"role": "user", "content": f"So far: {summary}"}]), before) == 0


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("the same question again", call_view(1, [1, 2, 3], [SYSTEM, TASK])),
        ("the beginning of it", call_view(1, [1, 2], [SYSTEM])),
        (
            "another task under the same system prompt",
            call_view(1, [1, 2, 8], [SYSTEM, {"role": "user", "content": "Say hi"}]),
        ),
        (
            "a title, under another system prompt",
            call_view(1, [6], [{"role": "system", "content": "Make a title."}, TASK]),
        ),
        ("no messages and other tokens", call_view(1, [6, 7], None)),
    ],
)
def test_unrelated_calls_follow_nothing(name: str, call: CallView) -> None:
    assert follows(call) is None, name
