"""What each engine is asked for, and the reason for everything that does not come back."""

from __future__ import annotations

import ast
import json
import time
from pathlib import Path
from typing import Any

import pytest

from capture.engines import ENGINES, NAMES, detect, engine
from capture.engines.reader import Reader
from capture.engines.request import CaptureOptions
from capture.engines.wires import CHAT, COMPLETIONS
from capture.errors import CaptureError
from capture.record import FIELDS, REASONS, TokenCapture
from capture.unavailable import CODES, why

PROMPT = [1, 2, 3]


def read(
    answer: Any, *, name: str = "vllm", wire: str = CHAT, wants: CaptureOptions | None = None, **request: Any
) -> tuple[Reader, TokenCapture, Any]:
    """An unstreamed answer read by an engine's reader: the reader, the capture, and what the agent gets."""
    adapter = engine(name)
    reader = Reader(adapter, wire, request, adapter.ask(wire, request, wants or CaptureOptions()))
    forwarded = json.loads(reader.body(json.dumps(answer).encode()))
    return reader, reader.capture("ok", status=200), forwarded


def streamed(chunks: list[Any], *, name: str = "vllm", **request: Any) -> tuple[TokenCapture, list[Any]]:
    adapter = engine(name)
    body = {"stream": True, **request}
    reader = Reader(adapter, CHAT, body, adapter.ask(CHAT, body, CaptureOptions()))
    seen = [reader.event(json.dumps(chunk).encode()) for chunk in chunks]
    return reader.capture("ok", status=200), [json.loads(data) for data in seen if data is not None]


def answer(**changes: Any) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": "ab"},
        "finish_reason": "stop",
        "token_ids": [7, 8],
        "logprobs": {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]},
    }
    choice.update(changes.pop("choice", {}))
    body = {
        "object": "chat.completion",
        "choices": [choice],
        "prompt_token_ids": PROMPT,
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
    return {**body, **changes}


def codes(capture: TokenCapture) -> dict[str, str]:
    return {field: reason.code for field, reason in capture.unavailable.items()}


def entries(*logprobs: Any) -> dict[str, Any]:
    return {"logprobs": {"content": [{"token": "x", "logprob": value} for value in logprobs]}}


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_one_of_the_four_reasons_and_says_what_to_do(code: str) -> None:
    result = why(code)
    assert result.reason in REASONS and len(result.detail) > 30 and "{" not in result.detail


def test_a_complete_answer_is_complete() -> None:
    _, capture, _ = read(answer())
    assert capture.complete and codes(capture) == {}
    assert capture.completions[0].tokens == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"prompt_token_ids": None}, {"prompt_token_ids": "no_prompt_ids"}),
        ({"prompt_token_ids": [1, None, 3]}, {"prompt_token_ids": "no_prompt_ids"}),
        ({"prompt_token_ids": [1, 2]}, {"prompt_token_ids": "count_mismatch_usage"}),
        ({"choice": {"token_ids": None}}, {"completion_token_ids": "server_ignored_return_token_ids"}),
        ({"choice": {"token_ids": [7, True]}}, {"completion_token_ids": "ids_malformed"}),
        ({"choice": {"token_ids": [7, -8]}}, {"completion_token_ids": "ids_malformed"}),
        ({"choice": {"logprobs": None}}, {"logprobs": "logprobs_not_returned"}),
        ({"choice": entries(-0.5)}, {"logprobs": "count_mismatch_ids_logprobs"}),
        ({"choice": entries(-0.5, None)}, {"logprobs": "logprob_missing_for_token"}),
        ({"choice": entries(-0.5, "low")}, {"logprobs": "logprob_missing_for_token"}),
        ({"choice": entries(-0.5, True)}, {"logprobs": "logprob_missing_for_token"}),
        ({"choice": entries(-0.5, float("nan"))}, {"logprobs": "logprob_not_finite"}),
        ({"choice": entries(-0.5, float("inf"))}, {"logprobs": "logprob_not_finite"}),
        ({"choice": entries(-0.5, float("-inf"))}, {"logprobs": "logprob_clamped"}),
        ({"choice": entries(-0.5, -9999.0)}, {"logprobs": "logprob_clamped"}),
        ({"usage": {"prompt_tokens": 3, "completion_tokens": 3}}, {"completion_token_ids": "count_mismatch_usage"}),
        ({"usage": None}, {"completion_token_ids": "usage_not_returned"}),
        ({"choices": []}, {"completion_token_ids": "no_choices", "logprobs": "no_choices"}),
    ],
)
def test_what_is_missing_is_named_with_its_reason(changes: Any, wanted: dict[str, str]) -> None:
    _, capture, _ = read(answer(**changes))
    assert not capture.complete
    assert codes(capture) == wanted


