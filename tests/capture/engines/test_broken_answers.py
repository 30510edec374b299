"""Answers with status 200 that are no whole reply of one call, and numbers that are no logprobs."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from capture.engines import engine
from capture.engines.reader import Reader
from capture.engines.request import CaptureOptions
from capture.engines.wires import CHAT
from capture.record import TokenCapture


def chunk(delta: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta or {}, "logprobs": None, "finish_reason": None, **fields}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}


def token(text: str, token_id: int, logprob: float = -0.5, **fields: Any) -> dict[str, Any]:
    entries = [{"token": text, "logprob": logprob, "bytes": None, "top_logprobs": []}]
    return chunk({"content": text}, token_ids=[token_id], logprobs={"content": entries}, **fields)


FIRST = {**chunk({"role": "assistant", "content": ""}), "prompt_token_ids": [1, 2]}
USAGE = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "model": "m",
    "choices": [],
    "usage": {"prompt_tokens": 2, "completion_tokens": 2},
}
STREAM = [FIRST, token("a", 5), token("b", 6, finish_reason="stop"), USAGE]
WHOLE = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "model": "m",
    "prompt_token_ids": [1, 2],
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ab"},
            "finish_reason": "stop",
            "token_ids": [5, 6],
            "logprobs": {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.5}]},
        }
    ],
    "usage": {"prompt_tokens": 2, "completion_tokens": 2},
}


def read(body: dict[str, Any] | list[Any], name: str = "vllm", **request: Any) -> tuple[Reader, TokenCapture]:
    """A stream (a list of chunks, or `(event name, chunk)`) or a whole answer, as an engine's reader takes it."""
    adapter = engine(name)
    request = {"stream": isinstance(body, list), **request}
    reader = Reader(adapter, CHAT, request, adapter.ask(CHAT, request, CaptureOptions()))
    for item in body if isinstance(body, list) else ():
        event, data = item if isinstance(item, tuple) else (None, item)
        reader.event(data if isinstance(data, bytes) else json.dumps(data).encode(), event)
    if isinstance(body, dict):
        reader.body(json.dumps(body).encode())
    return reader, reader.capture("ok", status=200)


def codes(capture: TokenCapture) -> set[str]:
    return {reason.code for reason in capture.unavailable.values()}


def changed(body: Any, *path: Any, to: Any) -> Any:
    made = copy.deepcopy(body)
    place = made
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return made


def test_a_whole_reply_is_complete() -> None:
    for body in (STREAM, WHOLE):
        reader, capture = read(body)
        assert capture.complete and reader.unfinished is None


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "function_call", "content_filter", "repetition"])
def test_reasons_with_which_a_reply_ends(reason: str) -> None:
    assert read(changed(WHOLE, "choices", 0, "finish_reason", to=reason))[1].complete
    assert read(changed(STREAM, 2, "choices", 0, "finish_reason", to=reason))[1].complete


@pytest.mark.parametrize(
    "reason", ["abort", "error", "cancelled", "insufficient_system_resource", {"type": "abort"}, 3]
)
def test_reasons_with_which_it_broke_off(reason: Any) -> None:
    for body in (changed(WHOLE, "choices", 0, "finish_reason", to=reason),
                 changed(STREAM, 2, "choices", 0, "finish_reason", to=reason)):  # fmt: skip
        reader, capture = read(body)
        assert reader.unfinished is not None and codes(capture) == {"reply_not_finished"}
        assert capture.completions[0].token_ids == [5, 6], "what came is kept"
        assert str(reason).split("'")[-2 if isinstance(reason, dict) else 0] in reader.unfinished.detail


@pytest.mark.parametrize("reason", [None, ""])
def test_a_whole_answer_without_a_reason_broke_off(reason: Any) -> None:
    assert codes(read(changed(WHOLE, "choices", 0, "finish_reason", to=reason))[1]) == {"reply_not_finished"}


@pytest.mark.parametrize("reasons", [("stop", "abort"), ("length", "error"), ("tool_calls", 5), ("abort", "stop")])
def test_a_later_reason_does_not_hide_that_it_broke_off(reasons: tuple[Any, Any]) -> None:
    first, last = reasons
    stream = [FIRST, token("a", 5), token("b", 6, finish_reason=first), chunk(finish_reason=last), USAGE]
    assert codes(read(stream)[1]) == {"reply_not_finished"}


@pytest.mark.parametrize("reasons", [("stop", "tool_calls"), ("stop", "stop"), ("stop", None), ("stop", "")])
def test_a_reason_that_another_follows(reasons: tuple[Any, Any]) -> None:
    first, last = reasons
    assert read([FIRST, token("a", 5), token("b", 6, finish_reason=first), chunk(finish_reason=last), USAGE])[
        1
    ].complete


