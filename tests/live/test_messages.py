"""Anthropic's own client and the Messages dialect, on a real vLLM: the same table as on the embedded engine."""

from __future__ import annotations

from pathlib import Path

import anthropic
import pytest

from capture.journal.journal import JournalReader
from proxy import Settings, serve
from tests.live.conftest import LiveEngine
from tests.proxy.dialects.anthropic.client_cases import CASES

#: The first test waits for the engine, which takes more than five minutes on a busy machine.
pytestmark = pytest.mark.timeout(700)


@pytest.mark.parametrize("name", CASES)
async def test_anthropics_client_on_vllm(vllm: LiveEngine, tmp_path: Path, name: str) -> None:
    settings = Settings(upstream=[vllm.base_url], upstream_key=vllm.api_key, out=tmp_path, probe=False)
    async with serve(settings) as proxy:
        root = proxy.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=root, api_key="x", max_retries=0) as api:
            await CASES[name](api, vllm.model)
    journal = tmp_path / "default/trajectory/llm_trajectory.jsonl"
    for call in JournalReader(journal) if journal.exists() else ():
        assert call.metadata["dialect"] == "anthropic-messages"
        if call.outcome == "ok":
            assert call.capture is not None and call.capture.complete, call.capture and call.capture.unavailable
