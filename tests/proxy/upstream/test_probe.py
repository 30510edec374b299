"""What the log says at start of an engine, and how loudly."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from proxy.settings import Settings
from proxy.upstream.probe import probe_all
from proxy.upstream.replicas import Replicas
from tests.proxy.fake_engine import FakeEngine, answers, replays

STREAM = "vllm/chat-plain-length-stream"


async def probe_log(caplog: pytest.LogCaptureFixture, engine: FakeEngine, **options: Any) -> list[str]:
    settings = Settings(upstream=[engine.url], **options)
    replicas = Replicas(settings.upstream)
    caplog.set_level(logging.INFO, logger="proxy")
    try:
        async with asyncio.timeout(10):
            await probe_all(replicas, settings)
    finally:
        await replicas.close()
    return [
        f"{record.levelname} {record.getMessage()}"
        for record in caplog.records
        if record.getMessage().startswith("probe")
    ]


async def test_an_engine_that_reports_everything_is_logged_once_and_quietly(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeEngine(replays(STREAM)) as engine:
        lines = await probe_log(caplog, engine, token_in="auto")
    assert lines == [
        "INFO probe: replica-0: vllm 0.32.0: prompt ids, sampled ids and one logprob per id come back; logprobs: "
        "temperature not applied, truncation not applied (its default, not measured)"
    ]


async def test_what_answers_there_is_not_an_engine(caplog: pytest.LogCaptureFixture) -> None:
    """A wrong path, or some other server: the address is doubted, not only its engine."""
    async with FakeEngine(answers(404, {}), engine="none") as engine:
        side, engine._side = engine._side, lambda path: side("/nothing")  # type: ignore[method-assign]
        (line,) = await probe_log(caplog, engine)
    assert line.startswith("WARNING ") and line.endswith("GET /v1/models answered HTTP 404: check --upstream")


async def test_an_unknown_engine_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeEngine(answers(200, {}), engine="none") as engine:
        (line,) = await probe_log(caplog, engine)
    assert line.startswith("INFO ") and line.endswith("(name it with --engine)")


async def test_an_incomplete_capture_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeEngine(answers(400, {"error": {"message": "no such model"}})) as engine:
        (line,) = await probe_log(caplog, engine)
    assert line.startswith("WARNING probe: replica-0: vllm 0.32.0 answered the probe with HTTP 400")


@pytest.mark.parametrize(("mode", "words"), [("auto", "are sent as agents make them"), ("require", "gets 422")])
async def test_token_in_that_this_engine_cannot_do_is_reported_at_start(
    caplog: pytest.LogCaptureFixture, mode: str, words: str
) -> None:
    async with FakeEngine(answers(200, {}), engine="none") as engine:
        lines = await probe_log(caplog, engine, token_in=mode)
    assert len(lines) == 2 and lines[1].startswith("WARNING probe: replica-0: no token-in: this engine takes no prompt")
    assert words in lines[1]