def test_one_of_two_choices_broke_off() -> None:
    body = changed(WHOLE, "choices", to=[WHOLE["choices"][0], {**WHOLE["choices"][0], "index": 1}])  # type: ignore[index]
    body["choices"][1]["finish_reason"] = "abort"
    body["usage"]["completion_tokens"] = 4
    assert codes(read(body, n=2)[1]) == {"reply_not_finished"}


@pytest.mark.parametrize(
    "body",
    [
        {**WHOLE, "error": {"message": "out of memory"}},
        {**WHOLE, "error": "out of memory"},
        changed(WHOLE, "choices", 0, "error", to={"message": "provider failed"}),
        changed(STREAM, 2, "error", to={"message": "out of memory"}),
        changed(STREAM, 1, "choices", 0, "error", to={"code": 502}),
        changed(STREAM, 2, "choices", 0, "delta", "error", to={"message": "out of memory"}),
        changed(WHOLE, "choices", 0, "message", "error", to="boom"),
        [*STREAM[:3], {**USAGE, "choices": [], "error": {"message": "late"}}],
        [*STREAM[:2], {"error": {"message": "gone"}}, *STREAM[2:]],
        [*STREAM[:2], {"object": "error", "message": "gone", "code": 500}, *STREAM[2:]],
        [*STREAM[:2], (b"error", {"message": "gone"}), *STREAM[2:]],
        [*STREAM[:2], (b"error", b"the engine is gone"), *STREAM[2:]],
        [*STREAM, (b"error", {"code": 500})],
    ],
)
def test_an_error_beside_or_between(body: Any) -> None:
    reader, capture = read(body)
    assert codes(capture) <= {"error_beside_choices", "stream_error"} and not capture.complete
    assert reader.error is not None or reader.unfinished is not None


@pytest.mark.parametrize("nothing", [None, "", {}, [], False, 0])
def test_an_error_that_is_none(nothing: Any) -> None:
    assert read({**WHOLE, "error": nothing})[1].complete
    assert read(changed(STREAM, 1, "error", to=nothing))[1].complete
    reader, capture = read(changed(STREAM, 3, "error", to=nothing))
    assert capture.complete and reader.error is None, "the chunk with the usage has no choices"


def test_two_choices_of_one_index_are_two_replies() -> None:
    """One list of ids would be of no reply. Without indexes their places are told apart."""
    choice = WHOLE["choices"][0]  # type: ignore[index]
    body = {**changed(WHOLE, "usage", "completion_tokens", to=4), "choices": [choice, choice]}
    for n in (1, 2):
        assert "answers_mixed" in codes(read(body, n=n)[1])
    unnumbered = {name: value for name, value in choice.items() if name != "index"}
    assert read({**body, "choices": [unnumbered, unnumbered]}, n=2)[1].complete


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (changed(STREAM, 2, "id", to="chatcmpl-2"), "id"),
        (changed(STREAM, 3, "id", to="chatcmpl-2"), "id"),
        (changed(STREAM, 2, "model", to="other"), "model"),
        (changed(STREAM, 2, "prompt_token_ids", to=[1, 2, 3]), "prompt"),
        (changed(STREAM, 1, "choices", 0, "prompt_token_ids", to=[9]), "prompt"),
        (changed(WHOLE, "choices", 0, "prompt_token_ids", to=[9, 9]), "prompt"),
        (
            changed(changed(STREAM, 1, "choices", 0, "prompt_token_ids", to=[1, 2]), 2, "prompt_token_ids", to=[3]),
            "prompt",
        ),
    ],
)
def test_an_answer_of_several_calls(body: Any, what: str) -> None:
    _, capture = read(body)
    assert codes(capture) == {"answers_mixed"}
    assert all(reason.detail.startswith(f"the {what} changed") for reason in capture.unavailable.values())


@pytest.mark.parametrize(
    "body",
    [
        changed(STREAM, 0, "id", to=""),
        changed(STREAM, 2, "id", to=None),
        changed(STREAM, 2, "model", to=""),
        changed(STREAM, 2, "prompt_token_ids", to=[1, 2]),
        changed(WHOLE, "choices", 0, "prompt_token_ids", to=[1, 2]),
    ],
)
def test_what_is_repeated_or_absent_is_not_a_change(body: Any) -> None:
    assert read(body)[1].complete


@pytest.mark.parametrize("value", [0.5, 0.001, 12.3, 3, 1e300])
def test_a_logprob_above_zero_is_a_logit(value: float) -> None:
    for body in (
        changed(WHOLE, "choices", 0, "logprobs", "content", 1, "logprob", to=value),
        changed(STREAM, 1, "choices", 0, "logprobs", "content", 0, "logprob", to=value),
    ):
        assert codes(read(body)[1]) == {"logits_not_logprobs"}
    # The chunk of one token that is read by its parts.
    middle = [token("x", 7), token("y", 8, value), token("z", 9)]
    usage = changed(USAGE, "usage", "completion_tokens", to=5)
    assert codes(read([FIRST, *STREAM[1:2], *middle, STREAM[2], usage])[1]) == {"logits_not_logprobs"}


