"""Rows of calls that an agent made in another dialect: the same, byte for byte, as if it had spoken chat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture.journal.journal import JournalReader
from proxy import Settings, serve
from tests.proxy.fake_engine import FakeEngine, answers
from train.rollouts.chat import chat_of, choices_of
from train.rollouts.rollouts import find_rollouts
from train.rows.convert import ConvertOptions, convert
from train.tokens.rollout_tokens import read_tokens

PROMPT = [1, 2, 3, 4]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ARGUMENTS = '{"city":   "Paris"}'
SYSTEM, ASKED, RESULT, SAID = "Be brief.", "What is the weather in Paris?", "18 degrees", "It is mild."
FORMATS = ("prime-sft", "trl-sft", "trl-sft-ids", "skyrl-sft")


def answered(prompt: list[int], sampled: list[int], message: dict[str, Any], finish: str) -> dict[str, Any]:
    """vLLM's answer, ids and logprobs in it."""
    entries = [{"token": f"<{token}>", "logprob": -0.5, "bytes": None, "top_logprobs": []} for token in sampled]
    choice = {"index": 0, "message": {"role": "assistant", **message}, "logprobs": {"content": entries},
              "finish_reason": finish, "stop_reason": None, "token_ids": sampled}  # fmt: skip
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sampled), "total_tokens": len(prompt + sampled)}
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice],
            "usage": usage, "prompt_token_ids": prompt}  # fmt: skip


CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
ANSWERS = (
    answered(PROMPT, [10, 11], {"content": None, "tool_calls": [CALL]}, "tool_calls"),
    answered([*PROMPT, 10, 11, 5, 6], [20, 21, 22], {"content": SAID}, "stop"),
)

CHAT_ASKED = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASKED}]
CHAT_TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "w", "parameters": SCHEMA}}]
CHAT = [
    {"model": "m", "max_tokens": 9, "messages": CHAT_ASKED, "tools": CHAT_TOOLS},
    {
        "model": "m", "max_tokens": 9, "tools": CHAT_TOOLS,
        "messages": [
            *CHAT_ASKED,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
        ],
    },
]  # fmt: skip
MESSAGES_TOOLS = [{"name": "get_weather", "description": "w", "input_schema": SCHEMA}]
MESSAGES = [
    {"model": "m", "max_tokens": 9, "system": SYSTEM, "tools": MESSAGES_TOOLS,
     "messages": [{"role": "user", "content": ASKED}]},
    {
        "model": "m", "max_tokens": 9, "system": [{"type": "text", "text": SYSTEM}], "tools": MESSAGES_TOOLS,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": ASKED}]},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Paris"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": RESULT}]},
        ],
    },
]  # fmt: skip
RESPONSES_TOOLS = [{"type": "function", "name": "get_weather", "description": "w", "parameters": SCHEMA}]
RESPONSES = [
    {"model": "m", "max_output_tokens": 9, "instructions": SYSTEM, "tools": RESPONSES_TOOLS, "input": ASKED},
    {
        "model": "m", "max_output_tokens": 9, "instructions": SYSTEM, "tools": RESPONSES_TOOLS,
        "input": [
            {"role": "user", "content": ASKED},
            {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": ARGUMENTS},
            {"type": "function_call_output", "call_id": "call_1", "output": RESULT},
        ],
    },
]  # fmt: skip
SPOKEN: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "chat": ("/chat/completions", CHAT),
    "messages": ("/messages", MESSAGES),
    "responses": ("/responses", RESPONSES),
}


async def made(out: Path, dialect: str, *, stream: bool) -> Path:
    """The folder of a stand-alone proxy that an agent called twice."""
    path, bodies = SPOKEN[dialect]
    async with FakeEngine(*(answers(200, answer) for answer in ANSWERS)) as engine:
        settings = Settings(upstream=[engine.url], out=out, probe=False, buffered=True, engine="vllm")
        async with serve(settings) as proxy, httpx.AsyncClient(base_url=proxy.base_url) as client:
            for body in bodies:
                assert (await client.post(path, json={**body, "stream": stream})).status_code == 200
    return out / "default"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["messages", "responses"])
async def test_rows_are_those_of_the_same_chat_calls(tmp_path: Path, dialect: str, stream: bool) -> None:
    spoken = await made(tmp_path / dialect, dialect, stream=stream)
    plain = await made(tmp_path / "chat", "chat", stream=stream)
    for form in FORMATS:
        for mode in ("rollout", "exchange"):
            wrote = []
            for folder in (spoken, plain):
                out = tmp_path / "rows.jsonl"
                convert(folder, out, ConvertOptions(format=form, row_mode=mode))
                wrote.append(steady(out.read_text(), folder))
            assert wrote[0] == wrote[1] and wrote[0], (form, mode)
    (rollout,) = find_rollouts(spoken)
    tokens = read_tokens(rollout)
    assert tokens.training_grade and len(tokens.sequences) == 1


def steady(rows: str, folder: Path) -> str:
    return rows.replace(str(folder.parent), "OUT")


@pytest.mark.parametrize("dialect", ["messages", "responses"])
async def test_a_call_is_read_as_the_chat_it_was(tmp_path: Path, dialect: str) -> None:
    folder = await made(tmp_path / dialect, dialect, stream=True)
    first, second = JournalReader(folder / "trajectory/llm_trajectory.jsonl")
    assert [call["function"]["arguments"] for call in chat_of(first).choices[0].message["tool_calls"]] == [ARGUMENTS]
    asked = json.loads(json.dumps(chat_of(second).messages))
    assert [message["role"] for message in asked] == ["system", "user", "assistant", "tool"]
    # The agent may have had the arguments parsed: what the model wrote is what it reads again.
    assert asked[2]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert chat_of(second).choices[0].finish_reason == "stop"


@pytest.mark.parametrize("finish", [None, {}, ["length"], 3])
def test_a_finish_reason_that_is_not_a_string_is_none(finish: Any) -> None:
    """A journal of somebody else's may hold anything there; a row is not lost over it."""
    result = (
        {"choices": [{"index": 0, "message": {"role": "assistant", "content": SAID}, "finish_reason": finish}]},
        {"content": [{"type": "text", "text": SAID}], "stop_reason": finish},
        {"output": [], "status": finish},
    )
    assert [reply.finish_reason for answer in result for reply in choices_of(answer)] == [None, None, None]


@pytest.mark.parametrize(
    ("choices", "texts"),
    [
        ([{"index": 1, "message": {"content": "b"}}, {"index": 0, "message": {"content": "a"}}], ["a", "b"]),
        ([{"index": 0, "message": None}, {"index": 1, "message": {"content": "b"}}], [None, "b"]),
        ([{"index": 2, "message": {"content": "c"}}, {"index": 1}, {"index": 0, "message": []}], [None, None, "c"]),
        ([{"message": {"content": "a"}}, {"index": None, "message": {"content": "b"}}], ["a", "b"]),
        ([None, {"index": 0, "message": {"content": "a"}}], ["a"]),
        ([{"index": 0, "text": "a"}], []),
    ],
)
def test_choices_are_in_the_order_of_their_ids(choices: list[Any], texts: list[Any]) -> None:
    """A capture's completions are sorted by index, so the text of each has to be at the same place."""
    assert [choice.message.get("content") for choice in choices_of({"choices": choices})] == texts
