"""What agents really sent, as chat requests: vLLM's own model of a request takes every one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from proxy.dialects.anthropic.dialect import AnthropicDialect
from proxy.dialects.base import Dialect
from proxy.dialects.gemini.dialect import GeminiDialect
from proxy.dialects.responses.dialect import ResponsesDialect

TRANSCRIPTS = Path(__file__).parents[1] / "proxy/dialects/transcripts"
#: The dialects that agents speak; their requests are recorded in a folder of the agent's name.
AGENTS: dict[str, Dialect] = {"codex": ResponsesDialect(), "gemini": GeminiDialect("my-policy", streams=True)}
#: Runs in vLLM's own environment: standard input is a list of requests, standard output what it says of each.
CHECK = """
import json, sys
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
told = []
for body in json.load(sys.stdin):
    try:
        made = ChatCompletionRequest.model_validate(body)
        told.append({"unknown": sorted(made.model_extra or ()), "tools": len(made.tools or ())})
    except Exception as error:
        told.append({"error": str(error)})
print("CHECKED" + json.dumps(told))
"""


def recorded() -> list[tuple[str, Dialect, dict[str, Any]]]:
    found = [
        (f"{agent}/{path.stem}", dialect, json.loads(path.read_text()))
        for agent, dialect in AGENTS.items()
        for path in sorted((TRANSCRIPTS / agent).glob("*.json"))
    ]
    claude = json.loads((TRANSCRIPTS / "claude_code.json").read_text())
    return found + [(request["name"], AnthropicDialect(), request["body"]) for request in claude if request["body"]]


def test_recorded_requests_are_valid_for_vllm() -> None:
    python = Path.home() / ".cache/capture-vllm/venv/bin/python"
    if not python.exists():
        pytest.fail(f"{python} is missing: `make live` installs it (about 3 GB, once)")
    requests = recorded()
    assert len(requests) >= 14
    chats = [dialect.translate(body, {}).chat for _, dialect, body in requests]
    done = subprocess.run([python, "-c", CHECK], input=json.dumps(chats), capture_output=True, text=True, timeout=300)
    assert "CHECKED" in done.stdout, done.stderr[-2000:]
    result = json.loads(done.stdout.split("CHECKED")[1])
    for (name, _, _), chat, outcome in zip(requests, chats, result, strict=True):
        assert outcome == {"unknown": [], "tools": len(chat.get("tools", ()))}, name
