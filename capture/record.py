"""`benchflow.token_capture.v1`: the ids and logprobs of one call, or the reason why some are missing."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from capture.errors import RecordError
from capture.token_ids import Ids as Ids
from capture.token_ids import are_ids as are_ids

SCHEMA_VERSION: Final = "benchflow.token_capture.v1"

#: BenchFlow's four reasons; the finer cause stands in `code`.
REASONS: Final = frozenset({"provider_api_unsupported", "not_requested", "not_returned", "request_failed"})

#: The three fields that are captured for every choice, or named in `unavailable`.
FIELDS: Final = ("prompt_token_ids", "completion_token_ids", "logprobs")

#: Engines clamp a logprob of minus infinity, and one they do not have, to -9999.0 (vLLM 0.32, `protocol.py`).
CLAMPED: Final = -9999.0
#: A probability of 1 may come out of an engine's rounding as a logprob this far above 0.
ROUNDING: Final = 1e-4
#: How far the probabilities of a token's alternatives may sum above 1 by rounding.
SUM_ROUNDING: Final = 1e-2


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why one field is not captured: BenchFlow's `reason`, our finer `code`, and a `detail` that says what to do."""

    reason: str
    code: str
    detail: str

    def to_json(self) -> dict[str, str]:
        return {"reason": self.reason, "code": self.code, "detail": self.detail}


@dataclass(frozen=True, slots=True)
class Completion:
    """One choice: `token_ids` as sampled (a stop token included), and one finite natural-log probability per id.

    `tokens` is the engine's own text of each id. `top_logprobs` holds, per id, the alternatives that were asked for.
    `prompt_token_ids` is set only where one call had several prompts.
    """

    index: int
    token_ids: Ids | None
    tokens: list[str] | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[Any] | None = None
    prompt_token_ids: Ids | None = None

    @property
    def complete(self) -> bool:
        """Ids and logprobs are here, one logprob per id. A choice of no ids is complete with no logprobs."""
        return (
            self.token_ids is not None
            and self.logprobs is not None
            and len(self.token_ids) == len(self.logprobs)
            and are_logprobs(self.logprobs)
            and (not isinstance(self.top_logprobs, list) or are_alternatives(self.top_logprobs))
        )

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "index": self.index,
            "token_ids": None if self.token_ids is None else self.token_ids.json(),
            "tokens": self.tokens,
            "logprobs": self.logprobs,
        }
        if self.top_logprobs is not None:
            row["top_logprobs"] = self.top_logprobs
        if self.prompt_token_ids is not None:
            row["prompt_token_ids"] = self.prompt_token_ids.json()
        return row


