"""Token-in, engine by engine: how to have messages rendered and ids read, where prompt ids go, how a reply ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from capture.engines import engine
from capture.engines.reader import Reader
from capture.engines.request import CaptureOptions
from capture.engines.wires import CHAT
from capture.record import Ids
from capture.sse import EventDecoder

TRANSCRIPTS = Path(__file__).parents[1] / "transcripts"
MESSAGES = [{"role": "user", "content": "hi"}]


def ended(name: str) -> list[str]:
    """How the choices of a recorded answer ended, by the reader's own body."""
    result = json.loads((TRANSCRIPTS / f"{name}.json").read_text())
    data = (TRANSCRIPTS / f"{name}.body").read_bytes()
    kind = engine(name.split("/")[0])
    body: dict[str, Any] = result["body"]
    ask = kind.ask(CHAT, body, CaptureOptions())
    reader = Reader(kind, CHAT, body, ask)
    if body.get("stream"):
        decoder = EventDecoder()
        for event in [*decoder.feed(data), *decoder.flush()]:
            if event.data and event.data.strip() != b"[DONE]":
                reader.event(event.data)
    else:
        reader.body(data)
    return [kind.reply_end(choice, body) for choice in reader.assembled()["choices"]]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("vllm/chat-plain-length-stream", "cut"),
        ("vllm/chat-plain-length-nostream", "cut"),
        ("vllm/chat-stop-str-stream", "stop_string"),
        ("vllm/chat-stop-str-nostream", "stop_string"),
        ("vllm/reasoning-stream", "cut"),
        ("vllm/tool-required-nostream", "cut"),
        ("sglang/chat-eos-stream", "stop_token"),
        ("sglang/chat-eos-nostream", "stop_token"),
        ("sglang/chat-stop-str-sglext-stream", "stop_string"),
        ("sglang/chat-stop-str-sglext-nostream", "stop_string"),
        ("sglang/chat-sglext-length-stream", "cut"),
    ],
)
def test_a_recorded_reply_ended_as_it_did(name: str, how: str) -> None:
    assert set(ended(name)) == {how}


@pytest.mark.parametrize(
    ("choice", "body", "how"),
    [
        ({"finish_reason": "stop", "stop_reason": None}, {}, "stop_token"),
        ({"finish_reason": "tool_calls", "stop_reason": None}, {"stop": ["x"]}, "stop_token"),
        ({"finish_reason": "stop", "stop_reason": 28}, {"stop_token_ids": [28]}, "stop_token"),
        ({"finish_reason": "stop", "stop_reason": "END"}, {"stop": ["END"]}, "stop_string"),
        ({"finish_reason": "stop", "stop_reason": "END"}, {"stop": ["END"], "include_stop_str_in_output": True}, "cut"),
        ({"finish_reason": "stop"}, {"stop": ["END"]}, "stop_string"),
        ({"finish_reason": "stop"}, {}, "stop_token"),
        ({"finish_reason": "length", "stop_reason": None}, {}, "cut"),
        ({"finish_reason": "abort", "stop_reason": None}, {}, "unknown"),
        ({"finish_reason": None}, {}, "unknown"),
    ],
)
def test_how_a_reply_of_vllm_ended(choice: dict[str, Any], body: dict[str, Any], how: str) -> None:
    assert engine("vllm").reply_end(choice, body) == how


@pytest.mark.parametrize(
    ("choice", "body", "how"),
    [
        ({"finish_reason": "stop", "matched_stop": 2}, {"stop": ["END"]}, "stop_token"),
        ({"finish_reason": "tool_calls", "matched_stop": 2}, {}, "stop_token"),
        ({"finish_reason": "stop", "matched_stop": "END"}, {"stop": "END"}, "stop_string"),
        ({"finish_reason": "stop", "matched_stop": "END"}, {"stop": "END", "no_stop_trim": True}, "cut"),
        ({"finish_reason": "length", "matched_stop": None}, {}, "cut"),
    ],
)
def test_how_a_reply_of_sglang_ended(choice: dict[str, Any], body: dict[str, Any], how: str) -> None:
    assert engine("sglang").reply_end(choice, body) == how


def test_vllm_renders_what_its_chat_route_would() -> None:
    body = {
        "model": "m", "messages": MESSAGES, "tools": [{"type": "function"}], "temperature": 1.0, "stream": True,
        "reasoning_effort": "low", "chat_template_kwargs": {"x": 1}, "documents": [{"text": "d"}],
    }  # fmt: skip
    path, asked = engine("vllm").render(body, MESSAGES[:1], to_be_answered=False)
    assert path == "/tokenize"
    assert asked == {
        "model": "m", "messages": MESSAGES, "tools": [{"type": "function"}], "add_generation_prompt": False,
        "chat_template_kwargs": {
            "x": 1, "reasoning_effort": "low", "enable_thinking": True, "documents": [{"text": "d"}]
        },
    }  # fmt: skip


def test_sglang_renders_a_request_as_its_chat_route_and_messages_as_they_stand() -> None:
    body = {"model": "m", "messages": MESSAGES, "tool_choice": "required", "temperature": 1.0}
    assert engine("sglang").render(body, MESSAGES, to_be_answered=True) == (
        "/tokenize",
        {"model": "m", "messages": MESSAGES, "tool_choice": "required"},
    )
    assert engine("sglang").render(body, MESSAGES, to_be_answered=False)[1]["add_generation_prompt"] is False


@pytest.mark.parametrize(
    ("name", "field", "answer"),
    [("vllm", "kv_transfer_params", {"prompt": "hi"}), ("sglang", "input_ids", {"text": "hi"})],
)
def test_where_prompt_ids_go(name: str, field: str, answer: dict[str, Any]) -> None:
    adapter, body = engine(name), {"messages": MESSAGES}
    assert adapter.takes_prompt_ids and not adapter.has_prompt_ids(body)
    adapter.set_prompt_ids(body, Ids.of([1, 2]))
    written_ids = orjson.loads(orjson.dumps(body))[field]
    assert written_ids in ([1, 2], {"prompt_token_ids": [1, 2]})
    assert adapter.has_prompt_ids(body)
    path, asked = adapter.detokenize(Ids.of([1, 2]))
    assert path == "/detokenize" and orjson.loads(orjson.dumps(asked))["tokens"] == [1, 2]
    assert (
        adapter.parse_detokenized(answer) == "hi"
        and adapter.parse_detokenized({}) is None
        and adapter.parse_detokenized(None) is None
    )
    assert adapter.parse_rendered({"tokens": [1, 2]}) == [1, 2]
    assert adapter.parse_rendered({"tokens": [[1]]}) is None and adapter.parse_rendered(None) is None


@pytest.mark.parametrize("name", ["llamacpp", "other"])
def test_engines_that_take_no_prompt_ids(name: str) -> None:
    assert not engine(name).takes_prompt_ids
