"""Which request fields shape what is sampled, and whether a name is a misspelling of one of them."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

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
