"""A call's line in the journal."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import orjson

from capture import json
from capture.engines.reader import Reader
from capture.journal.redact import redact, redact_text, secrets_seen
from capture.record import TokenCapture
from proxy.calls.facts import Facts
from proxy.calls.request_body import Request
from proxy.calls.translator import Translated
from proxy.http.headers import Headers
from proxy.sessions.registry import Session

#: The agent's headers that are recorded: which client it is, and its own ids of the call and session.
KEPT_HEADERS = frozenset(
    (b"user-agent", b"x-client-request-id", b"x-session-id", b"x-parent-session-id", b"x-stainless-retry-count")
)


def journal_line(
    facts: Facts,
    request: Request,
    headers: Headers,
    session: Session,
    reader: Reader | None,
    capture: TokenCapture | None,
    translated: Translated | None = None,
) -> bytes:
    """One line, without its newline. The prompt's ids are spliced in as they came, never parsed.

    `translated` for a call that went to the engine as chat but was made, and answered, in another dialect.
    """
    agent_headers = {name.decode(): value.decode("latin-1") for name, value in headers if name in KEPT_HEADERS}
    if facts.outcome in ("error", "ended") or reader is None:
        answered = facts.error_body
    else:
        answered = reader.assembled() if translated is None else translated.body
    if facts.failure is not None and facts.outcome == "truncated" and isinstance(answered, dict):
        answered = {**answered, "error": {"message": facts.failure, "type": "truncated"}}
    stored, answered = _stored(request), _cleaned(answered)
    metadata: dict[str, Any] = {
        "session": session.id,
        "session_name": session.name,
        "call": facts.number,
        "request_id": facts.request_id,
        "call_purpose": session.purposes.of(request.body if translated is None else request.upstream, agent_headers),
        "call_type": facts.call_type,
        "dialect": facts.dialect,
        "engine": facts.engine,
        "engine_version": facts.engine_version,
        "stream": request.streams,
        "ttft_ms": facts.ttft_ms,
        "upstream": facts.replica,
        "request_model": request.body.get("model"),
        "provider_model": request.upstream.get("model"),
        "sampling": {
            "sent": request.sampling,
            "session": session.options.sampling,
            "engine_defaults": facts.engine_defaults,
        },
        "purpose": session.options.purpose,
        "policy_version": facts.policy_version,
        "policy_version_end": facts.policy_version_end,
        "outcome": facts.outcome,
        "retry_of": facts.retry_of,
        "dropped_fields": [] if translated is None else translated.dropped,
        # A translated answer may repeat its request; what is new of it is in the chat answer too.
        "secrets_seen": secrets_seen(
            request.body, answered if translated is None or translated.chat is None else translated.chat
        ),
    }
    if not request.is_object:
        metadata["unreadable_body"] = redact_text(request.raw[:2000].decode("utf-8", "replace"))
    if translated is not None and translated.sent:
        metadata["chat_request"] = _cleaned(request.upstream)
        metadata["chat_response"] = _cleaned(translated.chat)
    if facts.held_seconds:
        metadata["held_ms"] = round(facts.held_seconds * 1000, 3)
    if reader is not None and (versions := reader.weight_versions()) is not None:
        metadata["weight_versions"] = versions
    if session.options.force_sampling:
        metadata["sampling"]["forced"] = session.options.force_sampling
    if request.cap is not None:
        metadata["sampling"]["output_cap"] = request.cap.to_json()
    if facts.ended is not None:
        metadata["ended"] = facts.ended
    if facts.token_in is not None:
        metadata["token_in"] = facts.token_in
    if capture is not None and facts.logprobs is not None:
        metadata["logprobs"] = facts.logprobs
    if capture is not None:
        metadata["token_capture"] = capture.to_json()
    return json.dumps(
        {
            "request": {
                "timestamp": _iso(facts.began_at),
                "method": "POST",
                "path": facts.path,
                "headers": agent_headers,
                "body": stored,
            },
            "response": {
                "timestamp": _iso(facts.ended_at),
                "status_code": facts.status,
                "headers": {},
                "body": answered,
            },
            "duration_ms": facts.duration_ms,
            "metadata": metadata,
        }
    )


def _stored(request: Request) -> Any:
    """The request's body for the journal: the agent's own bytes where nothing had to be taken out."""
    body = _cleaned(request.body)
    return orjson.Fragment(request.raw) if body is request.body and request.strict else body


def _cleaned(value: Any) -> Any:
    try:
        return redact(value)
    except RecursionError:
        return redact(json.storable(value))


def _iso(moment: float) -> str:
    """A Unix time in UTC, to the millisecond."""
    seconds = int(moment)
    return f"{_second(seconds)}.{int((moment - seconds) * 1000):03d}Z"


@lru_cache(16)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
