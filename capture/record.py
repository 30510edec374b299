"""`benchflow.token_capture.v1`: the ids and logprobs of one call, or the reason why they are not all here.

Ids stay in the compact JSON text they came in (`Ids`) until somebody needs numbers, so that a prompt of 100,000 ids is
copied from the engine's answer to the journal, and compared with the call before it, without being parsed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, overload

import orjson

from capture.errors import RecordError

SCHEMA_VERSION: Final = "benchflow.token_capture.v1"

#: BenchFlow's four reasons; the finer cause stands in `code`.
REASONS: Final = frozenset({"provider_api_unsupported", "not_requested", "not_returned", "request_failed"})

#: The three fields that are captured for every choice, or named in `unavailable`.
FIELDS: Final = ("prompt_token_ids", "completion_token_ids", "logprobs")

#: Engines clamp a logprob of minus infinity, and one they do not have, to -9999.0 (vLLM 0.32, `protocol.py`).
CLAMPED: Final = -9999.0

_DIGITS: Final = b"0123456789"
_ZERO_THEN_DIGIT: Final = re.compile(rb",0[0-9]")
#: Twice as fast as `b",," in text`, for which every comma is a candidate.
_NOTHING_BETWEEN: Final = re.compile(rb",,")
_SPACE: Final = b" \t\r\n"


class Ids(Sequence[int]):
    """Token ids: non-negative ints, kept as compact JSON text (`b"1,2,3"`), parsed when a number is asked for."""

    __slots__ = ("_count", "_list", "text")

    def __init__(self, text: bytes, values: list[int] | None = None) -> None:
        """`text` must be what `Ids.of` or `Ids.parse` would have made; use those."""
        self.text = text
        self._list = values
        self._count = len(values) if values is not None else -1

    @classmethod
    def of(cls, values: Iterable[int]) -> Ids:
        """Ids from ints; raises `RecordError` for a bool, a float or a negative number."""
        held = list(values)
        if not are_ids(held):
            for value in held:
                if type(value) is not int or value < 0:
                    raise RecordError(f"a token id must be a non-negative integer, not {value!r}")
        return cls(orjson.dumps(held)[1:-1], held)

    @classmethod
    def parse(cls, array: bytes) -> Ids | None:
        """Ids from the bytes of a JSON array, or None when it holds anything but non-negative ints.

        Checked with a few passes at C speed: 100,000 ids take well under a millisecond.
        """
        return cls.parse_text(array[1:-1]) if array[:1] == b"[" and array[-1:] == b"]" else None

    @classmethod
    def parse_text(cls, text: bytes) -> Ids | None:
        """`parse` of what stands between the brackets."""
        bones = text.translate(None, _DIGITS)
        if bones != b"," * len(bones):
            # Spaces between the numbers are JSON too; anything else is not ids. "1 2" must not become "12".
            if bones.translate(None, b"," + _SPACE):
                return None
            return cls._from_values(orjson_loads_or_none(b"[" + text + b"]"))
        if not text:
            return cls(b"", [])
        if text[:1] == b"," or text[-1:] == b"," or _NOTHING_BETWEEN.search(text) or _leading_zero(text):
            return None
        return cls(text)

    @classmethod
    def _from_values(cls, values: object) -> Ids | None:
        if not isinstance(values, list) or not are_ids(values):
            return None
        return cls(orjson.dumps(values)[1:-1], values)

    @classmethod
    def from_json(cls, value: object) -> Ids | None:
        """Ids from a parsed JSON value, or None when it is no list of non-negative ints (an empty list is)."""
        return cls._from_values(value)

    def tolist(self) -> list[int]:
        if self._list is None:
            self._list = orjson.loads(b"[" + self.text + b"]")
        return self._list

    def json(self) -> orjson.Fragment:
        """For `orjson.dumps`: the array, spliced in without being parsed."""
        return orjson.Fragment(b"[" + self.text + b"]")

    def startswith(self, other: Ids) -> bool:
        """Whether these ids begin with those of `other`; a memory comparison, no parsing."""
        if not other.text:
            return True
        if not self.text.startswith(other.text):
            return False
        end = len(other.text)
        return len(self.text) == end or self.text[end : end + 1] == b","

    def after(self, before: Ids) -> Ids:
        """The ids that follow `before`, with which these must begin. Cut as text, nothing is parsed."""
        return self if not before.text else Ids(self.text[len(before.text) + 1 :])

    def common(self, other: Ids) -> int:
        """How many ids these and `other` have in common from the first on."""
        ours, theirs = self.text, other.text
        low, high = 0, min(len(ours), len(theirs))
        while low < high:  # halving: each step is one memory comparison
            middle = (low + high + 1) // 2
            if ours[low:middle] == theirs[low:middle]:
                low = middle
            else:
                high = middle - 1
        if not low:
            return 0
        whole = all(len(text) == low or text[low : low + 1] == b"," for text in (ours, theirs))
        return ours.count(b",", 0, low) + (1 if whole and ours[low - 1 : low] != b"," else 0)

    def __add__(self, other: Ids) -> Ids:
        if not self.text or not other.text:
            return other if not self.text else self
        return Ids(self.text + b"," + other.text)

    def __len__(self) -> int:
        if self._count < 0:
            self._count = self.text.count(b",") + 1 if self.text else 0
        return self._count

    def __bool__(self) -> bool:
        return bool(self.text)

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self.tolist()[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ids):
            return self.text == other.text
        return isinstance(other, list) and self.tolist() == other

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Ids({len(self)}: {self.text[:40].decode()}{'…' if len(self.text) > 40 else ''})"


def _leading_zero(text: bytes) -> bool:
    """Whether a number is written like 007, which is not JSON."""
    return (text[:1] == b"0" and text[1:2].isdigit()) or _ZERO_THEN_DIGIT.search(text) is not None


def orjson_loads_or_none(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None


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
        """Ids and logprobs are here, one finite logprob an id. A choice of no ids is complete with no logprobs."""
        return (
            self.token_ids is not None
            and self.logprobs is not None
            and len(self.token_ids) == len(self.logprobs)
            and are_logprobs(self.logprobs)
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


def are_ids(values: list[Any]) -> bool:
    """Whether each is an int that can be a token's id, at C speed; of no values, each is."""
    return not values or (set(map(type, values)) == {int} and min(values) >= 0 and max(values) < 2**63)


