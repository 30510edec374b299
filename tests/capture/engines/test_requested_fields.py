"""What the agent asked for reaches it, chunk by chunk, on recorded streams; what it did not ask for does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from capture.engines import engine
from capture.engines.reader import Reader
from capture.engines.request import CaptureOptions
from capture.engines.wires import CHAT
from capture.sse import EventDecoder

TRANSCRIPTS = Path(__file__).parents[1] / "transcripts"
VLLM = ("tool-auto-forced-stream", "tool-required-stream", "reasoning-stream", "chat-tokid-stream")
SGLANG = ("tool-auto-stream", "tool-required-stream", "chat-sglext-length-stream")
STREAMS = [*(f"vllm/{name}" for name in VLLM), *(f"sglang/{name}" for name in SGLANG)]
KINDS = ("logprobs", "token_ids", "prompt_token_ids", "sglext")


def chunks(name: str) -> list[dict[str, Any]]:
    decoder = EventDecoder()
    events = [*decoder.feed((TRANSCRIPTS / f"{name}.body").read_bytes()), *decoder.flush()]
    return [json.loads(event.data) for event in events if event.data and event.data != b"[DONE]"]


def seen(name: str, found: list[dict[str, Any]], **asked: Any) -> list[dict[str, Any]]:
    """What an agent gets of the stream that asked for `asked`."""
    rules = engine(name.partition("/")[0])
    request = {"stream": True, "messages": [], **asked}
    reader = Reader(rules, CHAT, request, rules.ask(CHAT, request, CaptureOptions()))
    forwarded = [reader.event(json.dumps(chunk).encode()) for chunk in found] + [reader.rest()]
    text = b"\n\n".join(data for data in forwarded if data is not None).replace(b"\n\ndata: ", b"\n\n")
    return [json.loads(data) for data in text.split(b"\n\n") if data]


def of(kind: str, found: list[dict[str, Any]]) -> list[Any]:
    """Every value of a kind in a stream, in order."""
    values: list[Any] = []
    for chunk in found:
        for place in (chunk, *(chunk.get("choices") or ())):
            value = place.get(kind)
            if kind == "logprobs" and value:
                value = value["content"]
            if value:
                values += value if isinstance(value, list) else [value]
    return values


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize(
    ("asked", "kinds"),
    [
        ({}, set()),
        ({"logprobs": True}, {"logprobs"}),
        ({"logprobs": True, "tools": [{"type": "function"}]}, {"logprobs"}),
        ({"return_token_ids": True}, {"token_ids", "prompt_token_ids", "sglext"}),
        ({"return_token_ids": True, "logprobs": True}, set(KINDS)),
    ],
)
def test_an_agent_gets_all_of_what_it_asked_for_and_nothing_else(
    name: str, asked: dict[str, Any], kinds: set[str]
) -> None:
    found = chunks(name)
    got = seen(name, found, **asked)
    for kind in KINDS:
        assert of(kind, got) == (of(kind, found) if kind in kinds else []), kind


@pytest.mark.parametrize("field", ["return_output_ids_in_sglext", "return_input_ids_in_sglext"])
def test_sglang_ids_of_steps_without_text_reach_an_agent_that_asked(field: str) -> None:
    found = [
        {"choices": [{"index": 0, "delta": {"role": "assistant"}, "prompt_token_ids": [1]}]},
        {"choices": [{"index": 0, "delta": {}, "token_ids": [5], "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"content": None}, "response_token_ids": [6], "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "provider_specific_fields": {"token_ids": [7]}}]},
    ]
    got = seen("sglang/x", found, **{field: True})
    ids = [
        of(kind, got) for kind in ("token_ids", "response_token_ids", "provider_specific_fields", "prompt_token_ids")
    ]
    if "output" in field:
        assert ids == [[5], [6], [{"token_ids": [7]}], []]
    else:
        assert ids[3] == [1]


@pytest.mark.parametrize(
    ("asked", "keeps"),
    [({}, False), ({"logprobs": True}, False), ({"return_meta_info": True}, True), ({"return_token_ids": True}, True)],
)
def test_sglangs_meta_info_reaches_only_an_agent_that_asked(asked: dict[str, Any], keeps: bool) -> None:
    data = (TRANSCRIPTS / "sglang" / "chat-return_token_ids-nostream.body").read_bytes()
    assert "meta_info" in json.loads(data)["choices"][0]
    rules = engine("sglang")
    request = {"messages": [], **asked}
    reader = Reader(rules, CHAT, request, rules.ask(CHAT, request, CaptureOptions()))
    assert ("meta_info" in json.loads(reader.body(data))["choices"][0]) is keeps
