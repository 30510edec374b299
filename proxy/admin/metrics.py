"""`GET /metrics`: counters and histograms of calls. Labels hold outcomes and reasons, never names, keys or addresses.

What changes with every call is plain numbers, made into metrics when somebody asks: the library's own counters and
histograms cost a call four times as much.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from capture.record import TokenCapture
from proxy.upstream.gate import Gate


class Metrics:
    def __init__(self, gate: Gate | None = None) -> None:
        gate = gate or Gate()
        registry = self._registry = CollectorRegistry()
        #: Calls that have begun and not ended.
        self.running = 0
        self.ttft = Seconds(
            "capture_ttft_seconds",
            "From the request to the first byte of the engine's reply.",
            (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
        )
        self.added = Seconds(
            "capture_added_seconds",
            "Of that, what the proxy itself added before the request was sent on.",
            (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1),
        )
        self._calls: Counter[tuple[str, ...]] = Counter()
        self._prompt = self._completion = self._complete = 0
        self._incomplete: Counter[tuple[str, ...]] = Counter()
        registry.register(self)
        Gauge("capture_in_flight", "Calls that have begun and not ended.", registry=registry).set_function(
            lambda: self.running
        )
        Gauge("capture_held_calls", "Calls that wait while engines are paused.", registry=registry).set_function(
            lambda: gate.waiting
        )
        self.journal_queue = Gauge("capture_journal_queue", "Lines that wait to be written.", registry=registry)
        self.journal_failures = prometheus_client.Counter(
            "capture_journal_failures", "Lines that could not be written.", registry=registry
        )
        self.sessions = Gauge("capture_sessions", "Sessions that are open.", registry=registry)
        self.tasks = Gauge("capture_tasks", "Tasks of the event loop.", registry=registry)

    def count(self, wire: str, outcome: str, ttft_ms: float | None, capture: TokenCapture | None) -> None:
        """Counts a call that ended."""
        self._calls[wire, outcome] += 1
        if ttft_ms is not None:
            self.ttft.observe(ttft_ms / 1000)
        if capture is None:
            return
        if capture.prompt_token_ids is not None:
            self._prompt += len(capture.prompt_token_ids)
        for choice in capture.completions:
            if choice.token_ids is not None:
                self._completion += len(choice.token_ids)
        if capture.complete:
            self._complete += 1
        for field, why in capture.unavailable.items():
            self._incomplete[field, why.code] += 1

    def collect(self) -> Iterator[Metric]:
        """For the registry: the numbers as they are now."""
        yield _counts("capture_calls", "Calls that ended, by outcome.", ("wire", "outcome"), self._calls)
        kinds = {("prompt",): self._prompt, ("completion",): self._completion}
        yield _counts("capture_tokens", "Token ids recorded.", ("kind",), kinds)
        yield _counts("capture_complete_calls", "Calls with every id and logprob.", (), {(): self._complete})
        what = "Calls that lack ids or logprobs, by field and code."
        yield _counts("capture_incomplete_calls", what, ("field", "code"), self._incomplete)
        yield self.ttft.metric()
        yield self.added.metric()

    def render(self) -> bytes:
        return generate_latest(self._registry)


class Seconds:
    """A histogram of durations with these upper bounds, in seconds."""

    def __init__(self, name: str, what: str, bounds: tuple[float, ...]) -> None:
        self._name, self._what, self._bounds = name, what, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def metric(self) -> Metric:
        below, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            below += count
            buckets.append((floatToGoString(bound), below))  # type: ignore[no-untyped-call]
        return HistogramMetricFamily(self._name, self._what, buckets=buckets, sum_value=self._sum)


def _counts(name: str, what: str, labels: tuple[str, ...], values: Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily(name, what, labels=labels)
    for label, count in values.items():
        family.add_metric(label, count)
    return family
