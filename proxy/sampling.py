"""Which request fields shape what is sampled, the values that a session gives them, and how long a reply may be."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from proxy.errors import SettingsError

#: Request fields that shape what is sampled; kept in the record as they were sent.
SAMPLING = frozenset((
    "temperature", "top_p", "top_k", "min_p", "typical_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "repeat_penalty", "logit_bias", "seed", "n", "best_of", "use_beam_search", "max_tokens",
    "max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output",
    "bad_words", "allowed_token_ids", "response_format", "structured_outputs", "guided_json", "guided_regex",
    "guided_choice", "guided_grammar", "regex", "ebnf", "json_schema", "grammar", "tool_choice",
    "parallel_tool_calls", "include_reasoning", "chat_template_kwargs", "reasoning_effort",
    "mirostat", "dynatemp_range", "dry_multiplier", "xtc_probability", "top_n_sigma", "samplers",
))  # fmt: skip

#: The fields that bound a reply's length, all of which an engine may read; `n_predict` is llama.cpp's.
LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")
#: What the completions API samples where a request does not say (vLLM and SGLang follow it).
COMPLETION_TOKENS = 16
#: Request fields that say what is asked, not how it is sampled: they cannot be forced.
_NOT_FORCED = frozenset((
    "messages", "prompt", "model", "stream", "stream_options", "tools", "functions", "logprobs", "top_logprobs",
    "return_token_ids", "prompt_token_ids", "input_ids", "return_tokens_as_token_ids", "prompt_logprobs", "echo",
    "n_probs", "post_sampling_probs", "return_tokens",
))  # fmt: skip
#: What a number may be, least and most, where every engine refuses others. A number of tokens, choices or so is whole.
_NUMBERS = {
    "temperature": (0.0, math.inf), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "typical_p": (0.0, 1.0),
    "presence_penalty": (-math.inf, math.inf), "frequency_penalty": (-math.inf, math.inf),
    "repetition_penalty": (0.0, math.inf), "repeat_penalty": (0.0, math.inf),
}  # fmt: skip
_WHOLE_NUMBERS = {
    "top_k": (-1, math.inf), "n": (1, math.inf), "best_of": (1, math.inf), "seed": (-math.inf, math.inf),
    "max_tokens": (-1, math.inf), "max_completion_tokens": (-1, math.inf), "n_predict": (-1, math.inf),
    "min_tokens": (0, math.inf),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class OutputCap:
    """A call's length as the agent `asked` for it (None: it did not say) and as it was `sent`, `by` which option."""

    asked: int | None
    sent: int
    by: str

    def to_json(self) -> dict[str, Any]:
        return {"asked": self.asked, "sent": self.sent, "by": self.by}


def output_limit(body: Mapping[str, Any]) -> int | None:
    """The tokens that a chat or completions request lets each choice sample; None where nothing bounds them."""
    asked = [limit for name in LIMITS if (limit := _tokens(body.get(name))) is not None and limit >= 0]
    if asked:
        return min(asked)
    return COMPLETION_TOKENS if "prompt" in body and "messages" not in body else None


def cap_output(body: dict[str, Any], most: int, by: str) -> OutputCap | None:
    """Lowers what `body` asks for to `most`, in place; None where it asked for no more.

    llama.cpp takes a negative number for no limit. A value that is not a number is for the engine to refuse.
    """
    asked = output_limit(body)
    if asked is not None and asked <= most:
        return None
    named = [name for name in LIMITS if body.get(name) is not None]
    for name in named:
        limit = _tokens(body[name])
        if limit is not None and not 0 <= limit <= most:
            body[name] = most
    if not named:
        body["max_tokens"] = most  # the name that every engine knows
    return OutputCap(asked, most, by)


def force(body: dict[str, Any], forced: Mapping[str, Any]) -> None:
    """Sets the `forced` values in place of the agent's; one bound of a reply's length replaces the others."""
    if any(name in forced for name in LIMITS):
        for name in LIMITS:
            body.pop(name, None)
    body.update(forced)


def choices_of(body: Mapping[str, Any]) -> int:
    """How many choices a request samples at once: `n`, for each of its prompts."""
    prompts, count = body.get("prompt"), _tokens(body.get("n"))
    several = len(prompts) if isinstance(prompts, list) and not all(isinstance(token, int) for token in prompts) else 1
    return max(1, count or 1) * max(1, several)


def _tokens(value: object) -> int | None:
    """A number as engines read it (pydantic also takes "5" and 5.0); None for anything else."""
    if type(value) is int:
        return value
    try:
        return int(float(value)) if isinstance(value, int | float | str) else None
    except (ValueError, OverflowError):
        return None


def check_forced(forced: Mapping[str, Any]) -> None:
    """Raises `SettingsError` for what cannot be forced."""
    for name in forced:
        if name in _NOT_FORCED:
            raise SettingsError(f"--force-sampling {name}: it does not shape how tokens are sampled; leave it out")
    _check_numbers(forced, _NUMBERS, (int, float), "a number")
    _check_numbers(forced, _WHOLE_NUMBERS, (int,), "a whole number")
    if (sentence := misspelt_sampling(forced, "--force-sampling")) is not None:
        raise SettingsError(sentence)


def _check_numbers(
    forced: Mapping[str, Any], bounds: Mapping[str, tuple[float, float]], types: tuple[type, ...], what: str
) -> None:
    """With a value that no engine takes, each call of a session would fail. Null leaves it to the engine."""
    for name, (least, most) in bounds.items():
        value = forced.get(name)
        if value is None or (type(value) in types and least <= value <= most and value not in (-math.inf, math.inf)):
            continue
        within = (
            ""
            if math.isinf(least)
            else f" of at least {least:g}"
            if math.isinf(most)
            else f" from {least:g} to {most:g}"
        )
        raise SettingsError(f"--force-sampling {name}: give {what}{within}, not {value!r}")


def misspelt_sampling(names: Iterable[str], option: str = "--sampling") -> str | None:
    """A sentence about the first name that is nearly one of `SAMPLING`: engines pass over a field they do not know.

    Other names are an engine's own, and are sent as they are.
    """
    for name in names:
        close = get_close_matches(name.lower().replace("-", "_"), SAMPLING, 1, cutoff=0.85)
        if close and name not in SAMPLING:
            return f"{option} {name}: no engine knows it; did you mean {close[0]}?"
    return None


def read_sampling(words: Iterable[str], option: str = "--sampling") -> dict[str, object]:
    """The sampling of `--sampling` or `--force-sampling` options, each a JSON object or `NAME=VALUE`.

    A value is JSON where it can be read as JSON, text otherwise. Raises `SettingsError`.
    """
    values: dict[str, object] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if word.lstrip()[:1] in ("{", "["):
            values |= _json_object(word, option)
        elif not name or not equals:
            raise SettingsError(f"{option} {word}: give NAME=VALUE, such as temperature=1.0")
        else:
            try:
                values[name] = json.loads(text)
            except ValueError:
                values[name] = text
    if (sentence := misspelt_sampling(values, option)) is not None:
        raise SettingsError(sentence)
    return values


def _json_object(word: str, option: str) -> dict[str, object]:
    try:
        value = json.loads(word)
    except ValueError as error:
        raise SettingsError(f"{option} is not JSON ({error}): {word}") from error
    if not isinstance(value, dict):
        raise SettingsError(f'{option} must be a JSON object, such as {{"temperature": 1.0}}')
    return value
