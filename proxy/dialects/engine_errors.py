"""Errors of engines that say more in words than by their status, for the dialects to say in theirs."""

from __future__ import annotations

from typing import Final

#: Words of engines (vLLM 0.32, SGLang 0.5, llama.cpp) for a prompt beyond the context.
_TOO_LONG: Final = ("maximum context length", "model's context length", "available context size", "context window")
#: Engines answer 500 to some of these, which are the request's own faults: no second call can help.
MEDIA: Final = ("image input is not supported", "is not a multimodal model")
_OWN_FAULT: Final = (*MEDIA, "audio input is not supported", "Failed to parse tool call arguments")


def too_long(message: str) -> bool:
    """Whether an engine's error is about a prompt that its context does not hold."""
    return any(words in message for words in _TOO_LONG)


def own_fault(message: str) -> bool:
    """Whether an engine's error is the request's own fault, whatever its status says."""
    return too_long(message) or any(words in message for words in _OWN_FAULT)
