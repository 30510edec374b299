"""What each engine is asked for, and the reason for everything that does not come back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from capture.codes import CODES, why
from capture.engines import NAMES, detect, engine
from capture.engines.base import CHAT, COMPLETIONS, Reader, Wants
from capture.errors import CaptureError
from capture.record import REASONS, TokenCapture

PROMPT = [1, 2, 3]


def read(
    answer: Any, *, name: str = "vllm", wire: str = CHAT, wants: Wants | None = None, **request: Any
) -> tuple[Reader, TokenCapture, Any]:
    """An unstreamed answer read by an engine's reader: the reader, the capture, and what the agent gets."""
    one = engine(name)
    reader = one.reader(wire, request, one.ask(wire, request, wants or Wants()))
    given = json.loads(reader.body(json.dumps(answer).encode()))
    return reader, reader.capture("ok", status=200), given


def streamed(chunks: list[Any], *, name: str = "vllm", **request: Any) -> tuple[TokenCapture, list[Any]]:
    one = engine(name)
    body = {"stream": True, **request}
    reader = one.reader(CHAT, body, one.ask(CHAT, body, Wants()))
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
    told = why(code)
    assert told.reason in REASONS and len(told.detail) > 30 and "{" not in told.detail


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
        ({"choice": entries(-0.5, float("nan"))}, {"logprobs": "logprob_missing_for_token"}),
        ({"choice": entries(-0.5, -9999.0)}, {"logprobs": "logprob_clamped"}),
        ({"usage": {"prompt_tokens": 3, "completion_tokens": 3}}, {"completion_token_ids": "count_mismatch_usage"}),
        ({"usage": None}, {"completion_token_ids": "usage_not_returned"}),
        ({"choices": []}, {"completion_token_ids": "choices_missing", "logprobs": "choices_missing"}),
    ],
)
def test_what_is_missing_is_named_with_its_reason(changes: Any, wanted: dict[str, str]) -> None:
    _, capture, _ = read(answer(**changes))
    assert not capture.complete
    assert codes(capture) == wanted


def test_no_sentinel_stands_for_a_logprob_nobody_has() -> None:
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


def test_sglext_holds_ids_by_choice() -> None:
    body = answer(prompt_token_ids=None, choice={"token_ids": None})
    _, capture, given = read({**body, "sglext": {"input_ids": PROMPT, "output_ids": [[7, 8]]}}, name="sglang")
    assert capture.complete and capture.prompt_token_ids == PROMPT
    assert "sglext" not in given


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
    ask = engine("vllm").ask(COMPLETIONS, {"prompt": "x", "echo": True}, Wants())
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
        ("sglang", COMPLETIONS, {"prompt": "a"}, {"logprobs": 0, "return_token_ids": True}),
        ("llamacpp", CHAT, {}, {"logprobs": True, "top_logprobs": 1}),
        ("llamacpp", CHAT, {"stream": True}, {"logprobs": True, "top_logprobs": 1, "stream": False}),
        ("other", CHAT, {"stream": True}, {}),
    ],
)  # fmt: skip
def test_what_is_added_to_a_call(name: str, wire: str, request_body: Any, added: Any) -> None:
    before = json.loads(json.dumps(request_body))
    ask = engine(name).ask(wire, request_body, Wants())
    assert request_body == before, "the agent's own request is not touched"
    assert ask.body == {**request_body, **added}
    assert "prompt_logprobs" not in ask.body, "it would switch the prefix cache off"


def test_capture_off_changes_nothing() -> None:
    for name in NAMES:
        body = {"stream": True, "messages": []}
        assert engine(name).ask(CHAT, body, Wants(capture=False)).body == body


def test_alternatives_are_recorded_when_wanted_and_hidden_from_the_agent() -> None:
    top = [{"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "c", "logprob": -2.0, "bytes": [99]}]
    choice = {
        "logprobs": {
            "content": [{"token": t, "logprob": p, "top_logprobs": top} for t, p in (("a", -0.5), ("b", -0.25))]
        }
    }
    _, capture, given = read(answer(choice=choice), wants=Wants(top_logprobs=2))
    assert (
        capture.completions[0].top_logprobs == [[{"token": "a", "logprob": -0.5}, {"token": "c", "logprob": -2.0}]] * 2
    )
    assert given["choices"][0]["logprobs"] is None


def test_a_refusal_is_recognised_by_the_field_it_names() -> None:
    vllm = engine("vllm")
    ask = vllm.ask(CHAT, {}, Wants())
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


def test_unreadable_events_are_passed_on_and_noted() -> None:
    one = engine("vllm")
    reader = one.reader(CHAT, {"stream": True}, one.ask(CHAT, {"stream": True}, Wants()))
    for data in (b"{broken", b'"text"', b"[1]", b"\xff\xfe", b""):
        assert reader.event(data) is data
    capture = reader.capture("ok", status=200)
    assert not capture.complete and "answer_unreadable" in codes(capture).values()


def test_engines_are_told_apart() -> None:
    assert detect({"/version": {"version": "0.32.0"}}) == ("vllm", "0.32.0")
    assert detect({"/version": None, "/get_model_info": {"model_path": "m"}}) is None, "one more question"
    sglang = {"/get_model_info": {"model_path": "m"}, "/server_info": {"version": "0.5.23"}}
    assert detect(sglang) == ("sglang", "0.5.23")
    assert detect({"/props": {"default_generation_settings": {}, "build_info": "b1"}}) == ("llamacpp", "b1")
    assert detect({"/v1/models": {"data": [{"id": "m", "owned_by": "sglang"}]}}) == ("sglang", None)
    assert detect({"/v1/models": {"data": [{"id": "m", "owned_by": "openai"}]}}) is None
    with pytest.raises(CaptureError, match="unknown engine"):
        engine("vlm")
