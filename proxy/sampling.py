"""Which request fields shape what is sampled, and the defaults for them that `--sampling` gives."""

from __future__ import annotations

import json
from collections.abc import Iterable
from difflib import get_close_matches

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


def misspelt_sampling(names: Iterable[str]) -> str | None:
    """A sentence about the first name that is nearly one of `SAMPLING`: engines pass over a field they do not know.

    Other names are an engine's own, and go on as they are.
    """
    for name in names:
        close = get_close_matches(name.lower().replace("-", "_"), SAMPLING, 1, cutoff=0.85)
        if close and name not in SAMPLING:
            return f"--sampling {name}: no engine knows it; did you mean {close[0]}?"
    return None


def read_sampling(words: Iterable[str]) -> dict[str, object]:
    """The sampling defaults of `--sampling` options, each a JSON object or `NAME=VALUE`.

    A value is JSON where it can be read as JSON, text otherwise. Raises `SettingsError`.
    """
    values: dict[str, object] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if word.lstrip()[:1] in ("{", "["):
            values |= _json_object(word)
        elif not name or not equals:
            raise SettingsError(f"--sampling {word}: give NAME=VALUE, such as temperature=1.0")
        else:
            try:
                values[name] = json.loads(text)
            except ValueError:
                values[name] = text
    if (sentence := misspelt_sampling(values)) is not None:
        raise SettingsError(sentence)
    return values


def _json_object(word: str) -> dict[str, object]:
    try:
        value = json.loads(word)
    except ValueError as error:
        raise SettingsError(f"--sampling is not JSON ({error}): {word}") from error
    if not isinstance(value, dict):
        raise SettingsError('--sampling must be a JSON object, such as {"temperature": 1.0}')
    return value