def is_logprob(value: object) -> bool:
    """A finite number that an engine can mean: bools, NaN, infinities and the -9999 clamp are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > CLAMPED


def are_logprobs(values: Sequence[object]) -> bool:
    """Whether `is_logprob` holds for each of them, at C speed where all are numbers."""
    if not set(map(type, values)) <= {float, int}:
        return all(is_logprob(value) for value in values)
    numbers: Sequence[float] = values  # type: ignore[assignment]
    return not numbers or (all(map(math.isfinite, numbers)) and min(numbers) > CLAMPED)


@dataclass(frozen=True, slots=True)
class TokenCapture:
    """What one call's engine said it was given and what it sampled.

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
        """A capture that keeps its word: a field that is missing and not yet explained is explained here."""
        missing = _explained(prompt_token_ids, completions, dict(unavailable))
        made = cls(wire, provider, requested, prompt_token_ids, completions, missing)
        return replace(made, digest=made.compute_digest()) if made.complete else made

    @property
    def complete(self) -> bool:
        return not self.unavailable and bool(self.completions)

    def compute_digest(self) -> str | None:
        """`sha256:<hex>` over the compact JSON of prompt ids, then index, ids and logprobs of each choice."""
        if self.prompt_token_ids is None or not all(c.complete for c in self.completions):
            return None
        told = hashlib.sha256(b'{"prompt_token_ids":[' + self.prompt_token_ids.text + b'],"completions":[')
        for position, choice in enumerate(self.completions):
            assert choice.token_ids is not None and choice.logprobs is not None
            # Floats as Python's json writes them (repr), BenchFlow's rule: orjson writes 1e-5 where json writes 1e-05.
            logprobs = json.dumps([float(value) for value in choice.logprobs], separators=(",", ":")).encode()
            told.update(
                b'%s{"index":%d,"token_ids":[%s],"logprobs":%s}'
                % (b"," if position else b"", choice.index, choice.token_ids.text, logprobs)
            )
        told.update(b"]}")
        return "sha256:" + told.hexdigest()

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

        What is stored is not believed: a field that is not what `unavailable` says is named there. Raises
        `RecordError` where the value is no capture at all.
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
        """A capture from the parts of a stored one; the digest is kept as it was stored, not computed again."""
        told = unavailable if unavailable is not None else {}
        if not isinstance(told, dict):
            raise RecordError("token_capture.unavailable is not an object")
        missing = _explained(
            prompt_token_ids, completions, {str(name): _unavailable(why) for name, why in told.items()}
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
            "the engine did not return one finite logprob per sampled id; upgrade the engine, or start the proxy "
            "with --buffered",
        )
    return missing


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
