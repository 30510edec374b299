"""The prompt that extends a call: from held ids, sampled ids and two renderings, by hand-made ids that can be read."""

from __future__ import annotations

import pytest

from capture.record import Ids
from capture.token_in.bridge import Bridge, beginning, bridge, closing_of, reads_alike, with_other_text
from capture.token_in.parent import Conversation, Parent, PastCall, PastReply

SYSTEM, START, STOP, NEWLINE, USER, ASSISTANT = 100, 101, 102, 10, 1, 2
ASKED = [START, USER, NEWLINE, 50, STOP, NEWLINE, START, ASSISTANT, NEWLINE]
NEXT = [START, USER, NEWLINE, 60, STOP, NEWLINE, START, ASSISTANT, NEWLINE]


def found(
    sampled: list[int], *, stop: int | None = STOP, prompt: list[int] = ASKED, rendered: list[int] = ASKED
) -> Parent:
    made = Conversation((), (), (), 0, 0)
    reply = PastReply(0, Ids.of(sampled).text, stop=stop)
    return Parent(PastCall(0, made, Ids.of(prompt).text, Ids.of(rendered).text, (reply,)), reply)


def made(rendered: list[int], answered: list[int], parent: Parent, closing: list[int] | None = None) -> Bridge | str:
    return bridge(Ids.of(rendered), Ids.of(answered), parent, None if closing is None else Ids.of(closing))


def test_a_reply_that_was_tokenized_again_is_bridged() -> None:
    answered = [*ASKED, 73, 74, STOP, NEWLINE]
    result = made([*answered, *NEXT], answered, found([70, 71, STOP]))
    assert isinstance(result, Bridge)
    assert result.prompt == [*ASKED, 70, 71, STOP, NEWLINE, *NEXT]
    assert (result.ours, result.theirs) == ([70, 71, STOP, NEWLINE], [73, 74, STOP, NEWLINE])
    assert result.closing == 0 and not result.whole


def test_a_bridged_prompt_is_bridged_again() -> None:
    """What is held and what was rendered for it differ in an older reply, and end alike."""
    old = [START, ASSISTANT, NEWLINE, 70, 71, STOP, NEWLINE]
    other = [START, ASSISTANT, NEWLINE, 73, STOP, NEWLINE]
    answered = [*other, *ASKED, 80, STOP, NEWLINE]
    result = made([*answered, *NEXT], answered, found([81, STOP], prompt=[*old, *ASKED], rendered=[*other, *ASKED]))
    assert isinstance(result, Bridge)
    assert result.prompt == [*old, *ASKED, 81, STOP, NEWLINE, *NEXT]
    assert result.ours == [81, STOP, NEWLINE]


def test_where_the_beginning_was_re_rendered_all_of_it_is_compared() -> None:
    answered = [START, USER, NEWLINE, 51, STOP, NEWLINE, START, ASSISTANT, NEWLINE, 73, STOP]
    result = made([*answered, *NEXT], answered, found([70, STOP], prompt=[9, *ASKED[1:8], 11]))
    assert isinstance(result, Bridge)
    assert result.whole
    assert result.theirs == answered


def test_a_template_that_writes_nothing_after_the_stop_token() -> None:
    answered = [*ASKED, 73, STOP]
    result = made([*answered, *NEXT], answered, found([70, STOP]))
    assert isinstance(result, Bridge)
    assert result.prompt == [*ASKED, 70, STOP, *NEXT]


def test_a_template_whose_next_turn_starts_with_the_stop_token() -> None:
    answered = [*ASKED, 73]
    result = made([*answered, 150, 60, START, ASSISTANT], answered, found([70, 150], stop=150))
    assert isinstance(result, Bridge)
    assert result.prompt == [*ASKED, 70, 150, 60, START, ASSISTANT]
    assert result.theirs == [73, 150]