def is_logprob(value: object) -> bool:
    """Whether it is the natural log of a probability: a number that is not clamped, NaN or infinite, nor above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and CLAMPED < value <= ROUNDING


def are_logprobs(values: Sequence[object]) -> bool:
    """Whether `is_logprob` holds for each of them, at C speed where all are numbers."""
    if not set(map(type, values)) <= {float, int}:
        return all(is_logprob(value) for value in values)
    numbers: Sequence[float] = values  # type: ignore[assignment]
    # NaN compares as neither larger nor smaller: only a sum shows it.
    return not numbers or (min(numbers) > CLAMPED and max(numbers) <= ROUNDING and not math.isnan(sum(numbers, 0.0)))


def are_alternatives(top_logprobs: Sequence[object]) -> bool:
    """Whether the alternatives of each token, `[[{"token", "logprob"}, ...], ...]`, can be of one distribution: their
    probabilities sum to 1 at most, those of logits (vLLM's `raw_logits` mode) to more. What is no number is left out.
    """
    for alternatives in top_logprobs:
        total = 0.0
        for row in alternatives if isinstance(alternatives, list) else ():
            value = row.get("logprob") if isinstance(row, dict) else None
            if isinstance(value, int | float) and not isinstance(value, bool):
                if value > ROUNDING:
                    return False
                total += math.exp(value)
        if total > 1 + SUM_ROUNDING:
            return False
    return True


@dataclass(frozen=True, slots=True)
class TokenCapture:
    """What the engine of one call was given as prompt and what it sampled.

    Build it with `TokenCapture.of`, which holds the invariant: each of `FIELDS` is captured for every choice, or named
    in `unavailable`. `complete` is true only when `unavailable` is empty.
    """

    wire: str
    provider: str | None
    requested: dict[str, Any]
    prompt_token_ids: Ids | None
    completions: list[Completion]
    unavailable: dict[str, Unavailable] = field(default_factory=dict)
    digest: str | None = None

    @classmethod
    def of(
        cls,
        *,
        wire: str,
        provider: str | None,
        requested: dict[str, Any],
        prompt_token_ids: Ids | None,
        completions: list[Completion],
        unavailable: dict[str, Unavailable],
    ) -> TokenCapture:
        """A capture that holds the invariant: a missing field without a reason gets one here."""
        missing = _explained(prompt_token_ids, completions, dict(unavailable))
        digest = None
        if prompt_token_ids is not None and completions and not missing:
            digest = _digest(prompt_token_ids, completions)
        return cls(wire, provider, requested, prompt_token_ids, completions, missing, digest)

    @property
    def complete(self) -> bool:
        return not self.unavailable and bool(self.completions)

    def compute_digest(self) -> str | None:
        """`sha256:<hex>` over the compact JSON of prompt ids, then index, ids and logprobs of each choice."""
        if self.prompt_token_ids is None or not all(c.complete for c in self.completions):
            return None
        return _digest(self.prompt_token_ids, self.completions)

    def to_json(self) -> dict[str, Any]:
        """A dict for `orjson.dumps`; ids are `orjson.Fragment`s."""
        row: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "wire": self.wire,
            "provider": self.provider,
            "requested": self.requested,
            "prompt_token_ids": None if self.prompt_token_ids is None else self.prompt_token_ids.json(),
            "completions": [c.to_json() for c in self.completions],
            "unavailable": {name: why.to_json() for name, why in self.unavailable.items()},
        }
        if self.digest is not None:
            row["digest"] = self.digest
        return row

    @classmethod
    def from_json(cls, value: object) -> TokenCapture:
        """Reads a stored capture, ours or BenchFlow's (which may have no `wire`, `tokens` or `code`).

        What is stored is checked: a field that is missing without a reason is named in `unavailable`. Raises
        `RecordError` where the value is not a capture at all.
        """
        if not isinstance(value, dict):
            raise RecordError("token_capture is not a JSON object")
        version = value.get("schema_version")
        if version != SCHEMA_VERSION:
            raise RecordError(f"token_capture has schema_version {version!r}; this version reads {SCHEMA_VERSION!r}")
        rows = value.get("completions") or []
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise RecordError("token_capture.completions is not a list of objects")
        return cls.read(
            wire=value.get("wire"),
            provider=value.get("provider"),
            requested=value.get("requested"),
            prompt_token_ids=Ids.from_json(value.get("prompt_token_ids")),
            completions=[_completion(position, row) for position, row in enumerate(rows)],
            unavailable=value.get("unavailable"),
            digest=value.get("digest"),
        )

    @classmethod
    def read(
        cls,
        *,
        wire: object,
        provider: object,
        requested: object,
        prompt_token_ids: Ids | None,
        completions: list[Completion],
        unavailable: object,
        digest: object,
    ) -> TokenCapture:
        """A capture from the parts of a stored one; the stored digest is kept, not computed again."""
        codes = unavailable if unavailable is not None else {}
        if not isinstance(codes, dict):
            raise RecordError("token_capture.unavailable is not an object")
        missing = _explained(
            prompt_token_ids, completions, {str(name): _unavailable(why) for name, why in codes.items()}
        )
        return cls(
            wire=wire if isinstance(wire, str) else "openai-chat",
            provider=provider if isinstance(provider, str) else None,
            requested=requested if isinstance(requested, dict) else {},
            prompt_token_ids=prompt_token_ids,
            completions=completions,
            unavailable=missing,
            digest=digest if isinstance(digest, str) else None,
        )


def _explained(
    prompt_token_ids: Ids | None, completions: list[Completion], missing: dict[str, Unavailable]
) -> dict[str, Unavailable]:
    """`missing`, with a reason for each of `FIELDS` that is not captured for every choice and has none yet."""
    if prompt_token_ids is not None and completions and all(choice.complete for choice in completions):
        return missing
    several = bool(completions) and all(c.prompt_token_ids is not None for c in completions)
    if prompt_token_ids is None and not several:
        missing.setdefault("prompt_token_ids", _not_returned("no_prompt_ids", "prompt ids"))
    if not completions or any(c.token_ids is None for c in completions):
        missing.setdefault("completion_token_ids", _not_returned("no_completion_ids", "sampled ids"))
    if not completions or any(c.logprobs is None for c in completions):
        missing.setdefault("logprobs", _not_returned("no_logprobs", "logprobs"))
    elif "logprobs" not in missing and not all(c.complete or c.token_ids is None for c in completions):
        missing["logprobs"] = Unavailable(
            "not_returned",
            "count_mismatch_ids_logprobs",
            "there is not one logprob (finite, not above 0) per sampled id; upgrade the engine, start it with "
            "--logprobs-mode raw_logprobs (vLLM), or start the proxy with --buffered",
        )
    return missing


def _digest(prompt: Ids, completions: list[Completion]) -> str:
    """`compute_digest` of choices that are complete."""
    digest = hashlib.sha256(b'{"prompt_token_ids":[' + prompt.text)
    digest.update(b'],"completions":[' + b",".join(map(_choice, completions)) + b"]}")
    return "sha256:" + digest.hexdigest()


def _choice(choice: Completion) -> bytes:
    assert choice.token_ids is not None and choice.logprobs is not None
    return b'{"index":%d,"token_ids":[%s],"logprobs":[%s]}' % (
        choice.index,
        choice.token_ids.text,
        _floats(choice.logprobs),
    )


def _floats(values: list[float]) -> bytes:
    """Floats with commas between them, as Python's json writes them (repr), BenchFlow's rule.

    orjson finds the same digits in a tenth of the time; where they have an exponent the two write them differently.
    """
    numbers = list(map(float, values))
    texts = orjson.dumps(numbers)[1:-1].split(b",")
    for place, number in enumerate(numbers):
        if -1e-4 < number < 1e-4 or number >= 1e15:
            texts[place] = repr(number).encode()
    return b",".join(texts)


def _completion(position: int, row: dict[str, Any]) -> Completion:
    logprobs = row.get("logprobs")
    index = row.get("index")
    return Completion(
        index=index if isinstance(index, int) else position,
        token_ids=Ids.from_json(row.get("token_ids")),
        tokens=row.get("tokens"),
        logprobs=logprobs if isinstance(logprobs, list) else None,
        top_logprobs=row.get("top_logprobs"),
        prompt_token_ids=Ids.from_json(row.get("prompt_token_ids")),
    )


def _unavailable(why: object) -> Unavailable:
    if isinstance(why, str):
        return Unavailable(why, why, "")
    row = why if isinstance(why, dict) else {}
    reason = str(row.get("reason") or "not_returned")
    return Unavailable(reason, str(row.get("code") or reason), str(row.get("detail") or ""))


def _not_returned(code: str, what: str) -> Unavailable:
    return Unavailable(
        "not_returned", code, f"the engine's answer held no {what}; check the engine's version, or try --buffered"
    )
