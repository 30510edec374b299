"""OpenAI's own client and the Responses dialect, on a real vLLM: the same table as on the embedded engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai import AsyncOpenAI

from capture.journal.journal import JournalReader
from proxy import Settings, serve
from tests.live.conftest import LiveEngine
from tests.proxy.dialects.responses.client_cases import CASES


@pytest.mark.parametrize("name", CASES)
async def test_openais_client_on_vllm(vllm: LiveEngine, tmp_path: Path, name: str) -> None:
    settings = Settings(upstream=[vllm.base_url], upstream_key=vllm.api_key, out=tmp_path, probe=False)
    async with serve(settings) as proxy, AsyncOpenAI(base_url=proxy.base_url, api_key="x", max_retries=0) as api:
        await CASES[name](api, vllm.model)
    for call in JournalReader(tmp_path / "default/trajectory/llm_trajectory.jsonl"):
        if call.outcome == "ok":
            assert call.capture is not None and call.capture.complete, call.capture and call.capture.unavailable