@pytest.mark.parametrize("value", [0, 0.0, 1e-7, 5e-5])
def test_rounding_is_not_a_logit(value: float) -> None:
    assert read(changed(WHOLE, "choices", 0, "logprobs", "content", 1, "logprob", to=value))[1].complete


@pytest.mark.parametrize(("values", "complete"), [([-0.1, -3.0], True), ([-0.1, -0.2], False), ([-5, 2], False)])
def test_the_probabilities_of_alternatives_sum_to_one_at_most(values: list[float], complete: bool) -> None:
    top = [{"token": str(place), "logprob": value} for place, value in enumerate(values)]
    body = changed(WHOLE, "choices", 0, "logprobs", "content", 1, "top_logprobs", to=top)
    _, capture = read(body, logprobs=True, top_logprobs=2)
    assert capture.complete is complete and codes(capture) == (set() if complete else {"logits_not_logprobs"})


def entries(count: int, start: int = 0) -> dict[str, Any]:
    return {"content": [
        {"token": f"t{n}", "logprob": -0.1 - n / 8, "top_logprobs": []} for n in range(start, start + count)
    ]}  # fmt: skip


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize("steps", [[1, 1, 1, 1], [2, 1, 3], [1, 2, 1], [3], [1, 3]])
@pytest.mark.parametrize("cumulative", [True, False])
def test_lists_that_repeat_the_earlier_logprobs(name: str, steps: list[int], cumulative: bool) -> None:
    """Each chunk has all logprobs so far, or its own; ids in the chunk (vLLM), or all at the end (SGLang)."""
    chunks: list[Any] = [FIRST]
    at = 0
    for step in steps:
        logprobs = entries(at + step) if cumulative else entries(step, at)
        ids = {"token_ids": list(range(at, at + step))} if name == "vllm" else {}
        chunks.append(chunk({"content": "x" * step}, logprobs=logprobs, **ids))
        at += step
    chunks.append(chunk({}, finish_reason="stop"))
    if name == "sglang":
        chunks.append(
            {"id": "chatcmpl-1", "choices": [], "sglext": {"input_ids": [1, 2], "output_ids": [list(range(at))]}}
        )
    chunks.append(changed(USAGE, "usage", "completion_tokens", to=at))
    _, capture = read(chunks, name)
    known = cumulative and name == "sglang" and len(steps) == 2 and steps[0] == 1
    # Two chunks of which the first has one entry look alike either way where ids come at the end.
    assert capture.complete is not known
    if not known:
        assert capture.completions[0].logprobs == [-0.1 - n / 8 for n in range(at)]


@pytest.mark.parametrize("ids", [{}, {"token_ids": []}, {"token_ids": None}])
@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_last_chunk_that_repeats_all_logprobs(name: str, ids: dict[str, Any], n: int) -> None:
    """Beside the finish reason, without a new token; of two choices in turns."""
    chunks: list[Any] = [FIRST]
    for step in range(1, 5):
        for index in range(n):
            own = {"token_ids": [step]} if name == "vllm" else {}
            chunks.append(chunk({"content": "x"}, index=index, logprobs=entries(step), **own))
    last = ids if name == "vllm" else {}
    chunks += [chunk({}, index=index, logprobs=entries(4), finish_reason="stop", **last) for index in range(n)]
    outputs = {"input_ids": [1, 2], "output_ids": [[1, 2, 3, 4]] * n}
    chunks.append(
        changed(USAGE, "usage", "completion_tokens", to=4 * n) | ({} if name == "vllm" else {"sglext": outputs})
    )
    _, capture = read(chunks, name, n=n)
    assert capture.complete, capture.unavailable
    assert [completion.logprobs for completion in capture.completions] == [[-0.1 - k / 8 for k in range(4)]] * n


def test_a_token_twice_in_a_row_is_not_a_repeated_list() -> None:
    same = {"content": [{"token": "a", "logprob": 0.0}, {"token": "a", "logprob": 0.0}]}
    chunks = [
        FIRST,
        chunk({"content": "aa"}, token_ids=[5, 5], logprobs=same),
        chunk({"content": "aa"}, token_ids=[5, 5], logprobs=same),
        chunk({}, finish_reason="stop"),
        changed(USAGE, "usage", "completion_tokens", to=4),
    ]
    assert read(chunks)[1].completions[0].logprobs == [0.0] * 4
