"""How a call was sampled, and whether that is the plain policy: temperature 1, nothing cut, penalized or constrained.

A trainer takes the recorded logprob as the log probability with which the policy chose the token. That holds for plain
sampling, so everything else is reported, and so are defaults that the log does not record. A temperature is no bias
where the engine's logprobs have it applied (`capture.engines.meaning`) and the trainer divides by the same one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import orjson

from capture.engines import default_logprobs, tool_grammar
from capture.engines.grammars import FIELDS as GRAMMAR_FIELDS
from capture.engines.grammars import grammars
from capture.engines.meaning import APPLIED, NOT_APPLIED, NOTHING, PROBE, LogprobMeaning
from capture.journal.call import Call

#: Parameters and the values at which they change nothing. None of them may be unknown for sampling to be plain.
_MUST_BE_KNOWN: Final[dict[str, tuple[float, ...]]] = {
    "temperature": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
}
#: Parameters that are off in every engine unless they are sent.
_OFF: Final[dict[str, tuple[float, ...]]] = {
    "typical_p": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,),
    "repeat_penalty": (1,), "min_tokens": (0,), "mirostat": (0,), "dynatemp_range": (0,), "dry_multiplier": (0,),
    "xtc_probability": (0,), "top_n_sigma": (0, -1),
}  # fmt: skip
_LISTS: Final = ("logit_bias", "bad_words", "allowed_token_ids")
#: The fields of a request that are read where the writer of the log did not record the sampling.
FIELDS: Final = (
    *_MUST_BE_KNOWN,
    *_OFF,
    *_LISTS,
    *GRAMMAR_FIELDS,
    "response_format",
    "tool_choice",
    "use_beam_search",
    "seed",
)

#: Ends the word of a parameter that was not sent and whose default in the engine is not in the log.
UNKNOWN: Final = " unknown"
TRUNCATION: Final = ("top_p", "top_k", "min_p")
PLAIN_REQUEST: Final = '{"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0}'


def sentence(why: Sequence[str], meaning: LogprobMeaning = NOTHING) -> str:
    """For a person training with importance ratios; `why` as `biasing` gives it."""
    known = certain(why)
    unknown = [word.removesuffix(UNKNOWN) for word in why if word.endswith(UNKNOWN)]
    parameters = [_and(known)] if known else []
    if unknown:
        parameters.append(f"the engine's own {_and(unknown)} (not sent, and not in the log)")
    are_not = "the tokens were not sampled from the plain policy, so"
    may_not = "the tokens may not have been sampled from the plain policy; where they were not,"
    so = (
        f"{are_not if known else may_not} the recorded logprobs are not those of the sampled distribution, "
        "and importance ratios built on them are biased"
    )
    change = (
        f"sample plainly (--sampling '{PLAIN_REQUEST}' of bench run or bench proxy), or correct for it in the trainer"
    )
    if why and all("grammar" in word for word in why):
        change = "correct for it in the trainer: --sampling cannot remove a grammar"
    return f"sampled with {' and with '.join(parameters)}{_in_logprobs(known, meaning)}: {so}; {change}"


def _in_logprobs(known: Sequence[str], meaning: LogprobMeaning) -> str:
    """What of these parameters is in the logprobs, in brackets; "" where that is not known."""
    found = []
    if any(_names(word, ("temperature",)) for word in known) and meaning.temperature == NOT_APPLIED:
        found.append("temperature")
    if any(_names(word, TRUNCATION) for word in known):
        if meaning.truncation == APPLIED:
            return " (the engine's logprobs are those after the cut: right only for a trainer that cuts alike)"
        if meaning.truncation == NOT_APPLIED:
            found.append("the cut")
    if not found:
        return ""
    are = "is" if len(found) == 1 else "are"
    measured = "as measured" if meaning.source == PROBE else "by the engine's default"
    return f" ({_and(found)} {are} not in the engine's logprobs, {measured})"


def temperature_sentence(words: Sequence[str]) -> str:
    """For a person, about temperatures that the logprobs have applied; `words` such as `temperature 0.7`."""
    values = _and([word.partition(" ")[2] for word in words])
    text = f"sampled with temperature {values}, which the engine's logprobs have applied: importance ratios are right"
    if len(words) > 1:
        return f"{text} only where the trainer divides its logits by the temperature of the call"
    return f"{text} for a trainer that divides its logits by {values} too, and biased for one that does not"


def biasing(why: Sequence[str], meaning: LogprobMeaning) -> list[str]:
    """Those of `not_plain`'s words that bias ratios whatever the trainer's temperature: all but a temperature that the
    logprobs have applied.
    """
    return [word for word in why if not is_applied(word, meaning)]


def is_applied(word: str, meaning: LogprobMeaning) -> bool:
    """Whether one of `not_plain`'s words is a temperature that the logprobs have applied. At 0 no engine applies it."""
    return meaning.temperature == APPLIED and (temperature_in(word) or 0.0) > 0


