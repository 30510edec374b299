"""What every dialect reads of a chat answer, whatever stands in it, and the JSON of what a model may say."""

from __future__ import annotations

import json
from typing import Any

import orjson

Json = dict[str, Any]


def first_choice(body: Json) -> tuple[Json, Json]:
    """The first choice of a completed chat body, and its message; empty where there is none."""
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    message = choice.get("message")
    return choice, message if isinstance(message, dict) else {}


def objects(value: Any) -> list[Json]:
    """The objects of a list; none of what is no list."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def arguments_name(call_id: str) -> str:
    """Under which a session keeps the arguments of a tool call as the model wrote them (`base.Earlier`)."""
    return f"arguments of {call_id}"


def dumps(value: Any) -> bytes:
    """JSON, also of what orjson does not write: lone surrogates, deep nesting, integers beyond 64 bits."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()