@pytest.mark.parametrize(
    ("rendered", "answered", "reason"),
    [
        ([*ASKED, 74, STOP, NEWLINE, *NEXT], [*ASKED, 73, STOP, NEWLINE], "template_rewrites_history"),
        ([*ASKED, 73, STOP, NEWLINE], [*ASKED, 73, STOP, NEWLINE], "template_rewrites_history"),
        ([*ASKED, 73, 99, *NEXT], [*ASKED, 73, 99], "template_ends_turn_otherwise"),
        # The stop tokens of earlier turns are not this reply's.
        ([*ASKED, 73, *NEXT], [*ASKED, 73], "template_ends_turn_otherwise"),
    ],
)
def test_what_is_not_bridged(rendered: list[int], answered: list[int], reason: str) -> None:
    assert made(rendered, answered, found([70, STOP])) == reason


def test_a_cut_reply_gets_the_closing_tokens_which_are_counted() -> None:
    answered = [*ASKED, 73, STOP, NEWLINE]
    result = made([*answered, *NEXT], answered, found([70, 71], stop=None), [STOP, NEWLINE])
    assert isinstance(result, Bridge)
    assert result.prompt == [*ASKED, 70, 71, STOP, NEWLINE, *NEXT]
    assert result.closing == 2
    assert result.ours == [70, 71, STOP, NEWLINE]


@pytest.mark.parametrize("closing", [None, [99], [STOP, 11]])
def test_a_cut_reply_that_the_template_closes_differently_is_not_bridged(closing: list[int] | None) -> None:
    answered = [*ASKED, 73, STOP, NEWLINE]
    assert made([*answered, *NEXT], answered, found([70], stop=None), closing) == "template_closes_otherwise"


def test_what_closes_a_reply_is_what_two_renderings_share() -> None:
    assert closing_of(Ids.of([1, 2, 7, STOP, NEWLINE]), Ids.of([1, 2, 8, 9, STOP, NEWLINE])) == [STOP, NEWLINE]
    assert closing_of(Ids.of([1, 7]), Ids.of([1, 8])) == []


def test_a_placeholder_for_the_reply_alone() -> None:
    tool = {"role": "tool", "content": "00 files"}
    other = with_other_text([{"role": "assistant"}, tool, tool], 1)
    assert other is not None
    assert [message.get("content") for message in other] == [None, "1", "00 files"]
    assert with_other_text([{"role": "assistant"}, {"role": "user", "content": "x"}], 1) is None
    assert beginning(Ids.of([1, 2, 3, 4]), Ids.of([1, 2, 5])) == [1, 2]


@pytest.mark.parametrize(
    ("ours", "theirs", "alike"),
    [
        ('a {"x": 1, "y": [2]} b', 'a {"y":[2],"x":1.0} b', True),
        ('{"arguments": "{\\"a\\": 1}"}', '{"arguments": "{\\"a\\":1}"}', True),
        ("<think>\nlong\n</think>\n\nanswer", "answer ", True),
        ("long\n</think>\n\nanswer", "answer", True),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final", "<|channel|>final", True),
        ('{"x": "caf\\u00e9"}', '{"x": "café"}', True),
        ('{"x": 1} and more', '{"x": 1}', False),
        ('{"x": 1}', '{"x": 2}', False),
        ('{"x": true}', '{"x": 1}', False),
        ('{"x": "1"}', '{"x": 1}', False),
        ("answer", "answers", False),
        ("{ broken", "{broken", True),
        ("{" * 30000, "{" * 30000 + "x", False),
        # What is never closed is no reasoning: a difference behind it counts.
        ("a <think> b", "a <think> c", False),
        ("<|channel|>analysis<|message|>a", "<|channel|>analysis<|message|>b", False),
    ],
)
def test_what_reads_alike(ours: str, theirs: str, alike: bool) -> None:
    assert reads_alike(ours, theirs) is alike


def test_of_a_whole_conversation_nothing_is_cut_off_before_a_closing_tag() -> None:
    assert reads_alike("one</think>answer", "another</think>answer")
    assert not reads_alike("one</think>answer", "another</think>answer", begun=False)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "piece",
    [
        '{"a":{"b":',
        '{"a":[',
        "<think>",
        "<|channel|>analysis<|message|>",
        "</think>",
        '{"a":"' + "x" * 500 + '","b":',
        "{",
    ],
)
def test_reading_takes_no_longer_for_texts_made_to_slow_it(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    assert not reads_alike(text + "a", text + "b", begun=False)