def temperature_in(word: str) -> float | None:
    """The temperature that one of `not_plain`'s words names; None where it names another parameter, or no number."""
    name, _, value = word.partition(" ")
    try:
        return float(value) if name == "temperature" else None
    except ValueError:
        return None


def _names(word: str, parameters: Sequence[str]) -> bool:
    return word.partition(" ")[0] in parameters


def meaning_of(call: Call) -> LogprobMeaning:
    """What the logprobs of a call mean: as recorded, else as its engine is started by default."""
    recorded = call.metadata.get("logprobs")
    return default_logprobs(call.engine) if recorded is None else LogprobMeaning.from_json(recorded)


def certain(why: Sequence[str]) -> list[str]:
    """Those of `not_plain`'s words that are known to bias logprobs; the others may."""
    return [word for word in why if not word.endswith(UNKNOWN)]


def not_plain(call: Call) -> list[str]:
    """Why the sampling of a call was not plain, in words; empty where it was."""
    sampling = sampling_of(call)
    found = list(_words(orjson.dumps([sampling["sent"], sampling["engine_defaults"] or {}], default=str)))
    grammar = tool_grammar(call.engine)
    if grammar is not None and sampling["sent"].get("tool_choice") != "none" and call.offers_tools:
        found.insert(0, grammar)
    return found


@lru_cache(maxsize=1024)
def _words(sampling: bytes) -> tuple[str, ...]:
    """From the JSON of what was sent and the engine's defaults, which is mostly the same for all calls of a rollout."""
    sent, defaults = orjson.loads(sampling)
    found: list[str] = []
    unknown: list[str] = []
    for name, harmless in _MUST_BE_KNOWN.items():
        value = sent.get(name, defaults.get(name))
        if value is None:
            unknown.append(name)
        elif not _is(value, harmless):
            found.append(f"{name} {_short(value)}")
    for name, harmless in _OFF.items():
        value = sent.get(name, defaults.get(name))
        if value is not None and not _is(value, harmless):
            found.append(f"{name} {_short(value)}")
    found += [name for name in _LISTS if sent.get(name)]
    found += grammars(sent)
    if sent.get("use_beam_search"):
        found.append("beam search")
    return (*found, *(f"{name}{UNKNOWN}" for name in unknown))


def sampling_of(call: Call) -> dict[str, Any]:
    """`{"sent", "session", "engine_defaults"}`: the parameters that were sent (the agent's and the session's), those of
    the session alone, and the engine's defaults where they are known. `sent` is read from the request where the log's
    writer did not record it.
    """
    recorded = call.metadata.get("sampling")
    recorded = recorded if isinstance(recorded, Mapping) else {}
    sent = recorded.get("sent")
    if not isinstance(sent, Mapping):
        body = call.metadata.get("chat_request")
        body = body if isinstance(body, Mapping) else call.request_body
        sent = {name: body[name] for name in FIELDS if body.get(name) is not None}
    session, defaults = recorded.get("session"), recorded.get("engine_defaults")
    return {
        "sent": dict(sent),
        "session": dict(session) if isinstance(session, Mapping) else {},
        "engine_defaults": dict(defaults) if isinstance(defaults, Mapping) else None,
    }


def _is(value: Any, harmless: tuple[float, ...]) -> bool:
    return isinstance(value, int | float) and value in harmless


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)[:20]


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
