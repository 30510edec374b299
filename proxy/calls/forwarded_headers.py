"""Which of an agent's headers are sent on to the engine.

An allow-list, because the engine's key goes with them: gateways take the destination of a request from headers of many
names (Envoy: x-envoy-original-dst-host, llm-d: x-prefiller-host-port, inference gateways:
x-gateway-destination-endpoint, vLLM: x-data-parallel-rank), and new ones come with every release.
"""

from __future__ import annotations

from collections.abc import Iterable

from proxy.http.headers import Headers

#: What an engine or an API reads and what steers nothing: the answer's form, tracing, the call's own name.
ALLOWED = frozenset(
    b"accept accept-language user-agent traceparent tracestate x-request-id x-client-request-id idempotency-key "
    b"openai-beta anthropic-version anthropic-beta".split()
)


def allowed_names(more: Iterable[str]) -> frozenset[bytes]:
    """The names that are sent on, in lower case: `ALLOWED` and those of `Settings.forward_header`."""
    return ALLOWED.union(name.lower().encode() for name in more)


def forwarded(headers: Headers, allowed: frozenset[bytes]) -> Headers:
    """The headers of these names, less those that `connection` says are of one connection (RFC 9110 §7.6.1)."""
    for name, value in headers:
        if name == b"connection" and value not in (b"keep-alive", b"close"):
            allowed = allowed.difference(part.strip() for part in value.lower().split(b","))
    return [header for header in headers if header[0] in allowed]
