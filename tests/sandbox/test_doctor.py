"""`bench doctor` says what works here, what does not, and the fix."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox.doctor import Finding, check_engine, examine
from sandbox.embedded_engine import EmbeddedEngine
from tests.proxy.fake_engine import FakeEngine
from tests.proxy.upstream.test_logprob_meaning import samples
from tests.sandbox.support import bridge_address


def findings(engine: str | None = None, key: str | None = None, image: str | None = None) -> list[Finding]:
    return list(examine(engine, key, image))


@pytest.mark.docker
def test_a_machine_that_works_has_nothing_bad(engine: EmbeddedEngine, docker_client: object) -> None:
    found = findings(engine.base_url, image="python:3.12-slim")
    assert [f.what for f in found if f.level == "bad"] == []
    words = "\n".join(f.what for f in found)
    assert "Docker 2" in words
    assert f"Docker's bridge {bridge_address()} is an address of this machine; the proxy can listen on it" in words
    assert "the image python:3.12-slim is here" in words and "agents: oracle, nop, mini, pi-acp" in words
    assert f"serves {engine.model}" in words and "its calls can be captured" in words


def test_without_docker_the_fix_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    bad = [f for f in findings() if f.level == "bad"]
    assert [f.fix for f in bad] == ["install Docker and start it (sudo systemctl start docker)"]


@pytest.mark.docker
def test_a_missing_image_is_reported(docker_client: object) -> None:
    bad = [f for f in findings(image="no/such:1") if f.level == "bad"]
    assert [(f.what, f.fix) for f in bad] == [("the image no/such:1 is not here", "docker pull no/such:1")]


def test_an_engine_that_is_unreachable_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bad = [f.what for f in findings("http://127.0.0.1:9/v1") if f.level == "bad"]
    assert any("no engine answers at http://127.0.0.1:9/v1" in what for what in bad)


@pytest.mark.engine
def test_the_embedded_engines_logprobs_are_measured(engine: EmbeddedEngine) -> None:
    found = {f.what: f.level for f in check_engine(engine.base_url, None)}
    what = f"{engine.model}'s logprobs: temperature not applied, truncation not applied; right at temperature 1 only"
    assert found[f"{what} (docs/logprobs.md)"] == "ok"


@pytest.mark.parametrize(
    ("mode", "level", "what"),
    [
        ("temperature", "ok", "my-policy's logprobs: temperature applied, truncation not applied; right at any temper"),
        ("processed", "ok", "my-policy's logprobs: temperature applied, truncation applied; right at any temperature"),
        ("raw_logits", "bad", "my-policy gives logits in place of logprobs"),
        ("refuses", "note", "what its logprobs mean could not be measured"),
    ],
)
async def test_what_logprobs_mean_is_one_line(mode: str, level: str, what: str) -> None:
    async with FakeEngine(samples(mode)) as engine:
        found = await asyncio.to_thread(lambda: list(check_engine(engine.url, None)))
    [finding] = [f for f in found if f.what.startswith(what)]
    assert finding.level == level
