"""Weights that change in mid-reply, with real engines: who says what about it, and what is recorded."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture.journal.call import Call
from capture.journal.journal import JournalReader
from proxy import ProxyThread, Settings
from tests.live.conftest import LiveEngine, serving
from train.rollouts.rollouts import find_rollouts
from train.tokens.rollout_tokens import RolloutTokens, read_tokens

TOKENS = 160


def tell(engine: LiveEngine, path: str, body: dict[str, Any] | None = None) -> None:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {engine.api_key or 'none'}"}
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(engine.base_url.removesuffix("/v1") + path, data, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200


def settings(engine: LiveEngine, out: Path, **more: Any) -> Settings:
    return Settings(
        upstream=[engine.base_url], upstream_key=engine.api_key, out=out, probe=False, policy_version="6", **more
    )


class Reply(threading.Thread):
    """A long call in a thread of its own."""

    def __init__(self, engine: LiveEngine, base_url: str) -> None:
        super().__init__(daemon=True)
        self._url = f"{base_url}/chat/completions"
        self._body = {
            "model": engine.model, "messages": [{"role": "user", "content": "Count from one to ninety."}],
            "max_tokens": TOKENS, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        self.pieces = 0
        self.text = ""

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=600) as answer:
            for line in answer.iter_lines():
                self.pieces += line.startswith("data:")
                self.text += line

    def until(self, pieces: int) -> None:
        deadline = time.monotonic() + 300
        while self.pieces < pieces:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def recorded(out: Path) -> tuple[Call, RolloutTokens]:
    (call,) = JournalReader(out / "default/trajectory/llm_trajectory.jsonl")
    (rollout,) = find_rollouts(out)
    return call, read_tokens(rollout)


def test_sglang_says_which_ids_are_of_which_weights(sglang: LiveEngine, tmp_path: Path) -> None:
    """Agents stream, the engine does not (`--buffered`): 0.5.23 says it of unstreamed replies only."""
    tell(sglang, "/update_weight_version", {"new_version": "6"})
    with ProxyThread(settings(sglang, tmp_path, buffered=True, keepalive=0.1)) as proxy:
        reply = Reply(sglang, proxy.base_url)
        reply.start()
        time.sleep(3)
        tell(sglang, "/update_weight_version", {"new_version": "7", "abort_all_requests": False})
        proxy.set_policy("7")
        reply.join(600)
    call, tokens = recorded(tmp_path)
    (ranges,) = call.metadata["weight_versions"]
    assert [row["version"] for row in ranges] == ["6", "7"]
    assert ranges[0]["start"] == 0 and 0 < ranges[0]["end"] == ranges[1]["start"] < ranges[1]["end"] == TOKENS
    (sequence,) = tokens.sequences
    spans = [(span.policy_version, span.length, span.policy_version_end) for span in sequence.version_spans]
    assert spans == [("6", ranges[0]["end"], None), ("7", TOKENS - ranges[0]["end"], None)]


def test_a_stream_of_sglangs_has_the_versions_of_its_two_ends(sglang: LiveEngine, tmp_path: Path) -> None:
    with ProxyThread(settings(sglang, tmp_path)) as proxy:
        reply = Reply(sglang, proxy.base_url)
        reply.start()
        reply.until(5)
        tell(sglang, "/update_weight_version", {"new_version": "8", "abort_all_requests": False})
        proxy.set_policy("7")
        reply.join(600)
    call, tokens = recorded(tmp_path)
    assert "weight_versions" not in call.metadata
    (sequence,) = tokens.sequences
    spans = [(span.policy_version, span.length, span.policy_version_end) for span in sequence.version_spans]
    assert spans == [("6", TOKENS, "7")]


@pytest.fixture(scope="module")
def paused_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    """A vLLM with the routes that trainers use."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_SERVER_DEV_MODE", "1")
        with serving("vllm", "dummy-key", tmp_path_factory.mktemp("vllm")) as engine:
            yield engine


def test_a_call_that_vllm_freezes_goes_on_and_no_time_out_of_ours_ends_it(
    paused_vllm: LiveEngine, tmp_path: Path
) -> None:
    with ProxyThread(settings(paused_vllm, tmp_path, idle_timeout=5, first_byte_timeout=60)) as proxy:
        frozen = Reply(paused_vllm, proxy.base_url)
        frozen.start()
        frozen.until(5)
        assert proxy.pause(0) == 1
        tell(paused_vllm, "/pause?mode=keep")
        seen = frozen.pieces
        time.sleep(8)  # longer than --idle-timeout
        assert frozen.is_alive() and frozen.pieces <= seen + 2
        tell(paused_vllm, "/resume")
        proxy.resume("7")
        frozen.join(600)
    assert frozen.text.endswith("[DONE]")
    call, tokens = recorded(tmp_path)
    assert call.outcome == "ok" and call.capture is not None and call.capture.complete
    (sequence,) = tokens.sequences
    assert (sequence.sampled, sequence.policy_versions) == (TOKENS, ("6", "7"))


def test_a_call_that_vllm_aborts_is_recorded_as_cut(paused_vllm: LiveEngine, tmp_path: Path) -> None:
    """The default mode of /pause: what was sampled so far is the reply."""
    with ProxyThread(settings(paused_vllm, tmp_path)) as proxy:
        aborted = Reply(paused_vllm, proxy.base_url)
        aborted.start()
        aborted.until(5)
        tell(paused_vllm, "/pause")
        aborted.join(120)
        tell(paused_vllm, "/resume")
    (call,) = JournalReader(tmp_path / "default/trajectory/llm_trajectory.jsonl")
    assert call.outcome == "truncated" and call.capture is not None
    assert {why.code for why in call.capture.unavailable.values()} == {"reply_not_finished"}
