"""llama.cpp: ids in the logprob entries, the prompt from two side routes, and what stop strings and counts hide."""

from __future__ import annotations

import json
from typing import Any

import pytest

from capture.engines import engine
from capture.engines.reader import Reader
from capture.engines.request import CaptureOptions
from capture.engines.wires import CHAT, COMPLETIONS
from capture.record import TokenCapture

PROMPT = [1, 2, 3]


def codes(capture: TokenCapture) -> dict[str, str]:
    return {field: reason.code for field, reason in capture.unavailable.items()}


def llama(count: int, finish: str = "stop", index: int = 0) -> dict[str, Any]:
    content = [{"id": 5 + n, "token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []} for n in range(count)]
    return {"index": index, "message": {"content": "a"}, "finish_reason": finish, "logprobs": {"content": content}}


def spelled(choice: dict[str, Any], token: str) -> dict[str, Any]:
    choice["logprobs"]["content"][1] |= {"token": token, "bytes": list(token.encode())}
    return choice


def asked_llama(choices: list[Any], count: int, **request: Any) -> tuple[TokenCapture, list[str], Any]:
    """A llama.cpp call with its side questions answered: the capture, the routes asked, what the agent gets."""
    llamacpp = engine("llamacpp")
    body = {"messages": [{"role": "user", "content": "hi"}], **request}
    reader = Reader(llamacpp, CHAT, body, llamacpp.ask(CHAT, body, CaptureOptions()))
    answers = iter([{"prompt": "<s>hi"}, {"tokens": PROMPT}])
    asked: list[str] = []
    questions = llamacpp.follow_ups(reader)
    if questions is not None:
        try:
            asked.append(next(questions)[0])
            while True:
                asked.append(questions.send(next(answers))[0])
        except StopIteration:
            pass
    usage = {"prompt_tokens": 3, "completion_tokens": count}
    forwarded = json.loads(reader.body(json.dumps({"choices": choices, "usage": usage}).encode()))
    return reader.capture("ok", status=200), asked, forwarded


@pytest.mark.parametrize("request_body", [{}, {"stream": True}, {"logprobs": True, "top_logprobs": 2}])
def test_llamacpp_ids_are_in_the_entries_and_the_prompts_come_from_two_routes(request_body: Any) -> None:
    capture, asked, _ = asked_llama([llama(3)], 3, **request_body)
    assert asked == ["/apply-template", "/tokenize"]
    assert capture.complete and capture.prompt_token_ids == PROMPT
    assert capture.completions[0].token_ids == [5, 6, 7]


def test_llamacpp_counts_one_choice_of_n() -> None:
    assert asked_llama([llama(3), llama(5, index=1)], 3, n=2)[0].complete
    assert not asked_llama([llama(2), llama(5, index=1)], 3, n=2)[0].complete


def test_llamacpp_loses_the_token_that_completes_a_stop_string_and_reports_it() -> None:
    capture, _, _ = asked_llama([llama(3)], 4, stop=["x"])
    assert codes(capture) == {"completion_token_ids": "stop_token_not_returned"}


def test_llamacpp_choices_that_a_stop_string_may_have_cut_cannot_be_checked() -> None:
    """Its usage counts the first choice alone: that another lacks its last token, nothing would say."""
    capture, _, _ = asked_llama([llama(3, "length"), llama(2, "stop", index=1)], 3, n=2, stop=["x"])
    assert codes(capture) == {"completion_token_ids": "choice_not_counted"}
    cut = [llama(3, "length"), llama(3, "length", index=1)]
    assert asked_llama(cut, 3, n=2, stop=["x"], max_tokens=3)[0].complete
    assert codes(asked_llama(cut, 3, n=2, max_tokens=4)[0]) == {"completion_token_ids": "choice_not_counted"}


def test_llamacpp_gives_one_entry_for_a_character_of_several_tokens_and_reports_it() -> None:
    """As seen on xllamacpp 2026.10: a fox is four tokens, and one entry with the last one's id."""
    entry = spelled(llama(3), "🦊")
    capture, _, _ = asked_llama([entry], 6)
    assert codes(capture) == {"completion_token_ids": "character_ids_not_returned"}
    assert "3 of 6 sampled ids were returned" in capture.unavailable["completion_token_ids"].detail
    assert asked_llama([spelled(llama(3), "本")], 3)[0].complete, "one token, as the count says"


def test_llamacpp_choices_that_contain_such_a_character_cannot_be_checked() -> None:
    capture, _, _ = asked_llama([llama(3), spelled(llama(3, index=1), "🦊")], 3, n=2)
    assert codes(capture) == {"completion_token_ids": "choice_not_counted"}
    assert asked_llama([spelled(llama(3), "本"), llama(3, index=1)], 3, n=2)[0].complete


def test_llamacpp_without_its_side_routes_or_with_an_image_says_so() -> None:
    llamacpp = engine("llamacpp")
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    for messages, code in (([{"role": "user", "content": "x"}], "prompt_route_missing"), (image, "prompt_has_media")):
        body = {"messages": messages}
        reader = Reader(llamacpp, CHAT, body, llamacpp.ask(CHAT, body, CaptureOptions()))
        questions = llamacpp.follow_ups(reader)
        assert questions is not None
        with pytest.raises(StopIteration):
            next(questions)
            questions.send(None)
        reader.body(json.dumps({"choices": [llama(1)], "usage": {"completion_tokens": 1}}).encode())
        assert codes(reader.capture("ok", status=200)) == {"prompt_token_ids": code}


def test_a_stop_string_that_the_first_token_completes_leaves_nothing() -> None:
    nothing = {"index": 0, "message": {"content": ""}, "finish_reason": "stop"}
    capture, _, _ = asked_llama([nothing], 1, stop=["x"])
    assert codes(capture) == {"completion_token_ids": "stop_token_not_returned", "logprobs": "logprobs_not_returned"}
    assert "0 of 1" in capture.unavailable["completion_token_ids"].detail


def test_llamacpp_needs_one_alternative_and_an_agent_that_asked_for_none_gets_no_logprobs() -> None:
    """`top_logprobs: 0` gives no entries at all (xllamacpp 2026.10): the key is not there."""
    _, _, forwarded = asked_llama([llama(1)], 1, logprobs=True, top_logprobs=0)
    assert "logprobs" not in forwarded["choices"][0]
    _, _, forwarded = asked_llama([llama(1)], 1, logprobs=True, top_logprobs=1)
    assert forwarded["choices"][0]["logprobs"] == llama(1)["logprobs"]


def test_llamacpp_reads_a_number_as_that_many_alternatives() -> None:
    ask = engine("llamacpp").ask(CHAT, {"messages": [], "logprobs": 1}, CaptureOptions())
    assert ask.body["logprobs"] == 1 and ask.body["logprobs"] is not True and ask.injected == ()


@pytest.mark.parametrize("body", [{}, {"logprobs": 0}, {"logprobs": None}])
def test_llamacpp_completions_carry_null_where_not_requested(body: Any) -> None:
    llamacpp = engine("llamacpp")
    request = {"prompt": "a", **body}
    reader = Reader(llamacpp, COMPLETIONS, request, llamacpp.ask(COMPLETIONS, request, CaptureOptions()))
    choice = {"text": "a", "index": 0, "logprobs": llama(1)["logprobs"], "finish_reason": "length"}
    data = json.dumps({"choices": [choice], "usage": {"completion_tokens": 1}}).encode()
    assert json.loads(reader.body(data))["choices"] == [{**choice, "logprobs": None}]


def test_llamacpp_knows_no_echo() -> None:
    llamacpp = engine("llamacpp")
    request = {"prompt": [1, 2, 3], "echo": True}
    reader = Reader(llamacpp, COMPLETIONS, request, llamacpp.ask(COMPLETIONS, request, CaptureOptions()))
    choice = {"text": "a", "index": 0, "logprobs": llama(2)["logprobs"], "finish_reason": "length"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    questions = llamacpp.follow_ups(reader)
    assert questions is not None and list(questions) == [], "the prompt's ids are the request's own"
    reader.body(json.dumps({"choices": [choice], "usage": usage}).encode())
    capture = reader.capture("ok", status=200)
    assert capture.complete and capture.prompt_token_ids == [1, 2, 3]