def test_fewer_choices_than_asked_for_are_missed() -> None:
    _, capture, _ = read(answer(), n=2)
    assert codes(capture) == {"completion_token_ids": "choices_missing", "logprobs": "choices_missing"}


def test_no_sentinel_replaces_a_missing_logprob() -> None:
    _, capture, _ = read(answer(choice=entries(-0.5, -9999.0)))
    assert capture.completions[0].logprobs == [-0.5, None]


def test_an_empty_list_of_ids_is_legal_and_a_missing_one_is_not() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 0}
    empty = {"token_ids": [], "logprobs": {"content": []}}
    assert read(answer(choice=empty, usage=usage))[1].complete
    assert not read(answer(choice={**empty, "token_ids": None}, usage=usage))[1].complete


@pytest.mark.parametrize(
    "choice",
    [
        {"token_ids": None, "response_token_ids": [7, 8]},
        {"token_ids": None, "provider_specific_fields": {"token_ids": [7, 8]}},
        {"token_ids": None, "raw_output": {"completion_token_ids": [7, 8], "prompt_token_ids": PROMPT}},
        {"token_ids": None, "logprobs": {"content": [{"token": f"token_id:{n}", "logprob": -1} for n in (7, 8)]}},
        {"token_ids": None, "logprobs": {"content": [{"token": "a", "token_id": n, "logprob": -1} for n in (7, 8)]}},
    ],
    ids=["response_token_ids", "provider_specific_fields", "raw_output", "token_id strings", "token_id fields"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_ids_are_found_in_every_versions_place(name: str, choice: Any) -> None:
    _, capture, _ = read(answer(choice=choice), name=name)
    assert capture.complete and capture.completions[0].token_ids == [7, 8]


def test_a_prompt_in_another_place_than_the_ids_is_found() -> None:
    """A gateway may move one and not the other."""
    moved = {"token_ids": [7, 8], "provider_specific_fields": {"prompt_token_ids": PROMPT, "other": 1}}
    reader, capture, forwarded = read(answer(prompt_token_ids=None, choice=moved))
    assert capture.complete and capture.prompt_token_ids == PROMPT
    for body in (forwarded, reader.assembled()):
        assert body["choices"][0]["provider_specific_fields"] == {"other": 1}
        assert "7,8" not in json.dumps(body, separators=(",", ":"))


def test_ids_sent_twice_in_one_chunk_count_once() -> None:
    twice = {"token_ids": [7, 8], "provider_specific_fields": {"token_ids": [7, 8]}}
    assert read(answer(choice=twice))[1].complete


@pytest.mark.parametrize("token", ["token_id:x", "token_id:²", "token_id:-1", "token_id:", "token_id:1 "])
def test_a_token_that_only_looks_like_an_id_is_none(token: str) -> None:
    logprobs = {"content": [{"token": token, "logprob": -1}, {"token": "token_id:8", "logprob": -1}]}
    _, capture, _ = read(answer(choice={"token_ids": None, "logprobs": logprobs}))
    assert codes(capture)["completion_token_ids"] == "server_ignored_return_token_ids"


def test_sglext_keeps_what_is_not_ours() -> None:
    body = answer(prompt_token_ids=None, choice={"token_ids": None})
    ext = {"input_ids": PROMPT, "output_ids": [[7, 8]], "routed_experts": "AAAA"}
    _, capture, forwarded = read({**body, "sglext": ext}, name="sglang")
    assert capture.complete and forwarded["sglext"] == {"routed_experts": "AAAA"}


def test_an_agent_of_sglang_gets_the_one_list_it_asked_for() -> None:
    body = answer(prompt_token_ids=None, choice={"token_ids": None})
    ext = {"input_ids": PROMPT, "output_ids": [[7, 8]]}
    _, _, forwarded = read({**body, "sglext": ext}, name="sglang", return_output_ids_in_sglext=True)
    assert forwarded["sglext"] == {"output_ids": [[7, 8]]}
    both = {"response_token_ids": [7, 8], "prompt_token_ids": PROMPT}
    _, _, forwarded = read(answer(prompt_token_ids=None, choice=both), name="sglang", return_prompt_token_ids=True)
    assert forwarded["choices"][0]["prompt_token_ids"] == PROMPT and "response_token_ids" not in forwarded["choices"][0]


def test_sglang_flushes_logprobs_on_chunks_of_their_own_which_are_the_agents_if_it_asked() -> None:
    step = {"index": 0, "delta": {"reasoning_content": None}, "finish_reason": None, **entries(-0.5)}
    end = {"index": 0, "delta": {}, "finish_reason": "stop"}
    _, seen = streamed([{"choices": [step]}, {"choices": [end]}], name="sglang", logprobs=True)
    assert len(seen) == 2 and seen[0]["choices"][0]["logprobs"]["content"]
    _, seen = streamed([{"choices": [step]}, {"choices": [end]}], name="sglang")
    assert len(seen) == 1


def test_a_step_without_text_reaches_an_agent_that_asked_for_what_it_has() -> None:
    """Where ids are not asked for vLLM (0.32) sends no such step, and so loses its logprobs (`serving.py`). Through us
    the agent gets them: it never loses what it asked for.
    """
    step = {"index": 0, "delta": {}, "finish_reason": None, "token_ids": [7], **entries(-0.5)}
    end = {"index": 0, "delta": {}, "finish_reason": "stop", "token_ids": [8], **entries(-0.5)}
    chunks = [{"choices": [step]}, {"choices": [end]}, {"choices": [], "usage": {"completion_tokens": 2}}]
    for asked in ({"logprobs": True}, {"return_token_ids": True}):
        assert len(streamed(chunks, **asked)[1]) == 2
    assert len(streamed(chunks)[1]) == 1


def test_kimis_prompt_count_is_three_low_and_nothing_else_is_accepted() -> None:
    for prompt_tokens, complete in ((3, True), (0, True), (2, False), (4, False)):
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 2}
        assert read(answer(usage=usage), name="sglang", model="moonshotai/Kimi-K3")[1].complete is complete
    assert not read(answer(usage={"prompt_tokens": 0, "completion_tokens": 2}), name="sglang", model="m")[1].complete


def test_sglext_contains_ids_by_choice() -> None:
    body = answer(prompt_token_ids=None, choice={"token_ids": None})
    _, capture, forwarded = read({**body, "sglext": {"input_ids": PROMPT, "output_ids": [[7, 8]]}}, name="sglang")
    assert capture.complete and capture.prompt_token_ids == PROMPT
    assert "sglext" not in forwarded


def test_ids_in_sglang_deltas_are_taken_too() -> None:
    """A later SGLang (PR 37365) may send `choices[].token_ids` in a stream."""
    chunk = {"index": 0, "delta": {"content": "a"}, "token_ids": [7], **entries(-0.5)}
    end = {"index": 0, "delta": {"content": "b"}, "token_ids": [8], "finish_reason": "stop", **entries(-0.25)}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    capture, seen = streamed(
        [
            {"choices": [chunk], "prompt_token_ids": PROMPT},
            {"choices": [end]},
            {"choices": [], "usage": usage},
        ],
        name="sglang",
    )
    assert capture.complete and capture.completions[0].token_ids == [7, 8]
    assert all("token_ids" not in choice for body in seen for choice in body["choices"])


def test_streamed_tool_calls_that_lose_ids_say_what_to_upgrade() -> None:
    capture, _ = streamed(
        [
            {"choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": [7], **entries(-0.5)}],
             "prompt_token_ids": PROMPT},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
            {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}},
        ],
        tools=[{}],
    )  # fmt: skip
    assert codes(capture) == {"completion_token_ids": "streamed_tokens_dropped_by_parser"}
    assert "1 of 5" in capture.unavailable["completion_token_ids"].detail
    assert "--buffered" in capture.unavailable["completion_token_ids"].detail


