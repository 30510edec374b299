"""What every dialect reads of chat completions, whatever the engine put there, and JSON of what a model may say."""

from __future__ import annotations

import json
from typing import Any

import orjson

from capture.json import objects

Json = dict[str, Any]


def first_choice(body: Json) -> tuple[Json, Json]:
    """The first choice of a completed chat body, and its message; empty where there is none."""
    choices = objects(body.get("choices"))
    choice = choices[0] if choices else {}
    message = choice.get("message")
    return choice, message if isinstance(message, dict) else {}


def as_chunk(body: Json) -> Json:
    """A completed chat body as the one chunk that says all of it. Calls are told apart by their place alone."""
    choice, message = first_choice(body)
    delta = {**message, "tool_calls": [{**call, "index": at} for at, call in enumerate(tool_calls(message))]}
    return {**body, "choices": [{**choice, "index": 0, "delta": delta}] if choice else []}


def reasoning_of(delta: Json) -> str:
    """The reasoning of a message or delta: `reasoning` (vLLM) or `reasoning_content` (SGLang, llama.cpp)."""
    thought = delta.get("reasoning") or delta.get("reasoning_content")
    return thought if isinstance(thought, str) else ""


def tool_calls(delta: Json) -> list[Json]:
    """The tool calls of a message, or their fragments of a delta; an old `function_call` as one of them."""
    calls = objects(delta.get("tool_calls"))
    if not calls and isinstance(delta.get("function_call"), dict):
        return [{"index": 0, "function": delta["function_call"]}]
    return calls


def count(value: Any) -> int:
    """A count of tokens; 0 for what is none."""
    return value if type(value) is int else 0


def arguments_name(call_id: str) -> str:
    """Under which a session keeps the arguments of a tool call as the model wrote them (`base.EarlierAnswers`)."""
    return f"arguments of {call_id}"


def dumps(value: Any) -> bytes:
    """JSON, also of what orjson does not write: lone surrogates, deep nesting, integers beyond 64 bits."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()
