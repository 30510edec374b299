"""What is added to a call so that tokens come back: helpers that the engines' files share.

Each returns the names of the fields that it added.
"""

from __future__ import annotations

from typing import Any

from capture.engines.base import is_true
from capture.engines.request import CaptureOptions, UpstreamRequest
from capture.unavailable import why


def upstream_request(body: dict[str, Any], options: CaptureOptions) -> UpstreamRequest:
    """The call as the agent made it, without its stream where the engine is called without one."""
    upstream = UpstreamRequest(dict(body))
    upstream.unstreamed = options.buffered and body.get("stream") is True
    if upstream.unstreamed:
        unstream(upstream)
    return upstream


def unstream(upstream: UpstreamRequest) -> None:
    """Calls without a stream; vLLM and SGLang refuse `stream_options` then."""
    upstream.body["stream"] = False
    upstream.body.pop("stream_options", None)


def final_usage(upstream: UpstreamRequest) -> list[str]:
    """Asks a stream for its final count, and for no count per chunk, which the agent would see."""
    options = upstream.body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        return []
    if options is not None and not isinstance(options, dict):
        return []  # the agent's own mistake; the engine answers it
    own = {name: value for name, value in (options or {}).items() if name != "continuous_usage_stats"}
    upstream.body["stream_options"] = {**own, "include_usage": True}
    return ["stream_options"]


def token_ids(upstream: UpstreamRequest) -> list[str]:
    """Asks for ids by `return_token_ids` (vLLM, SGLang unstreamed)."""
    upstream.requested["token_ids"] = True
    if upstream.body.get("return_token_ids"):
        return []
    upstream.body["return_token_ids"] = True
    return ["return_token_ids"]


def chat_logprobs(
    upstream: UpstreamRequest, options: CaptureOptions, *, at_least: int = 0, alone_is_refused: bool = True
) -> list[str]:
    """Asks for one logprob per sampled token, and for the alternatives that are wanted; the agent's own fields stay.

    `at_least` alternatives are asked for where an engine gives no logprobs without. `alone_is_refused`: the engine
    answers 400 to `top_logprobs` without `logprobs` (vLLM 0.32 and llama.cpp do, SGLang 0.5.23 does not).
    """
    body = upstream.body
    own, own_top = is_true(body.get("logprobs")), body.get("top_logprobs")
    if not own and own_top and alone_is_refused:
        # `top_logprobs` without `logprobs` is the agent's own mistake: it gets the engine's 400.
        upstream.unavailable["logprobs"] = why("invalid_logprobs_request")
        return []
    upstream.requested["logprobs"] = True
    upstream.requested["top_logprobs"] = own_top if own else options.top_logprobs
    injected = []
    if not own:
        body["logprobs"] = True
        injected.append("logprobs")
    top = max(at_least, 0 if own else options.top_logprobs or 0)
    if top and (not own or own_top == 0):
        body["top_logprobs"] = top
        injected.append("top_logprobs")
    return injected


def completion_logprobs(upstream: UpstreamRequest, options: CaptureOptions) -> list[str]:
    """The same on the completions route, where `logprobs: 0` gives the sampled token's logprob alone."""
    asked = upstream.body.get("logprobs")
    own = asked is not None and asked is not False
    upstream.requested["logprobs"] = True
    upstream.requested["top_logprobs"] = (int(asked) if isinstance(asked, int) else None) if own else (
        options.top_logprobs
    )  # fmt: skip
    if own:
        return []
    upstream.body["logprobs"] = options.top_logprobs or 0
    return ["logprobs"]
