"""Writer and reader are held to the published schemas by golden lines, which the proxy wrote itself.

`GOLDEN=write pytest tests/proxy/test_golden.py` writes them anew.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capture.journal.call import Call
from capture.schemas import examples, load, names
from tests.proxy.conftest import Bench, Started
from tests.proxy.fake_engine import Answer, FakeEngine, Seen, replays, streams, transcript
from tests.schemas import validator

EXAMPLES = Path(__file__).parents[2] / "capture/schemas/examples"
TOOL_CALL = transcript("vllm/tool-auto-forced-stream")[0]["body"]
USER = {"model": "my-policy", "messages": [{"role": "user", "content": "Name two colours."}], "max_tokens": 10}
#: The same call as Codex makes it.
RESPONSES_CALL = {
    "model": "my-policy",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Use the tools."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Is it fine in Paris?"}]},
    ],
    "tools": [
        {"type": "function", "strict": False, **TOOL_CALL["tools"][0]["function"]},
        {"type": "web_search"},
    ],
    "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"], "store": False, "stream": True,
    "max_output_tokens": 60, "prompt_cache_key": "thread-1",
}  # fmt: skip


#: And as Claude Code makes it.
MESSAGES_CALL = {
    "model": "my-policy",
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.3c0; cc_entrypoint=sdk-cli;"},
        {"type": "text", "text": "Use the tools.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Is it fine in Paris?"}]}],
    "tools": [
        {"name": TOOL_CALL["tools"][0]["function"]["name"], "input_schema": {"type": "object", "properties": {}}},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
    "metadata": {"user_id": "{}"}, "output_config": {"effort": "high"}, "thinking": {"type": "adaptive"},
    "stream": True, "max_tokens": 60,
}  # fmt: skip


async def post(bench: Bench, body: dict[str, Any]) -> None:
    await bench.client.post("/chat/completions", json=body)


async def respond(bench: Bench, body: dict[str, Any]) -> None:
    await bench.client.post("/responses", json=body)


async def message(bench: Bench, body: dict[str, Any]) -> None:
    await bench.client.post("/messages?beta=true", json=body)


async def leave(bench: Bench, body: dict[str, Any]) -> None:
    async with bench.client.stream("POST", "/chat/completions", json=body) as answer:
        async for data in answer.aiter_raw():
            if b"two" in data:
                break
    await bench.recorded()


def cut() -> Answer:
    _, recorded = transcript("vllm/chat-plain-length-stream")
    half = recorded[: recorded.index(b'" popular"')]

    async def wait(seen: Seen) -> None:
        async with asyncio.timeout(5):
            await seen.gone.wait()

    return streams(half[: half.rindex(b"\n\n") + 2], then=wait)


Scenario = tuple[Callable[[], Answer], Callable[[Bench, dict[str, Any]], Any], dict[str, Any]]
SCENARIOS: dict[str, Scenario] = {
    "ok": (lambda: replays("vllm/chat-plain-length-nostream"), post, {**USER, "temperature": 0}),
    "streamed_tool_call": (
        lambda: replays("vllm/tool-auto-forced-stream"),
        post,
        {k: v for k, v in TOOL_CALL.items() if k in ("model", "messages", "tools", "stream", "max_tokens")},
    ),
    "n2": (lambda: replays("vllm/chat-n2-stream"), post, {**USER, "n": 2, "stream": True}),
    "aborted": (cut, leave, {**USER, "stream": True}),
    "failed": (lambda: replays("vllm/err-context-length"), post, USER),
    "translated_responses": (lambda: replays("vllm/tool-auto-forced-stream"), respond, RESPONSES_CALL),
    "translated_messages": (lambda: replays("vllm/tool-auto-forced-stream"), message, MESSAGES_CALL),
}
COMPLETE = {"ok", "streamed_tool_call", "n2", "token_in", "translated_responses", "translated_messages"}


@pytest.mark.parametrize("name", SCENARIOS)
async def test_what_the_proxy_writes_is_the_golden_line(started: Started, name: str) -> None:
    answer, act, body = SCENARIOS[name]
    async with FakeEngine(answer()) as engine, started(engine.url) as bench:
        await act(bench, body)
        line = json.loads(bench.journal.read_bytes())
    path = EXAMPLES / f"{name}.json"
    if os.environ.get("GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(line, indent=1) + "\n")
    golden = json.loads(path.read_text())
    assert steady(line) == steady(golden)


def steady(line: dict[str, Any]) -> dict[str, Any]:
    """A line without what differs between two runs."""
    made: dict[str, Any] = json.loads(re.sub(r"_[0-9a-f]{32}", "_id", json.dumps(line)))
    for place, fields in (
        (made, ("duration_ms",)),
        (made["request"], ("timestamp", "headers")),
        (made["response"], ("timestamp",)),
        (made["metadata"], ("session", "request_id", "ttft_ms")),
    ):
        for field in fields:
            assert field in place
            place[field] = type(place[field]).__name__
    return made


@pytest.mark.parametrize(("name", "line"), list(examples()))
def test_golden_lines_are_valid_and_readable(name: str, line: dict[str, Any]) -> None:
    validator("llm_trajectory_line.v1").validate(line)
    call = Call(0, json.dumps(line).encode())
    capture = call.capture
    assert capture is not None and capture.complete is (name in COMPLETE)
    if capture.complete:
        assert capture.digest == capture.compute_digest()
    wanted = {"aborted": "aborted", "failed": "error"}.get(name, "ok")
    assert call.outcome == wanted


def test_there_is_a_golden_line_for_each_scenario() -> None:
    assert set(SCENARIOS) <= {name for name, _ in examples()}


def test_the_schemas_are_open_to_new_fields_and_closed_to_wrong_ones() -> None:
    check = validator("llm_trajectory_line.v1")
    line = dict(examples())["ok"]
    line["metadata"]["token_capture"]["new_field"] = line["metadata"]["another"] = 1
    check.validate(line)
    for wrong in ([1.5], [-1], ["1"], "1"):
        line["metadata"]["token_capture"]["prompt_token_ids"] = wrong
        assert not check.is_valid(line)
    for name in names():
        assert '"additionalProperties": false' not in json.dumps(load(name))
