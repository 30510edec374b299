"""`GET /metrics`: what a person graphs. Labels hold outcomes and reasons, never names, keys or addresses."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from capture.record import TokenCapture


class Metrics:
    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.calls = Counter("capture_calls", "Calls that ended, by outcome.", ["wire", "outcome"], registry=registry)
        self.tokens = Counter("capture_tokens", "Token ids recorded.", ["kind"], registry=registry)
        self._prompt, self._completion = self.tokens.labels("prompt"), self.tokens.labels("completion")
        self._ended: dict[tuple[str, str], Counter] = {}
        self.complete = Counter("capture_complete_calls", "Calls with every id and logprob.", registry=registry)
        self.incomplete = Counter(
            "capture_incomplete_calls", "Calls that lack ids or logprobs, by field and code.", ["field", "code"],
            registry=registry,
        )  # fmt: skip
        #: Calls that have begun and not ended; a plain number, for it changes twice a call.
        self.running = 0
        Gauge("capture_in_flight", "Calls that have begun and not ended.", registry=registry).set_function(
            lambda: self.running
        )
        self.journal_queue = Gauge("capture_journal_queue", "Lines that wait to be written.", registry=registry)
        self.journal_failures = Counter(
            "capture_journal_failures", "Lines that could not be written.", registry=registry
        )
        self.sessions = Gauge("capture_sessions", "Sessions that are open.", registry=registry)
        self.tasks = Gauge("capture_tasks", "Tasks of the event loop.", registry=registry)
        self.ttft = Histogram(
            "capture_ttft_seconds", "From the request to the first byte of the engine's reply.", registry=registry,
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
        )  # fmt: skip
        self.added = Histogram(
            "capture_added_seconds", "Of that, what the proxy itself added before the request was sent on.",
            registry=registry, buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1),
        )  # fmt: skip

    def count(self, wire: str, outcome: str, ttft_ms: float | None, capture: TokenCapture | None) -> None:
        """One call that ended."""
        ended = self._ended.get((wire, outcome))
        if ended is None:
            ended = self._ended[wire, outcome] = self.calls.labels(wire, outcome)
        ended.inc()
        if ttft_ms is not None:
            self.ttft.observe(ttft_ms / 1000)
        if capture is None:
            return
        if capture.prompt_token_ids is not None:
            self._prompt.inc(len(capture.prompt_token_ids))
        self._completion.inc(
            sum(len(choice.token_ids) for choice in capture.completions if choice.token_ids is not None)
        )
        if capture.complete:
            self.complete.inc()
        for field, why in capture.unavailable.items():
            self.incomplete.labels(field, why.code).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)
