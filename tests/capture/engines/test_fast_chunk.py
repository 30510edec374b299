"""A chunk read by its parts is read as the general way reads it: the same bytes for the agent, the same record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.engines import engine
from capture.engines import reader as readers
from capture.engines.answer.choices import Sampled
from capture.engines.answer.fast_chunk import opening, parts
from capture.engines.reader import Reader
from capture.engines.request import CaptureOptions
from capture.engines.wires import CHAT
from capture.sse import EventDecoder
from tests.examples import examples

VLLM = Path(__file__).parents[1] / "transcripts/vllm"
STREAMS = [
    path.name
    for path in sorted(VLLM.glob("*-stream.body"))
    if json.loads(path.with_suffix(".json").read_text())["path"] == "/v1/chat/completions"
]
BODY = {"model": "my-policy", "messages": [{"role": "user", "content": "Name two colours."}], "stream": True}
HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1795962789, "model": "my-policy"}


def relayed(events: list[bytes], body: dict[str, Any]) -> tuple[Any, ...]:
    vllm = engine("vllm")
    reader: Reader = Reader(vllm, CHAT, body, vllm.ask(CHAT, body, CaptureOptions()))
    out = [reader.event(data) for data in events]
    out.append(reader.rest())
    return out, reader.capture("ok", status=200), reader.assembled(), reader.finished


def translated(events: list[bytes], body: dict[str, Any]) -> tuple[Any, ...]:
    """What a dialect hears of the same stream: it takes these fields and no other."""
    vllm = engine("vllm")
    reader: Reader = Reader(vllm, CHAT, body, vllm.ask(CHAT, body, CaptureOptions()))
    out = []
    for data in events:
        chunk = reader.chunk(data) or {}
        choices = [choice for choice in chunk.get("choices") or () if isinstance(choice, dict)]
        logprobs = [choice.get("logprobs") for choice in choices] if body.get("logprobs") else []
        deltas = [(choice.get("index"), choice.get("delta"), choice.get("finish_reason")) for choice in choices]
        out.append((deltas, logprobs, chunk.get("usage")))
    return out, reader.capture("ok", status=200), reader.assembled(), reader.finished


def both_ways(events: list[bytes], monkeypatch: pytest.MonkeyPatch, body: dict[str, Any] = BODY) -> None:
    by_event, by_chunk = relayed(events, body), translated(events, body)
    with monkeypatch.context() as patch:
        patch.setattr(readers, "opening", lambda data: None)
        assert by_event == relayed(events, body)
        assert by_chunk == translated(events, body)


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("asked", [{}, {"logprobs": True}, {"return_token_ids": True}, {"n": 2}])
def test_recorded_streams(name: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    data = (VLLM / name).read_bytes()
    events = [event.data for event in EventDecoder().feed(data) if event.data and event.data != b"[DONE]"]
    assert events
    both_ways(events, monkeypatch, {**BODY, **asked})


def test_a_count_that_comes_before_the_text_is_read_in_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not vLLM's order. A count in the opening means that every chunk must be read whole."""
    events = []
    for count in (1, 1, 2, 1):
        record = chunk("content", "a", "a", -0.5, [7])
        choices = record.pop("choices")
        events.append(written({**record, "usage": {"completion_tokens": count}, "choices": choices}, False))
    both_ways(events, monkeypatch, {**BODY, "stream_options": {"include_usage": True}})


def test_a_dialect_hears_of_a_regular_chunk_its_text_alone() -> None:
    vllm = engine("vllm")
    reader: Reader = Reader(vllm, CHAT, BODY, vllm.ask(CHAT, BODY, CaptureOptions()))
    events = EventDecoder().feed((VLLM / "chat-plain-length-stream.body").read_bytes())
    pieces = [reader.chunk(event.data) for event in events if event.data and event.data != b"[DONE]"]
    short = [chunk for chunk in pieces if chunk is not None and set(chunk) == {"choices"}]
    assert len(short) == len(pieces) - 2  # all but the role and the count
    assert short[0]["choices"] == [{"index": 0, "delta": {"content": "The"}, "finish_reason": None}]
    last = {"index": 0, "delta": {"content": ":"}, "finish_reason": "length", "stop_reason": None}
    assert short[-1]["choices"] == [last]


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("chat-plain-length-stream.body", 3),  # the role, the count and [DONE]
        ("reasoning-stream.body", 3),
        ("tool-required-stream.body", 10),  # and those that hold pieces of the tool call
    ],
)
def test_the_chunks_of_vllm_are_regular(name: str, others: int) -> None:
    events = [event.data for event in EventDecoder().feed((VLLM / name).read_bytes()) if event.data]
    found = [event for event in events if (opened := opening(event)) is not None and parts(event, opened) is not None]
    assert len(found) == len(events) - others


