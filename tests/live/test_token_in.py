"""Token-in on real engines: twenty turns extend whatever the client rewrites, and the engine does with the ids what it
does with the same ids from anybody else.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture.journal.call import Call
from capture.journal.journal import JournalReader
from proxy import Settings, serve
from tests.live.conftest import LiveEngine
from train.tokens.coverage import coverage

TURNS = 20
TOLERANCE = 1e-4
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Run a command",
            "parameters": {
                "type": "object",
                "properties": {"cmd": {"type": "string"}, "n": {"type": "number"}},
                "required": ["cmd"],
            },
        },
    }
]
#: How a small model is brought to what large ones do of their own: a call with arguments written without spaces, a
#: thought before a text that ends in a space, a text beside a call; every fourth reply is the model's own, and cut.
KINDS: tuple[str | None, ...] = (
    r'<tool_call>\n\{"name":"run","arguments":\{"n":[0-9]{1,2},"cmd":"[a-z]{2,8} [a-z]{2,8}"\}\}\n</tool_call>',
    r"<think>\n[a-z]{2,8} [a-z]{2,8}\n</think>\n\n[A-Z][a-z]{2,8} [a-z]{2,8}\. ",
    r'[A-Z][a-z]{2,8} [a-z]{2,8}\.\n<tool_call>\n\{"name":"run","arguments":\{"cmd":"[a-z]{2,8}"\}\}\n</tool_call>',
    None,
)


class Client:
    """An agent that rebuilds what it got: arguments rewritten, spaces trimmed, reasoning dropped."""

    def __init__(self, engine: LiveEngine, http: httpx.AsyncClient) -> None:
        self.engine = engine
        self.http = http
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You run commands."},
            {"role": "user", "content": "List the files."},
        ]
        self.answers: list[dict[str, Any]] = []
        self.bodies: list[dict[str, Any]] = []

    async def turn(self, number: int) -> None:
        kind = KINDS[number % len(KINDS)]
        body: dict[str, Any] = {
            "model": self.engine.model, "messages": list(self.messages), "tools": TOOLS, "temperature": 0,
            "max_tokens": 60 if kind else 16,
        }  # fmt: skip
        if kind is not None:
            body.update(grammar(self.engine, kind))
        answer = await self.http.post("/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        message = choice["message"]
        self.bodies.append(body)
        self.answers.append(choice)
        content = message.get("content") or ""
        content = content.rpartition("</think>")[2].strip()
        back: dict[str, Any] = {"role": "assistant", "content": content}
        after: list[dict[str, Any]] = []
        for call in message.get("tool_calls") or ():
            arguments = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
            function = {"name": call["function"]["name"], "arguments": arguments}
            back.setdefault("tool_calls", []).append({"id": call["id"], "type": "function", "function": function})
            after.append({"role": "tool", "tool_call_id": call["id"], "content": f"file{number}.txt\n"})
        self.messages += [back, *(after or [{"role": "user", "content": f"And then, step {number}?"}])]


def grammar(engine: LiveEngine, regex: str) -> dict[str, Any]:
    return {"structured_outputs": {"regex": regex}} if engine.name == "vllm" else {"regex": regex}


@asynccontextmanager
async def proxied(engine: LiveEngine, out: Path, token_in: str) -> AsyncIterator[tuple[Client, Path]]:
    settings = Settings(
        upstream=[engine.base_url],
        upstream_key=engine.api_key,
        engine=engine.name,
        out=out,
        probe=False,
        token_in=token_in,
    )
    async with serve(settings) as proxy, httpx.AsyncClient(base_url=proxy.base_url, timeout=300) as http:
        yield Client(engine, http), out / "default/trajectory/llm_trajectory.jsonl"


def calls(journal: Path) -> list[Call]:
    return list(JournalReader(journal))


def extending(made: list[Call]) -> int:
    """How many calls begin with the prompt and the sampled ids of the very call before."""
    count = 0
    for before, call in pairwise(made):
        assert before.capture is not None and call.capture is not None and call.capture.prompt_token_ids is not None
        prompt, sampled = before.capture.prompt_token_ids, before.capture.completions[0].token_ids
        assert prompt is not None and sampled is not None
        count += call.capture.prompt_token_ids.startswith(prompt + sampled)
    return count


@pytest.mark.live
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", ["vllm", "sglang"])
async def test_twenty_turns_extend(
    name: str, tmp_path: Path, request: pytest.FixtureRequest, record_property: pytest.RecordProperty
) -> None:
    engine: LiveEngine = request.getfixturevalue(name)
    extends: dict[str, int] = {}
    for mode in ("off", "auto"):
        async with proxied(engine, tmp_path / mode, mode) as (client, journal):
            for number in range(TURNS + 1):
                await client.turn(number)
        [covered] = list(coverage(journal))
        extends[mode] = extending(calls(journal))
        assert covered.summary["complete_calls"] == TURNS + 1, covered.line
    print(f"{name}: {extends['auto']} of {TURNS} extend with token-in, {extends['off']} without")
    record_property("extends", extends)
    print(covered.line, *covered.explained[:12], sep="\n  ")
    rows = [call.token_in for call in calls(journal)]
    assert [row and row.reason for row in rows] == ["begins", *[None] * TURNS]
    assert extends["auto"] == TURNS
    assert extends["off"] <= TURNS // 2
    assert covered.training_grade
    await same_as_a_plain_call(engine, client, calls(journal))
    differences = recomputed(
        engine, [call for call, kind in zip(calls(journal), KINDS * TURNS, strict=False) if kind is None]
    )
    print(
        f"{name}: {len(differences)} of the model's own replies, largest difference of a logprob {max(differences):.2e}"
    )
    record_property("largest_difference", max(differences))
    assert max(differences) < TOLERANCE


async def same_as_a_plain_call(engine: LiveEngine, client: Client, made: list[Call]) -> None:
    """The engine itself, given the same ids on its chat route and on its completions route, says the same."""
    headers = {} if engine.api_key is None else {"authorization": f"Bearer {engine.api_key}"}
    async with httpx.AsyncClient(base_url=engine.base_url, headers=headers, timeout=300) as direct:
        for number, call in enumerate(made):
            capture, body, choice = call.capture, client.bodies[number], client.answers[number]
            assert capture is not None and capture.prompt_token_ids is not None
            ids = capture.prompt_token_ids.tolist()
            prompt_field = (
                {"kv_transfer_params": {"prompt_token_ids": ids}} if engine.name == "vllm" else {"input_ids": ids}
            )
            answer = await direct.post("/chat/completions", json={**body, **prompt_field})
            [plain] = answer.json()["choices"]
            assert plain["finish_reason"] == choice["finish_reason"]
            assert without_ids(plain["message"]) == without_ids(choice["message"])
            fields = {
                name: body[name]
                for name in ("model", "temperature", "max_tokens", "structured_outputs", "regex")
                if name in body
            }
            answer = await direct.post(
                "/completions", json={**fields, "prompt": ids, "logprobs": 0, "return_token_ids": True}
            )
            [again] = answer.json()["choices"]
            assert capture.completions[0].token_ids == again["token_ids"], number


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message without the names that an engine makes up for each call."""
    made: dict[str, Any] = json.loads(json.dumps(message))
    for call in made.get("tool_calls") or ():
        call.pop("id")
    return made


def recomputed(engine: LiveEngine, made: list[Call]) -> list[float]:
    captures = []
    for call in made:
        assert call.capture is not None and call.capture.prompt_token_ids is not None
        [completion] = call.capture.completions
        assert completion.token_ids is not None
        captures.append(
            {
                "prompt_token_ids": call.capture.prompt_token_ids.tolist(),
                "token_ids": completion.token_ids.tolist(),
                "logprobs": completion.logprobs,
            }
        )
    done = subprocess.run(
        [engine.python, Path(__file__).with_name("recompute.py"), engine.weights],
        input=json.dumps(captures), capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    differences: list[float] = json.loads(done.stdout)
    return differences