def test_sglang_without_a_parser_loses_logprobs_in_a_stream() -> None:
    capture, _ = streamed(
        [
            {"choices": [{"index": 0, "delta": {"content": "a"}, **entries(-0.5)}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "sglext": {"input_ids": PROMPT, "output_ids": [[7, 8]]}, "usage": None},
            {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
        ],
        name="sglang",
    )
    assert codes(capture) == {"logprobs": "logprobs_incomplete_in_stream"}


def test_hidden_reasoning_is_its_own_reason() -> None:
    _, capture, _ = read(answer(choice={"token_ids": None, "logprobs": None}), include_reasoning=False)
    assert set(codes(capture).values()) == {"hidden_by_include_reasoning"}


def test_echo_takes_the_last_logprobs_where_the_agent_asked_for_ids_itself() -> None:
    body = answer(
        object="text_completion",
        choice={
            "text": "ab",
            "prompt_token_ids": PROMPT,
            "logprobs": {"token_logprobs": [None, -9, -8, -0.5, -0.25], "tokens": ["p", "q", "r", "a", "b"]},
        },
    )
    _, capture, _ = read(body, wire=COMPLETIONS, echo=True, return_token_ids=True, logprobs=0, prompt="pqr")
    assert capture.complete
    assert capture.completions[0].logprobs == [-0.5, -0.25] and capture.completions[0].tokens == ["a", "b"]


def test_echo_is_not_asked_for_ids_because_that_would_change_its_text() -> None:
    ask = engine("vllm").ask(COMPLETIONS, {"prompt": "x", "echo": True}, CaptureOptions())
    assert "return_token_ids" not in ask.body
    assert {reason.code for reason in ask.unavailable.values()} == {"echo_prompt_logprobs_mixed"}


def test_several_prompts_carry_their_own_ids() -> None:
    def choice(index: int, prompt: list[int]) -> dict[str, Any]:
        logprobs = {"token_logprobs": [-0.5], "tokens": ["a"]}
        return {"index": index, "text": "a", "token_ids": [7], "prompt_token_ids": prompt, "finish_reason": "stop",
                "logprobs": logprobs}  # fmt: skip

    body = {"choices": [choice(0, [1]), choice(1, [2, 3])], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    _, capture, _ = read(body, wire=COMPLETIONS, prompt=["a", "b c"])
    assert capture.prompt_token_ids is None
    assert [c.prompt_token_ids for c in capture.completions] == [[1], [2, 3]]
    assert codes(capture) == {"prompt_token_ids": "several_prompts"}


def test_echo_with_no_tokens_asked_for_is_never_complete() -> None:
    """vLLM (0.32) samples one token for `max_tokens: 0` and sends the prompt's logprobs alone: the last is not its."""
    logprobs = {"token_logprobs": [None, -1.0, -2.0], "tokens": ["p", "q", "r"]}
    choice = {"index": 0, "text": "", "token_ids": [9], "prompt_token_ids": PROMPT, "finish_reason": "length",
              "logprobs": logprobs}  # fmt: skip
    body = {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    request = {"prompt": "pqr", "echo": True, "max_tokens": 0, "return_token_ids": True, "logprobs": 0}
    _, capture, _ = read(body, wire=COMPLETIONS, **request)
    assert codes(capture) == {"logprobs": "echo_logprobs_not_told_apart"}


@pytest.mark.parametrize(
    ("wire", "request_body", "code"),
    [
        (CHAT, {"use_beam_search": True}, "beam_search"),
        (COMPLETIONS, {"prompt": "a", "use_beam_search": True}, "beam_search"),
        (COMPLETIONS, {"prompt": "a", "echo": True}, "echo_prompt_logprobs_mixed"),
    ],
)
def test_what_cannot_be_requested_is_reported_before_the_call(wire: str, request_body: Any, code: str) -> None:
    ask = engine("vllm").ask(wire, request_body, CaptureOptions())
    assert set(ask.unavailable) == set(FIELDS) and {reason.code for reason in ask.unavailable.values()} == {code}
    assert "return_token_ids" not in ask.injected


def test_alternatives_without_logprobs_stay_the_agents_own_mistake() -> None:
    for off in (False, None):
        ask = engine("vllm").ask(CHAT, {"logprobs": off, "top_logprobs": 3}, CaptureOptions())
        assert ask.body["logprobs"] is off and ask.body["top_logprobs"] == 3
        assert ask.unavailable["logprobs"].code == "invalid_logprobs_request"
        assert ask.requested["logprobs"] is False


@pytest.mark.parametrize("true", [True, 1, "true", "on"])
def test_logprobs_asked_for_in_pydantics_ways_are_the_agents(true: Any) -> None:
    _, capture, forwarded = read(answer(), logprobs=true, top_logprobs=0)
    assert capture.complete and forwarded["choices"][0]["logprobs"] is not None


def test_an_agents_own_alternatives_are_returned_and_recorded() -> None:
    ask = engine("vllm").ask(CHAT, {"logprobs": True, "top_logprobs": 3}, CaptureOptions(top_logprobs=7))
    assert ask.body["top_logprobs"] == 3 and ask.requested["top_logprobs"] == 3
    ask = engine("vllm").ask(COMPLETIONS, {"prompt": "a", "logprobs": 2}, CaptureOptions(top_logprobs=7))
    assert ask.body["logprobs"] == 2 and ask.requested["top_logprobs"] == 2


@pytest.mark.parametrize(
    ("name", "wire", "request_body", "added"),
    [
        ("vllm", CHAT, {}, {"logprobs": True, "return_token_ids": True}),
        ("vllm", CHAT, {"logprobs": False}, {"logprobs": True, "return_token_ids": True}),
        ("vllm", CHAT, {"logprobs": None, "top_logprobs": None}, {"logprobs": True, "return_token_ids": True}),
        ("vllm", CHAT, {"logprobs": True, "top_logprobs": 3}, {"return_token_ids": True}),
        ("vllm", CHAT, {"logprobs": False, "top_logprobs": 3}, {"return_token_ids": True}),
        ("vllm", CHAT, {"stream": True},
         {"logprobs": True, "return_token_ids": True, "stream_options": {"include_usage": True}}),
        ("vllm", CHAT, {"stream": True, "stream_options": {"continuous_usage_stats": True}},
         {"logprobs": True, "return_token_ids": True, "stream_options": {"include_usage": True}}),
        ("vllm", COMPLETIONS, {"prompt": "a"}, {"logprobs": 0, "return_token_ids": True}),
        ("vllm", COMPLETIONS, {"prompt": "a", "logprobs": 2}, {"return_token_ids": True}),
        ("sglang", CHAT, {}, {"logprobs": True, "return_token_ids": True}),
        ("sglang", CHAT, {"stream": True},
         {"logprobs": True, "return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True,
          "stream_options": {"include_usage": True}}),
        ("sglang", CHAT, {"logprobs": False, "top_logprobs": 2}, {"logprobs": True, "return_token_ids": True}),
        ("sglang", COMPLETIONS, {"prompt": "a"}, {"logprobs": 0, "return_token_ids": True}),
        ("llamacpp", CHAT, {}, {"logprobs": True, "top_logprobs": 1}),
        ("llamacpp", CHAT, {"stream": True}, {"logprobs": True, "top_logprobs": 1, "stream": False}),
        ("other", CHAT, {"stream": True}, {}),
    ],
)  # fmt: skip
def test_what_is_added_to_a_call(name: str, wire: str, request_body: Any, added: Any) -> None:
    before = json.loads(json.dumps(request_body))
    ask = engine(name).ask(wire, request_body, CaptureOptions())
    assert request_body == before, "the agent's own request is not touched"
    assert ask.body == {**request_body, **added}
    assert "prompt_logprobs" not in ask.body, "it would switch the prefix cache off"


def test_capture_off_changes_nothing() -> None:
    for name in NAMES:
        body = {"stream": True, "messages": []}
        assert engine(name).ask(CHAT, body, CaptureOptions(capture=False)).body == body


def test_alternatives_are_recorded_when_wanted_and_hidden_from_the_agent() -> None:
    top = [{"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "c", "logprob": -2.0, "bytes": [99]}]
    choice = {
        "logprobs": {
            "content": [{"token": t, "logprob": p, "top_logprobs": top} for t, p in (("a", -0.5), ("b", -0.25))]
        }
    }
    _, capture, forwarded = read(answer(choice=choice), wants=CaptureOptions(top_logprobs=2))
    assert (
        capture.completions[0].top_logprobs == [[{"token": "a", "logprob": -0.5}, {"token": "c", "logprob": -2.0}]] * 2
    )
    assert forwarded["choices"][0]["logprobs"] is None


def test_a_refusal_is_recognised_by_the_field_it_names() -> None:
    vllm = engine("vllm")
    ask = vllm.ask(CHAT, {}, CaptureOptions())
    assert vllm.refused(ask, 400, {"error": {"message": "Unsupported parameter: return_token_ids"}})
    assert not vllm.refused(ask, 400, {"error": {"message": "max_tokens must be at least 1"}})


def test_a_large_first_chunk_keeps_its_ids_and_loses_them_for_the_agent() -> None:
    ids = list(range(10, 30010))
    first = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": ids}
    end = {
        "choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": [7], "finish_reason": "stop", **entries(-1)}]
    }
    usage = {"choices": [], "usage": {"prompt_tokens": len(ids), "completion_tokens": 1}}
    capture, seen = streamed([first, end, usage])
    assert capture.complete and capture.prompt_token_ids == ids
    assert seen[0]["prompt_token_ids"] is None and len(seen) == 2


def test_a_large_prompt_is_taken_out_within_five_milliseconds() -> None:
    ids = [number * 7919 % 150_000 for number in range(100_000)]
    data = json.dumps(
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": ids},
        separators=(",", ":"),
    ).encode()
    best = 1.0
    for _ in range(7):
        vllm = engine("vllm")
        reader = Reader(vllm, CHAT, {"stream": True}, vllm.ask(CHAT, {"stream": True}, CaptureOptions()))
        began = time.thread_time()
        forwarded = reader.event(data)
        best = min(best, time.thread_time() - began)
    assert forwarded is not None and json.loads(forwarded)["prompt_token_ids"] is None
    assert reader.sampled.prompt is not None and reader.sampled.prompt._list is None, "it was never parsed"
    assert reader.sampled.prompt == ids
    assert best < 0.025, "5 ms where the core is free, and here it may not be"


def test_errors_in_a_stream_and_in_a_whole_answer_fail_the_call_and_go_to_the_agent() -> None:
    vllm = engine("vllm")
    for error in ({"error": {"message": "boom"}}, {"object": "error", "message": "boom"},
                  {"choices": [], "error": {"message": "boom"}}):  # fmt: skip
        data = json.dumps(error).encode()
        reader = Reader(vllm, CHAT, {"stream": True}, vllm.ask(CHAT, {"stream": True}, CaptureOptions()))
        reader.event(json.dumps({"choices": [{"index": 0, "delta": {"content": "a"}}]}).encode())
        assert reader.event(data) is data and reader.error == error
        assert "boom" in json.dumps(reader.assembled()) and '"a"' in json.dumps(reader.assembled())
        assert set(codes(reader.capture("truncated", status=200)).values()) == {"stream_error"}
        whole = Reader(vllm, CHAT, {}, vllm.ask(CHAT, {}, CaptureOptions()))
        whole.body(data)
        assert set(codes(whole.capture("ok", status=200)).values()) == {"stream_error"}


@pytest.mark.parametrize(("name", "lost"), [("vllm", "stream_aborted"), ("sglang", "ids_lost_stream_aborted")])
def test_a_stream_that_the_agent_left_keeps_what_had_come(name: str, lost: str) -> None:
    adapter = engine(name)
    reader = Reader(adapter, CHAT, {"stream": True}, adapter.ask(CHAT, {"stream": True}, CaptureOptions()))
    step = {"index": 0, "delta": {"content": "a"}, **entries(-0.5)}
    if name == "vllm":
        step["token_ids"] = [7]
    reader.event(json.dumps({"choices": [step]}).encode())
    capture = reader.capture("aborted", status=200)
    assert capture.completions[0].logprobs == [-0.5]
    assert codes(capture) == {"completion_token_ids": lost, "logprobs": "stream_aborted", "prompt_token_ids": lost}
    assert {absence.reason for absence in capture.unavailable.values()} == {"request_failed"}


def test_a_refused_call_has_no_tokens() -> None:
    vllm = engine("vllm")
    reader = Reader(vllm, CHAT, {}, vllm.ask(CHAT, {}, CaptureOptions()))
    capture = reader.capture("error", status=503)
    assert set(codes(capture).values()) == {"upstream_http_error"}
    assert "503" in capture.unavailable["logprobs"].detail


def test_another_api_is_asked_nothing_and_loses_nothing() -> None:
    other = engine("other")
    body = {"stream": True, "logprobs": True}
    reader = Reader(other, CHAT, body, other.ask(CHAT, body, CaptureOptions()))
    for chunk in ({"choices": [{"index": 0, "delta": {}}]}, {"choices": [], "usage": {"completion_tokens": 1}}):
        data = json.dumps(chunk).encode()
        assert reader.event(data) is data
    capture = reader.capture("ok", status=200)
    assert {(absence.reason, absence.code) for absence in capture.unavailable.values()} == {
        ("provider_api_unsupported", "engine_unsupported")
    }


def test_an_event_that_is_not_json_costs_nothing_where_the_counts_agree() -> None:
    vllm = engine("vllm")
    reader = Reader(vllm, CHAT, {"stream": True}, vllm.ask(CHAT, {"stream": True}, CaptureOptions()))
    end = {"index": 0, "delta": {"content": "a"}, "token_ids": [7], "finish_reason": "stop", **entries(-0.5)}
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    assert reader.event(b"ping") == b"ping"
    for chunk in ({"choices": [end], "prompt_token_ids": PROMPT}, usage):
        reader.event(json.dumps(chunk).encode())
    assert reader.capture("ok", status=200).complete


@pytest.mark.parametrize("odd", [b'"\\ud83d"', b"NaN", b"-Infinity"])
def test_json_that_only_python_writes_goes_out_as_it_came(odd: bytes) -> None:
    vllm = engine("vllm")
    reader = Reader(vllm, CHAT, {}, vllm.ask(CHAT, {}, CaptureOptions()))
    data = b'{"choices":[{"index":0,"message":{"content":"a"},"odd":' + odd + b',"token_ids":[1]}]}'
    assert reader.body(data) == data.replace(b"[1]", b"null")


def test_a_count_beside_a_choice_is_taken_out_and_the_choice_is_not() -> None:
    end = {"index": 0, "delta": {"content": "a"}, "token_ids": [7], "finish_reason": "stop", **entries(-0.5)}
    chunk = {"choices": [end], "prompt_token_ids": PROMPT, "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    capture, seen = streamed([chunk], name="sglang")
    assert capture.complete and "usage" not in seen[0] and seen[0]["choices"][0]["delta"] == {"content": "a"}
    _, seen = streamed([chunk], name="sglang", stream_options={"include_usage": True})
    assert seen[0]["usage"] == chunk["usage"]


def test_a_call_is_finished_when_every_choice_is() -> None:
    vllm = engine("vllm")
    body = {"stream": True, "n": 2}
    reader = Reader(vllm, CHAT, body, vllm.ask(CHAT, body, CaptureOptions()))
    for index, finished in ((0, False), (0, False), (1, True)):
        reader.event(json.dumps({"choices": [{"index": index, "delta": {}, "finish_reason": "stop"}]}).encode())
        assert reader.finished is finished


def test_unreadable_events_are_passed_on_and_noted() -> None:
    vllm = engine("vllm")
    reader = Reader(vllm, CHAT, {"stream": True}, vllm.ask(CHAT, {"stream": True}, CaptureOptions()))
    for data in (b"{broken", b'"text"', b"[1]", b"\xff\xfe", b""):
        assert reader.event(data) is data
    capture = reader.capture("ok", status=200)
    assert not capture.complete and "answer_unreadable" in codes(capture).values()


def test_engines_are_detected() -> None:
    assert detect({"/version": {"version": "0.32.0"}}) == ("vllm", "0.32.0")
    assert detect({"/version": None, "/get_model_info": {"model_path": "m"}}) is None, "one more question"
    sglang = {"/get_model_info": {"model_path": "m"}, "/server_info": {"version": "0.5.23"}}
    assert detect(sglang) == ("sglang", "0.5.23")
    assert detect({"/props": {"default_generation_settings": {}, "build_info": "b1"}}) == ("llamacpp", "b1")
    assert detect({"/v1/models": {"data": [{"id": "m", "owned_by": "sglang"}]}}) == ("sglang", None)
    assert detect({"/v1/models": {"data": [{"id": "m", "owned_by": "openai"}]}}) is None


def test_an_engine_is_named_in_its_own_file_only() -> None:
    """Options, model prefixes, detection and error shapes follow from the entry in `ENGINES`."""
    root = Path(__file__).parents[3]
    named = {
        str(path.relative_to(root))
        for room in ("capture", "proxy", "sandbox", "train")
        for path in (root / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in {cls.name for cls in ENGINES}
    }
    own = {f"capture/engines/{cls.name}.py" for cls in ENGINES}
    # The demo starts llama.cpp itself.
    assert named - {"sandbox/demo/captures.py", "sandbox/demo/rollouts.py"} == own


def test_sampling_defaults_are_known_where_the_engine_says_them() -> None:
    """`/server_info` as SGLang 0.5.23 answers it, `/props` as llama.cpp does; no engine reports a model's own file."""
    sglang, llamacpp = engine("sglang"), engine("llamacpp")
    assert sglang.sampling_defaults({"/server_info": {"version": "0.5.23", "sampling_defaults": "model"}}) is None
    own = sglang.sampling_defaults({"/server_info": {"version": "0.5.23", "sampling_defaults": "openai"}})
    assert own == {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    props = {"default_generation_settings": {"params": {"temperature": 0.8, "top_k": 40, "seed": 1}, "n_ctx": 4096}}
    assert llamacpp.sampling_defaults({"/props": props}) == {"temperature": 0.8, "top_k": 40}
    assert engine("vllm").sampling_defaults({"/version": {"version": "0.32.0"}}) is None
    with pytest.raises(CaptureError, match="unknown engine"):
        engine("vlm")
