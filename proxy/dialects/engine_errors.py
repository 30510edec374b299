"""What an engine's error means, read from its words where its status does not say it."""

from __future__ import annotations

from typing import Any, Final

#: How engines (vLLM 0.32, SGLang 0.5.23, llama.cpp) say that a prompt is longer than the context, or than what is left
#: of it: vLLM's input processor and SGLang's scheduler look once more, and have words of their own.
_TOO_LONG: Final = (
    "maximum context length", "maximum model length",
    "model's context length", "maximum allowed length", "KV memory budget", "prompt is too long",
    "available context size", "context window",
)  # fmt: skip
#: Engines answer 500 to some of these, although they are faults of the request.
MEDIA: Final = ("image input is not supported", "is not a multimodal model")
_OWN_FAULT: Final = (*MEDIA, "audio input is not supported", "Failed to parse tool call arguments")


def error_message(engine_error: Any, default: str) -> str:
    """The engine's own sentence: nested under `error` (vLLM, llama.cpp) or flat (SGLang); `default` for none."""
    inner = engine_error.get("error", engine_error) if isinstance(engine_error, dict) else None
    message = inner.get("message") if isinstance(inner, dict) else None
    return message if isinstance(message, str) else default


def too_long(message: str) -> bool:
    """Whether the error is about a prompt longer than the context."""
    return any(words in message for words in _TOO_LONG)


def limit_too_large(message: str) -> bool:
    """Whether the error is about a reply's length that does not fit the context, alone or with the prompt."""
    return too_long(message) or "max_model_len" in message


def own_fault(message: str) -> bool:
    """Whether the error is the request's own fault, whatever its status: repeating the call cannot help."""
    return too_long(message) or any(words in message for words in _OWN_FAULT)