def chunk(
    field: str | None, text: Any, token: Any, logprob: Any, ids: Any, ended: tuple[Any, ...] = (None,)
) -> dict[str, Any]:
    entry = {"token": token, "logprob": logprob, "bytes": [1], "top_logprobs": []}
    choice = {
        "index": 0,
        "delta": {} if field is None else {field: text},
        "logprobs": {"content": [entry]},
        **dict(zip(("finish_reason", "stop_reason"), ended, strict=False)),
        "token_ids": ids,
    }
    return {**HEAD, "choices": [choice]}


def written(value: Any, ascii_only: bool) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")


CHUNKS = st.builds(
    chunk,
    st.sampled_from(["content", "content", "content", "reasoning", "reasoning_content", "refusal", "role", None]),
    st.text(max_size=6)
    | st.sampled_from(['"', "\\", "\n", "\t\\n", "\u2028", "\x7f", "é", "\x00", "\ud800", "", None]),
    st.text(max_size=4) | st.sampled_from(["token_id:17", '"', None]),
    st.floats(-9999, 0) | st.sampled_from([0, -1, -9999.0, float("-inf"), float("nan"), 1e-7, None, "x", True]),
    st.lists(st.integers(0, 50000), max_size=2) | st.sampled_from([[1], [2], [-1], [2**63], [True], None, [0]]),
    st.sampled_from(
        [(None,)] * 9 + [("stop", None), ("stop", 2), ("length", "\n\u2028"), ("stop", -1), ("",), ("x", 0.5)]
    ),
)
#: What a stream opens with, from which the reader learns how later chunks start; or nothing.
OPENINGS = st.lists(
    st.sampled_from(
        [
            {**HEAD, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], **more}
            for more in ({}, {"prompt_token_ids": [1, 2], "prompt_text": None}, {"prompt_token_ids": None})
        ]
    ),
    max_size=2,
)


