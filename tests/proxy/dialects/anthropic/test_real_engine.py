"""The official Anthropic client against the embedded engine, through the proxy: every case of the table."""

from __future__ import annotations

import json

import anthropic
import pytest

from sandbox.embedded_engine import EmbeddedEngine
from tests.proxy.conftest import Started
from tests.proxy.dialects.anthropic.client_cases import CASES
from tests.schemas import validator


@pytest.mark.parametrize("name", CASES)
async def test_the_official_client(started: Started, engine: EmbeddedEngine, name: str) -> None:
    async with started(engine.base_url, engine="llamacpp") as bench:
        root = bench.proxy.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=root, api_key="x", max_retries=0) as api:
            await CASES[name](api, engine.model)
        calls = bench.calls()
    for call in calls:
        validator("llm_trajectory_line.v1").validate(json.loads(call.raw))
        assert call.metadata["dialect"] == "anthropic-messages" and call.request["path"] == "/v1/messages"
        if call.outcome == "ok":
            assert call.capture is not None and call.metadata["chat_response"]["choices"]
            if call.response_body["stop_reason"] != "stop_sequence":  # llama.cpp keeps the last token of a stop string
                assert call.capture.complete, call.capture.unavailable
        else:
            assert call.outcome == "error" and call.response_body["type"] == "error"
