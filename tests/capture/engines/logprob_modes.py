"""The alternatives of a token as engines of every mode give them: what doubles answer when they are measured."""

from __future__ import annotations

import math
from typing import Any

from capture.record import CLAMPED

#: Logits of a small vocabulary: peaked, flat, and all below 0.
PEAKED = [14.0, 9.0, 6.5, 6.0, 5.0, 4.0, 3.0, 1.0]
FLAT = [2.1, 2.0, 1.9, 1.85, 1.8, 1.7, 1.6, 1.5]
LOW = [value - 60 for value in PEAKED]


def alternatives(logits: list[float], mode: str, body: dict[str, Any]) -> dict[str, Any]:
    """The first token's alternatives as an engine of that mode gives them for a request."""
    taken = list(logits)
    if mode in ("temperature", "processed", "processed_logits"):
        taken = [value / body["temperature"] for value in taken]
    if mode in ("processed", "processed_logits") and body["top_k"] > 0:
        taken = [value if rank < body["top_k"] else -math.inf for rank, value in enumerate(taken)]
    if not mode.endswith("logits"):
        total = math.log(math.fsum(map(math.exp, taken)))
        taken = [value - total for value in taken]
    rows = [{"token": f"t{n}", "bytes": [n], "logprob": max(value, CLAMPED)} for n, value in enumerate(taken)]
    entry = {**rows[0], "top_logprobs": rows[: body["top_logprobs"]]}
    return {"choices": [{"logprobs": {"content": [entry]}}]}


def is_measuring(body: dict[str, Any]) -> bool:
    """Whether a chat call is one of those by which the proxy finds out what logprobs mean."""
    return body.get("max_tokens") == 1 and bool(body.get("top_logprobs"))