def test_a_stream_that_is_not_strict_json_is_written_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python escapes DEL, orjson does not; hypothesis found the stream."""
    minus_infinity = chunk("content", "", "", float("-inf"), [])
    both_ways(
        [written(value, False) for value in (minus_infinity, chunk("content", "\x7f", "", 0.0, [1]))], monkeypatch
    )


@examples(300)
@given(OPENINGS, st.lists(st.tuples(CHUNKS, st.booleans(), st.integers(0, 400), st.integers(-1, 255)), max_size=8))
@pytest.mark.slow
def test_streams_of_any_making(opens: list[Any], chunks: list[tuple[dict[str, Any], bool, int, int]]) -> None:
    """Written with and without escapes, and some with a byte changed: the two ways never differ."""
    events = [written(chunk, False) for chunk in opens]
    for chunk, ascii_only, place, byte in chunks:
        data = bytearray(written(chunk, ascii_only))
        if byte >= 0:
            data[place % len(data)] = byte
        events.append(bytes(data))
    events.append(written({**HEAD, "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}, False))
    with pytest.MonkeyPatch.context() as patch:
        both_ways(events, patch)


@pytest.mark.parametrize("asked", [{}, {"return_token_ids": True}, {"return_token_ids": True, "logprobs": True}])
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"stream_options": {"include_usage": True}}])
def test_long_prompts_are_cut_out_or_parsed_to_the_same(
    asked: dict[str, Any], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the agent asked for them, and where they come with a chunk of which something is taken out."""
    prompt = list(range(9000))
    entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    record = {**role, "delta": {"content": "a"}, "logprobs": {"content": [entry]}, "token_ids": [7]}
    counted = {"usage": {"prompt_tokens": 9000, "completion_tokens": 1}, "system_fingerprint": "x"}
    last_fields = {"finish_reason": "stop"}
    streams = [
        [{**HEAD, "choices": [role], "prompt_token_ids": prompt}, {**HEAD, "choices": [{**record, **last_fields}]}],
        [{**HEAD, "choices": [record], "prompt_token_ids": prompt}, {**HEAD, "choices": [{**role, **last_fields}]}],
        [{**HEAD, "choices": [{**record, "finish_reason": "stop"}], "prompt_token_ids": prompt}],
        [{**HEAD, "choices": [{**record, "prompt_token_ids": prompt}]}],
    ]  # fmt: skip
    body = {**BODY, **asked, **more}
    for chunks in streams:
        events = [written(chunk, False) for chunk in (*chunks, {**HEAD, "choices": [], **counted})]
        cut = relayed(events, body)
        with monkeypatch.context() as patch:
            patch.setattr(readers, "_PROMPT_KEYS", ())
            assert cut == relayed(events, body)
    unstreamed = {**body, "stream": False}
    message = {"role": "assistant", "content": "a"}
    whole = written(
        {**HEAD, "choices": [{**record, "delta": None, "message": message}], "prompt_token_ids": prompt, **counted},
        False,
    )
    answers = []
    for keys in (readers._PROMPT_KEYS, ()):
        with monkeypatch.context() as patch:
            patch.setattr(readers, "_PROMPT_KEYS", keys)
            vllm = engine("vllm")
            reader: Reader = Reader(vllm, CHAT, unstreamed, vllm.ask(CHAT, unstreamed, CaptureOptions()))
            answers.append((reader.body(whole), reader.capture("ok", status=200), reader.assembled()))
    assert answers[0] == answers[1]


ENTRIES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "token": st.sampled_from(["a", "", "token_id:17", None, 3]),
            "logprob": st.sampled_from([-0.5, -1, 0, -9999.0, None, "x", True, float("nan")]),
            "id": st.sampled_from([1, None, -1]),
            "token_id": st.sampled_from([1, None, "1"]),
        },
    )
    | st.just({"token": "a", "logprob": -0.5})
    | st.sampled_from([None, [], "token"]),
    max_size=6,
)


@given(ENTRIES)
def test_entries_taken_at_once_are_those_taken_one_by_one(entries: list[Any]) -> None:
    def captured(bodies: list[list[Any]]) -> Any:
        sampled = Sampled()
        for body in bodies:
            sampled.take({"choices": [{"index": 0, "logprobs": {"content": body}}]})
        choice = sampled.choices[0]
        return choice.tokens, str(choice.logprobs), choice.entry_ids, choice.problem, choice.saw_logprobs

    assert captured([entries]) == captured([[], *([entry] for entry in entries)])


def test_ids_that_are_not_prompts_stay_where_they_are() -> None:
    """What a gateway, or a tool call, calls by the same name is the agent's."""
    record = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop", "token_ids": [7]}
    entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    strange = {"prompt_token_ids": list(range(9000)), "input_ids": [1, 2]}
    vllm = engine("vllm")
    body = {**BODY, "stream": False}
    for prompt_field in ({}, {"prompt_token_ids": [5, 6]}, {"prompt_token_ids": strange["prompt_token_ids"]}):
        reader: Reader = Reader(vllm, CHAT, body, vllm.ask(CHAT, body, CaptureOptions()))
        choice = {**record, "logprobs": {"content": [entry]}}
        whole = {**HEAD, "choices": [choice], "kv_transfer_params": strange, **prompt_field}
        forwarded = json.loads(reader.body(written(whole, False)))
        assert forwarded["kv_transfer_params"] == strange and forwarded.get("prompt_token_ids") is None
        assert reader.assembled()["kv_transfer_params"] == strange
        assert reader.sampled.prompt == prompt_field.get("prompt_token_ids")
