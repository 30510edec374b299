"""What real engines' logprobs mean: measured by the proxy, and shown by a call's alternatives at two temperatures."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture.journal.journal import JournalReader
from proxy import Settings, serve
from tests.live.conftest import serving

MODES = {
    "vllm": ((), "not_applied", "not_applied", "logprobs"),
    "vllm processed": (("--logprobs-mode", "processed_logprobs"), "applied", "applied", "logprobs"),
    "vllm raw logits": (("--logprobs-mode", "raw_logits"), "not_applied", "not_applied", "logits"),
    "vllm processed logits": (("--logprobs-mode", "processed_logits"), "applied", "applied", "logits"),
    "sglang": ((), "applied", "not_applied", "logprobs"),
}
SAMPLING: dict[str, Any] = {"top_k": -1, "top_p": 1, "min_p": 0, "max_tokens": 1}
USER = [{"role": "user", "content": "Name two colours."}]


@pytest.mark.parametrize("name", MODES)
async def test_what_is_measured_is_what_a_call_shows(name: str, tmp_path: Path) -> None:
    arguments, temperature, truncation, values = MODES[name]
    kind = name.partition(" ")[0]
    wanted = {"temperature": temperature, "truncation": truncation, "values": values, "source": "probe"}
    with serving(kind, "dummy-key" if kind == "vllm" else None, tmp_path, *arguments) as engine:
        settings = Settings(
            upstream=[engine.base_url], upstream_key=engine.api_key, out=tmp_path / "out", measure_logprobs=True,
            probe=False, top_logprobs=4,
        )  # fmt: skip
        async with serve(settings) as proxy, httpx.AsyncClient(base_url=proxy.base_url, timeout=120) as client:
            async with asyncio.timeout(120):
                while (await proxy.logprobs() or {}).get("source") != "probe":
                    await asyncio.sleep(0.1)
            assert await proxy.logprobs() == wanted
            for degrees in (1.0, 0.5):
                body = {"model": engine.model, "messages": USER, "temperature": degrees, **SAMPLING}
                assert (await client.post("/chat/completions", json=body)).status_code == 200
    calls = list(JournalReader(tmp_path / "out/default/trajectory/llm_trajectory.jsonl"))
    assert [call.metadata["logprobs"] for call in calls] == [wanted, wanted]
    captures = [call.capture for call in calls]
    assert all(capture is not None and capture.complete == (values == "logprobs") for capture in captures)
    if values == "logits":
        assert {why.code for why in captures[0].unavailable.values()} == {"logits_not_logprobs"}  # type: ignore[union-attr]
        return
    warm, cold = (
        {row["token"]: row["logprob"] for row in capture.completions[0].top_logprobs[0]}  # type: ignore[union-attr,index]
        for capture in captures
    )
    first, second = sorted(warm.keys() & cold.keys(), key=lambda token: -warm[token])[:2]
    distances = (cold[first] - cold[second]) / (warm[first] - warm[second])
    assert distances == pytest.approx(2 if temperature == "applied" else 1, rel=0.01)
