"""What an engine's logprobs mean: whether temperature and truncation are in them, or whether they are logits.

With plain sampling (temperature 1, nothing cut) all engines agree. Elsewhere a trainer that computes the logprobs again
has to know. `measure` finds out from outside, by three calls of one token with the same prompt.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from capture.engines.request import FollowUp
from capture.record import CLAMPED, ROUNDING, SUM_ROUNDING

APPLIED, NOT_APPLIED, UNKNOWN = "applied", "not_applied", "unknown"
LOGPROBS, LOGITS = "logprobs", "logits"
PROBE, ENGINE_DEFAULT = "probe", "engine default"


@dataclass(frozen=True, slots=True)
class LogprobMeaning:
    """`temperature` and `truncation` (top_k, top_p, min_p): `applied`, `not_applied` or `unknown`.

    `values`: `logprobs`, `logits`, or `unknown`. `source`: `probe` (measured), `engine default` (by the engine's name),
    or `unknown`.
    """

    temperature: str = UNKNOWN
    truncation: str = UNKNOWN
    values: str = UNKNOWN
    source: str = UNKNOWN

    def to_json(self) -> dict[str, str]:
        return {
            "temperature": self.temperature,
            "truncation": self.truncation,
            "values": self.values,
            "source": self.source,
        }

    @classmethod
    def from_json(cls, value: object) -> LogprobMeaning:
        """Reads what a record says; `unknown` for what it does not say, or in words that nobody knows."""
        given = value if isinstance(value, Mapping) else {}
        return cls(
            _word(given.get("temperature"), APPLIED, NOT_APPLIED),
            _word(given.get("truncation"), APPLIED, NOT_APPLIED),
            _word(given.get("values"), LOGPROBS, LOGITS),
            _word(given.get("source"), PROBE, ENGINE_DEFAULT),
        )

    def agrees(self, other: LogprobMeaning) -> bool:
        """Whether both mean the same, wherever that is known from."""
        return (self.temperature, self.truncation, self.values) == (other.temperature, other.truncation, other.values)

    def __str__(self) -> str:
        if self.values == LOGITS:
            return "logits in place of logprobs"
        default = " (its default, not measured)" if self.source == ENGINE_DEFAULT else ""
        return f"temperature {_spaced(self.temperature)}, truncation {_spaced(self.truncation)}{default}"


#: For an engine of which nothing is known.
NOTHING: Final = LogprobMeaning()

#: Alternatives asked for. More than `TOP_K`, so that some are cut, and no more than any engine allows by default.
ALTERNATIVES: Final = 5
TOP_K: Final = 2
#: No model has more tokens: N alternatives that are the most probable ones hold more than N of this many parts.
VOCABULARY: Final = 1_000_000
#: Alternatives whose logprobs are all closer than this (nats) say nothing about temperature.
SPREAD: Final = 0.1
_CHAT: Final = "/v1/chat/completions"


def measure(model: str) -> Generator[FollowUp, Any, LogprobMeaning | None]:
    """Calls of one token, each `(path, body)`; the JSON answer to each is sent back in, None where there was none.

    Returns None where the engine refuses such calls or gives no alternatives.
    """
    plain = _alternatives((yield _CHAT, _body(model)))
    if len(plain) < 2:
        return None
    hot = _alternatives((yield _CHAT, _body(model, temperature=2)))
    cut = _alternatives((yield _CHAT, _body(model, top_k=TOP_K)))
    return LogprobMeaning(_temperature(plain, hot), _truncation(plain, cut), _values(plain), PROBE)


def _body(model: str, **sampling: float) -> dict[str, Any]:
    plain = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0}
    return {
        "model": model,
        "messages": [{"role": "user", "content": "Name any word."}],
        "max_tokens": 1,
        "logprobs": True,
        "top_logprobs": ALTERNATIVES,
        **plain,
        **sampling,
    }


def _alternatives(answer: Any) -> dict[Any, float]:
    """The logprob of each alternative of the first token, the most probable first; without tokens spelled the same."""
    try:
        rows = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        pairs = [(str(row.get("id")), row["token"], str(row.get("bytes")), float(row["logprob"])) for row in rows]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return {}
    names = [pair[:3] for pair in pairs]
    found = {pair[:3]: pair[3] for pair in pairs if names.count(pair[:3]) == 1 and _finite(pair[3])}
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def _finite(value: float) -> bool:
    return math.isfinite(value) and value > CLAMPED


def _temperature(plain: Mapping[Any, float], hot: Mapping[Any, float]) -> str:
    """At temperature 2 the distances between logprobs are half of what they were, or what they were."""
    top = next(iter(plain))
    if top not in hot:
        return UNKNOWN
    pairs = [(plain[name] - plain[top], hot[name] - hot[top]) for name in plain if name in hot]
    spread = math.fsum(before * before for before, _ in pairs)
    if spread < SPREAD * SPREAD:
        return UNKNOWN
    slope = math.fsum(before * after for before, after in pairs) / spread
    if abs(slope - 1) < 0.15:
        return NOT_APPLIED
    return APPLIED if abs(slope - 0.5) < 0.15 else UNKNOWN


def _truncation(plain: Mapping[Any, float], cut: Mapping[Any, float]) -> str:
    """Whether the tokens that top_k excludes have lost their probability."""
    excluded = list(plain)[TOP_K:]
    if not excluded or not cut:
        return UNKNOWN
    return NOT_APPLIED if any(name in cut for name in excluded) else APPLIED


def _values(plain: Mapping[Any, float]) -> str:
    """Logits are above 0, or their exponentials are not the share that the most probable tokens have."""
    total = math.fsum(math.exp(min(value, 700.0)) for value in plain.values())
    above = max(plain.values()) > ROUNDING or total > 1 + SUM_ROUNDING
    return LOGITS if above or total < len(plain) / VOCABULARY else LOGPROBS


def _word(value: object, *known: str) -> str:
    return value if isinstance(value, str) and value in known else UNKNOWN


def _spaced(word: str) -> str:
    return word.replace("_", " ")
