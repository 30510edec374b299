"""Whatever stands anywhere in a request: it becomes a chat request, or a refusal that names a field; never a fault."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.responses.dialect import ResponsesDialect
from proxy.dialects.responses.reply_items import dumps
from proxy.errors import Refusal
from tests.examples import examples

RESPONSES = ResponsesDialect()
CODEX = Path(__file__).parents[1] / "transcripts/codex"
FULL: dict[str, Any] = {
    "instructions": "x",
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "medium"},
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "exec_command"}]},
    "include": ["message.output_text.logprobs", "x"],
    "top_logprobs": 2,
    "previous_response_id": "resp_1",
    "max_output_tokens": 5,
}
EARLIER: dict[str, Any] = {
    "resp_1": dumps([
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:x", "detail": "low"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}]},
    ])
}  # fmt: skip
BODIES = [{**json.loads(path.read_text()), **more} for path in sorted(CODEX.iterdir()) for more in ({}, FULL)]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["message", "function_call", "custom_tool_call_output", "reasoning", "item_reference", "function",
                       "custom", "namespace", "assistant", "input_text", "capture.reasoning.v1.eA==", "resp_1"]),
    lambda below: st.lists(below, max_size=3)
    | st.dictionaries(st.sampled_from("type name tools content call_id text role".split()), below, max_size=3),
    max_leaves=5,
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value within a body."""
    found = [path] if path else []
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in below:
        found += places(item, (*path, name))
    return found


PLACES = [places(body) for body in BODIES]


@examples(120)
@given(st.data())
def test_an_unexpected_value_anywhere_is_a_chat_request_or_a_refusal(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(BODIES) - 1))
    body = copy.deepcopy(BODIES[at])
    *way, last = data.draw(st.sampled_from(PLACES[at]))
    place = body
    for name in way:
        place = place[name]
    place[last] = data.draw(values)
    try:
        made = RESPONSES.translate(body, EARLIER)
    except Refusal as refusal:
        assert refusal.status == 400 and refusal.message.startswith("`")
        return
    assert made.chat["messages"]
    reply = RESPONSES.reply(made)
    chat = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}
    answer = reply.body(chat)
    assert answer["status"] == "completed"
    reply.cache_entries()


@examples(60)
@given(st.lists(st.dictionaries(st.sampled_from(["role", "content", "reasoning", "tool_calls", "refusal"]), values)))
def test_an_unexpected_delta_is_passed_over(deltas: list[dict[str, Any]]) -> None:
    reply = RESPONSES.reply(RESPONSES.translate({"model": "m", "input": "x"}, {}))
    for delta in deltas:
        reply.feed({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    reply.feed({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": {"prompt_tokens": "x"}})
    assert b"response.completed" in reply.finish()
