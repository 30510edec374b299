"""What `GET /metrics` says of calls is what prometheus_client's own counters and histograms would say."""

from __future__ import annotations

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from capture.record import Completion, Ids, TokenCapture
from proxy.admin.metrics import Metrics


@given(st.lists(st.floats(0, 400) | st.sampled_from([0.01, 0.025, 1.0, 300.0])))
def test_a_histogram_is_the_librarys(seconds: list[float]) -> None:
    ours, registry = Metrics(), CollectorRegistry()
    bounds = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
    what = "From the request to the first byte of the engine's reply."
    theirs = prometheus_client.Histogram("capture_ttft_seconds", what, registry=registry, buckets=bounds)
    for second in seconds:
        ours.ttft.observe(second)
        theirs.observe(second)
    values = [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
    assert "\n".join(values) in ours.render().decode()


def test_calls_are_counted_with_what_they_lack() -> None:
    metrics = Metrics()
    for logprobs in ([-0.5, -0.25], None):
        choice = Completion(0, Ids.of([5, 6]), ["a", "b"], logprobs)
        capture = TokenCapture.of(
            wire="openai-chat", provider="vllm", requested={}, prompt_token_ids=Ids.of([1, 2, 3]), completions=[choice],
            unavailable={},
        )  # fmt: skip
        metrics.count("openai-chat", "ok", 12.0, capture)
    metrics.count("openai-chat", "error", None, None)
    lines = metrics.render().decode().splitlines()
    assert {
        'capture_calls_total{outcome="ok",wire="openai-chat"} 2.0',
        'capture_calls_total{outcome="error",wire="openai-chat"} 1.0',
        'capture_tokens_total{kind="prompt"} 6.0',
        'capture_tokens_total{kind="completion"} 4.0',
        "capture_complete_calls_total 1.0",
        'capture_incomplete_calls_total{code="no_logprobs",field="logprobs"} 1.0',
        "capture_ttft_seconds_count 2.0",
    } <= set(lines)
