"""What is known of a call, filled in as it proceeds."""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass, field, replace
from typing import Any

from capture.engines.reader import Reader
from capture.engines.wires import COMPLETIONS
from capture.record import FIELDS, TokenCapture, Unavailable
from capture.unavailable import why
from proxy.calls.reply_bytes import error_text
from proxy.dialects.engine_errors import too_long
from proxy.settings import SessionOptions
from proxy.upstream.replicas import Replica

log = logging.getLogger("proxy")


@dataclass(slots=True)
class Facts:
    """`began_at` and `ended_at` are Unix times, `started` is of `time.perf_counter`."""

    number: int
    wire: str
    path: str
    policy_version: str | None
    #: The name that the session had the policy called by, whatever the agent asked for.
    model: str | None = None
    #: Whether the version was read in the name of the adapter that the call was made to, which stays what it is.
    version_in_name: bool = False
    dialect: str = ""
    call_type: str = "chat_completion"
    outcome: str = "ok"
    status: int = 0
    retry_of: int | None = None
    engine: str | None = None
    engine_version: str | None = None
    replica: str | None = None
    engine_defaults: dict[str, Any] | None = None
    #: What the engine's logprobs mean, as `Replica.describe_logprobs` says it.
    logprobs: dict[str, str] | None = None
    refused: str | None = None
    failure: str | None = None
    #: Why the proxy itself did not send the request.
    refusal: str | None = None
    #: Which limit of the session's budget was reached, where the proxy therefore answered the call itself.
    ended: dict[str, Any] | None = None
    capture_failed: str | None = None
    error_body: Any = None
    token_in: dict[str, Any] | None = None
    policy_version_end: str | None = None
    request_id: str = field(default_factory=lambda: "req-" + secrets.token_hex(8))
    began_at: float = field(default_factory=time.time)
    ended_at: float = 0.0
    started: float = field(default_factory=time.perf_counter)
    #: While engines were paused.
    held_seconds: float = 0.0
    ttft_ms: float | None = None
    duration_ms: float = 0.0

    def __post_init__(self) -> None:
        self.dialect = self.dialect or self.wire
        if self.wire == COMPLETIONS:
            self.call_type = "text_completion"

    def sent_to(self, replica: Replica) -> None:
        self.engine = replica.engine.name if replica.engine else None
        self.engine_version = replica.version
        self.replica = replica.label
        self.engine_defaults = replica.sampling_defaults
        self.logprobs = replica.describe_logprobs()

    def first_byte(self) -> None:
        if self.ttft_ms is None:
            self.ttft_ms = round((time.perf_counter() - self.started) * 1000, 3)

    def capture_fails(self, error: Exception) -> None:
        """A fault of ours in reading an answer costs the record, not the call."""
        if self.capture_failed is None:
            log.exception("call %d: the answer could not be read", self.number)
        self.capture_failed = f"{type(error).__name__}: {error}"

    def take_policy(self, options: SessionOptions) -> None:
        """The call is sent now, after whatever it waited for: to the session's policy of this moment."""
        self.policy_version, self.model = options.policy_version, options.model

    def finish(self, options: SessionOptions) -> None:
        """The call has ended; `options` are the session's now.

        Where the policy has another name by now (a new LoRA adapter), the call stayed with the one it was sent to;
        under the same name its weights were replaced while it ran.
        """
        self.ended_at = time.time()
        self.duration_ms = round((time.perf_counter() - self.started) * 1000, 3)
        if options.policy_version != self.policy_version and options.model == self.model and not self.version_in_name:
            self.policy_version_end = options.policy_version

    def capture(self, reader: Reader | None, wanted: bool, readable: bool) -> TokenCapture | None:
        """The call's token capture; None when capture is off. A call that the engine broke off is `truncated`."""
        if self.outcome == "ok" and reader is not None and reader.unfinished is not None:
            self.outcome = "truncated"
        if not wanted:
            return None
        if self.capture_failed is not None:
            return _nothing(self, why("capture_failed", fault=self.capture_failed))
        if self.refused is not None:
            return _nothing(self, why("server_refused_capture_fields", told=self.refused))
        if self.ended is not None:
            return _nothing(self, why("budget_reached", limit=self.ended["limit"], maximum=self.ended["max"]))
        if self.refusal is not None:
            return _nothing(self, why("refused_by_proxy", refusal=self.refusal))
        if reader is None and self.outcome == "aborted":
            return _nothing(self, why("never_sent"))
        if reader is None or not readable:
            detail = self.failure or "the request was no JSON object, so nothing could be asked for"
            return _nothing(self, Unavailable("request_failed", "upstream_http_error", detail))
        capture = reader.capture(self.outcome, status=self.status, failure=self.failure)
        if self.outcome != "ok" and reader.nothing_sampled and too_long(self._error_text(reader)):
            return replace(capture, completions=[], unavailable=dict.fromkeys(FIELDS, why("prompt_too_long")))
        return capture

    def _error_text(self, reader: Reader) -> str:
        """What the engine said of its failure, as an answer or inside one."""
        return error_text(self.error_body) or error_text(reader.error) or ""


def _nothing(facts: Facts, why: Unavailable) -> TokenCapture:
    return TokenCapture.of(
        wire=facts.wire,
        provider=facts.engine,
        requested={"logprobs": False, "top_logprobs": None, "token_ids": False},
        prompt_token_ids=None,
        completions=[],
        unavailable=dict.fromkeys(FIELDS, why),
    )
