"""A call as it goes to an engine: the agent's request and what was added to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from capture.record import Unavailable

#: A further request to the engine, `(path, body)`, whose JSON answer is sent back to the generator that made it.
FollowUp = tuple[str, dict[str, Any]]


class CaptureOptions(NamedTuple):
    """What is wanted of a call besides what the agent asked for.

    `top_logprobs`: alternatives to record per token. `buffered`: call the engine without a stream even where the agent
    streams.
    """

    capture: bool = True
    top_logprobs: int | None = None
    buffered: bool = False


@dataclass(slots=True)
class UpstreamRequest:
    """A call as it goes to the engine.

    `unstreamed`: the agent asked for a stream, but the engine is called without one, and its answer is re-streamed.
    `injected` names the fields that were added, to recognize a refusal that names one of them. `requested` is what the
    engine is asked for in the end, by the agent or by us: `{logprobs, top_logprobs, token_ids}`.
    """

    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    unstreamed: bool = False
    injected: tuple[str, ...] = ()
    requested: dict[str, Any] = field(
        default_factory=lambda: {"logprobs": False, "top_logprobs": None, "token_ids": False}
    )
    unavailable: dict[str, Unavailable] = field(default_factory=dict)
