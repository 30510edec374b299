"""Each place of a request, and of an engine's answer, with each strange value: what the dialects make of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from proxy.dialects.anthropic.dialect import AnthropicDialect
from proxy.dialects.base import Dialect
from proxy.dialects.gemini.dialect import GeminiDialect
from proxy.dialects.responses.dialect import ResponsesDialect
from proxy.errors import Refusal
from tests.proxy.dialects.anthropic.test_request import CHUNK, ODD, places

STRANGE = [*ODD, "\ud800", 2**70, "\u00e9", "\u00b2", [[]], {"a": []}]
SCHEMA = {"type": "OBJECT", "properties": {"a": {"type": "STRING", "maxLength": "3", "nullable": True}}}
GEMINI: dict[str, Any] = {
    "contents": [
        {"role": "user", "parts": [{"text": "a"}, {"inlineData": {"mimeType": "image/png", "data": "aa"}}]},
        {"role": "model", "parts": [
            {"text": "b", "thoughtSignature": "skip_thought_signature_validator"},
            {"functionCall": {"name": "f", "args": {"a": 1}, "id": "c"}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "f", "id": "c", "response": {"output": "ok"}}}]},
    ],
    "systemInstruction": {"parts": [{"text": "s"}]},
    "tools": [{"functionDeclarations": [{"name": "f", "description": "d", "parameters": SCHEMA}]}],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
    "generationConfig": {
        "thinkingConfig": {"thinkingLevel": "LOW", "includeThoughts": True}, "temperature": 1.0, "candidateCount": 1,
        "stopSequences": ["x"], "responseMimeType": "application/json", "responseSchema": SCHEMA,
    },
}  # fmt: skip
ASKED: dict[str, tuple[Dialect, dict[str, Any]]] = {
    "gemini": (GeminiDialect("m", True), {"contents": [{"parts": [{"text": "a"}]}]}),
    "messages": (AnthropicDialect(), {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}),
    "responses": (ResponsesDialect(), {"model": "m", "input": "a", "stream": True}),
}


def with_strange_values(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for path in places(value)[1:]:
        for odd in STRANGE:
            made = copy.deepcopy(value)
            at: Any = made
            for name in path[:-1]:
                at = at[name]
            at[path[-1]] = odd
            yield made


def test_a_gemini_request_is_a_chat_request_or_a_refusal() -> None:
    translated = refused = 0
    for body in with_strange_values(GEMINI):
        try:
            json.dumps(GeminiDialect("m", True).translate(body, {}).chat)
            translated += 1
        except Refusal as refusal:
            assert refusal.status == 400
            refused += 1
    assert translated > 200 and refused > 200


@pytest.mark.parametrize("name", ASKED)
def test_an_answer_breaks_nothing(name: str) -> None:
    dialect, body = ASKED[name]
    made = dialect.translate(body, {})
    for chunk in with_strange_values(CHUNK):
        reply = dialect.reply(made)
        assert reply.feed(chunk) + reply.finish()
        reply = dialect.reply(made)
        json.dumps(reply.body(chunk))
        reply.cache_entries()


@pytest.mark.parametrize("name", ASKED)
def test_a_second_choice_is_not_a_part_of_the_answer(name: str) -> None:
    """A session whose sampling defaults say n=2: the dialect's one answer is the first choice."""
    dialect, body = ASKED[name]
    reply = dialect.reply(dialect.translate(body, {}))
    events = b"".join(
        reply.feed({"choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish}]})
        for index, text, finish in [(0, "red", None), (1, "blue", "length"), (0, "dish", "stop")]
    )
    assert b"red" in events and b"dish" in events and b"blue" not in events + reply.finish()
