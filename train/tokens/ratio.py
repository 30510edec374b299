"""Whether a trainer may build importance ratios on captured logprobs: whether they mean what it computes itself.

A trainer computes the log probability of each sampled id again, over all tokens, from logits that it divides by its
temperature. The ratio to the recorded one is right where that means the same and the token was sampled from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from capture.engines import default_logprobs, tool_grammar
from capture.engines.meaning import APPLIED, LOGITS, NOT_APPLIED, PROBE, LogprobMeaning
from train.tokens.sampling import PLAIN_REQUEST, UNKNOWN, certain


def ratio_ready(captured: Mapping[str, Any], temperature: float) -> str | None:
    """None where a trainer that divides its logits by `temperature` (1.0: does not divide), and cuts nothing, may build
    ratios on a record of the rollout stream, or on one call of it; otherwise a sentence that says why not.

    llama.cpp's tool grammar is no reason: its logprobs are those before it, so ratios begin at 1.
    """
    if "segments" not in captured:
        return _why_not(captured, temperature)
    for call in _trained(captured):
        if (why := _why_not(call, temperature)) is not None:
            return f"call {call['index']}: {why}"
    return None


def _trained(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    trained = {span["call"] for segment in record["segments"] if segment["trainable"] for span in segment["call_spans"]}
    return (call for call in record["calls"] if call["index"] in trained)


def _why_not(call: Mapping[str, Any], temperature: float) -> str | None:
    recorded = call.get("logprobs")
    meaning = default_logprobs(call.get("provider")) if recorded is None else LogprobMeaning.from_json(recorded)
    if meaning.values == LOGITS:
        return "its logprobs are logits; start vLLM with --logprobs-mode raw_logprobs, or with processed_logprobs"
    sampled = _temperature(call)
    if sampled is None:
        return (
            "its temperature is not known (it was not sent, and the engine does not say its default); send "
            f"temperature {temperature:g}"
        )
    if not math.isclose(sampled, temperature):
        return (
            f"it was sampled at temperature {sampled:g}, and the trainer divides its logits by {temperature:g}; set "
            "both to the same"
        )
    if sampled != 1 and meaning.temperature != APPLIED:
        return f"it was sampled at temperature {sampled:g}, and {_without_temperature(meaning)}"
    grammar = tool_grammar(call.get("provider"))
    words = [why for why in call.get("not_plain") or () if why != grammar and why.partition(" ")[0] != "temperature"]
    if known := certain(words):
        return (
            f"it was sampled with {', '.join(known)}, which the trainer's own logprobs do not have; sample with "
            f"{PLAIN_REQUEST}, the temperature as you need it"
        )
    if words:
        names = ", ".join(word.removesuffix(UNKNOWN) for word in words)
        return (
            f"the engine's own {names} may have cut the distribution (not sent, and the engine does not say its "
            f"default); send {PLAIN_REQUEST}, the temperature as you need it"
        )
    return None


def _without_temperature(meaning: LogprobMeaning) -> str:
    change = (
        "sample at temperature 1, or serve with an engine whose logprobs have it applied (SGLang, or vLLM with "
        "--logprobs-mode processed_logprobs)"
    )
    if meaning.temperature == NOT_APPLIED:
        measured = "as measured" if meaning.source == PROBE else "by its engine's default"
        return f"its logprobs are those at temperature 1 ({measured}); {change}"
    return f"whether its logprobs have that applied is not known; {change}"


def _temperature(call: Mapping[str, Any]) -> float | None:
    sampling = call.get("sampling") or {}
    value = (sampling.get("sent") or {}).get("temperature")
    if value is None:
        value = (sampling.get("engine_defaults") or {}).get("temperature")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
