"""Token sequences to look at: a merged sequence or one call, as an index that lays it out, and slices that fill it in.

The index has two small numbers a token (its width, its color), so that a page knows the height of 100,000 tokens
before it has any text; slices have what is on the screen.
"""

from __future__ import annotations

import base64
import bisect
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from capture.record import Completion
from capture.sequences.sequences import TokenSequence
from train.errors import BadInput
from train.view.rollout_cache import Reading
from train.view.token_text import SYMBOL, Part, shown, widths

#: Tokens of a slice at most.
SLICE: Final = 2048
#: Upper ends of the color steps: a token's probability from sure to unlikely, and its entropy in nats.
PROBABILITY: Final = (0.9, 0.6, 0.35, 0.15, 0.05, 0.01, 0.001)
ENTROPY: Final = (0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 3.0)
#: No color: the token was not sampled, or has no logprob.
NONE: Final = 255
#: A width that stands in `lines` instead, and the two ways to end a line that are so common that they do not.
LISTED, NEWLINE, TWO_NEWLINES = 255, 254, 253
WIDEST: Final = 250
LEAST_LIKELY: Final = 200


@dataclass(frozen=True, slots=True)
class Stretch:
    """`length` sampled ids of a call, from index `start` of the strip on; `trained` where the mask is 1."""

    call: int
    choice: int
    start: int
    length: int
    trained: bool
    completion: Completion

    def tokens(self) -> Sequence[str]:
        found = self.completion.tokens
        return found if isinstance(found, list) else ()


class Strip:
    """Ids in order, and which of them were sampled. `prompt` ids come first, those of the first call's prompt."""

    def __init__(self, reading: Reading, ids: Sequence[int | None], prompt: int, stretches: Sequence[Stretch]) -> None:
        self.vocabulary = reading.vocabulary
        self.ids = ids
        self.prompt = prompt
        self.stretches = list(stretches)
        self._starts = [stretch.start for stretch in self.stretches]
        self._laid_out: dict[int | str | bytes, tuple[int, list[int] | None]] = {}

    def stretch(self, at: int) -> Stretch | None:
        """The stretch that token `at` is in."""
        place = bisect.bisect_right(self._starts, at) - 1
        if place < 0:
            return None
        found = self.stretches[place]
        return found if at < found.start + found.length else None

    def text(self, at: int) -> str | bytes | None:
        """The engine's own text where it was sampled, else the known text of the id; None where there is none."""
        found = self.stretch(at)
        return self._text(at, self.ids[at], found, found.tokens() if found is not None else ())

    def _text(self, at: int, token: int | None, part: Stretch | None, tokens: Sequence[str]) -> str | bytes | None:
        text = tokens[at - part.start] if part is not None and at - part.start < len(tokens) else None
        text = text if isinstance(text, str) else None
        if text and "\ufffd" not in text:
            return text
        known = self.vocabulary.text(token) if token is not None else None
        return known if known is not None else text or None

    @cached_property
    def index(self) -> dict[str, Any]:
        """For the page: see the module. `widths`, `steps` and `entropies` are base64 of one byte per token."""
        number = len(self.ids)
        cells, steps, entropy = bytearray(number), bytearray([NONE]) * number, bytearray([NONE]) * number
        lines: dict[str, list[int]] = {}
        unknown = 0
        for part, start, end in self._runs():
            tokens = part.tokens() if part is not None else ()
            for at in range(start, end):
                token = self.ids[at]
                text = self._text(at, token, part, tokens)
                unknown += text is None
                code, listed = self._cells(token, text)
                cells[at] = code
                if listed is not None:
                    lines[str(at)] = listed
        sampled: list[tuple[float, int]] = []
        has_entropy = False
        for part in self.stretches:
            for offset, value in enumerate(part.completion.logprobs or ()):
                if offset < part.length and _is_number(value):
                    steps[part.start + offset] = step(math.exp(min(value, 0.0)), PROBABILITY, falling=True)
                    sampled.append((value, part.start + offset))
            for offset in range(min(part.length, len(part.completion.top_logprobs or ()))):
                if (found := entropy_of(part.completion, offset)) is not None:
                    has_entropy = True
                    entropy[part.start + offset] = step(found, ENTROPY)
        return {
            "tokens": number,
            "prompt": self.prompt,
            "widths": _base64(cells),
            "lines": lines,
            "steps": _base64(steps),
            "entropies": _base64(entropy) if has_entropy else None,
            "stretches": [
                {"call": stretch.call, "choice": stretch.choice, "start": stretch.start, "length": stretch.length,
                 "trained": stretch.trained}
                for stretch in self.stretches
            ],
            "least": [at for _, at in heapq.nsmallest(LEAST_LIKELY, sampled)],
            "logprob_sum": math.fsum(value for value, _ in sampled),
            "logprobs": len(sampled),
            "trained": sum(stretch.length for stretch in self.stretches if stretch.trained),
            "without_text": unknown,
        }  # fmt: skip

    def slice(self, start: int, end: int) -> dict[str, Any]:
        """Tokens `start` to `end` (at most `SLICE`), a list each: ids, texts, logprobs; what few tokens have, by index.

        `shown` has the parts of a token whose text is not simply itself.
        """
        start = max(0, min(start, len(self.ids)))
        end = max(start, min(end, len(self.ids), start + SLICE))
        texts: list[str | None] = []
        logprobs: list[float | None] = []
        parts: dict[str, list[Part]] = {}
        entropies: dict[str, float] = {}
        top: dict[str, list[tuple[str, float]]] = {}
        special: list[int] = []
        for at in range(start, end):
            token, text = self.ids[at], self.text(at)
            part = shown_token(token, text)
            texts.append(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)
            if part is not None:
                parts[str(at)] = part
            if self.vocabulary.special(token, text):
                special.append(at)
            stretch = self.stretch(at)
            value = None
            if stretch is not None:
                offset, values = at - stretch.start, stretch.completion.logprobs or ()
                value = values[offset] if offset < len(values) else None
                found = entropy_of(stretch.completion, offset)
                if found is not None:
                    entropies[str(at)] = found
                    top[str(at)] = alternatives(stretch.completion, offset)
            logprobs.append(value if _is_number(value) else None)
        return {
            "from": start, "to": end, "ids": list(self.ids[start:end]), "texts": texts, "logprobs": logprobs,
            "shown": parts, "entropies": entropies, "top": top, "special": special,
        }  # fmt: skip

    def _runs(self) -> list[tuple[Stretch | None, int, int]]:
        """The strip cut into sampled stretches and what lies between them."""
        runs: list[tuple[Stretch | None, int, int]] = []
        at = 0
        for stretch in self.stretches:
            runs += [(None, at, stretch.start), (stretch, stretch.start, stretch.start + stretch.length)]
            at = stretch.start + stretch.length
        return [run for run in (*runs, (None, at, len(self.ids))) if run[2] > run[1]]

    def _cells(self, token: int | None, text: str | bytes | None) -> tuple[int, list[int] | None]:
        key: int | str | bytes = text if text else (-1 if token is None else token)
        found = self._laid_out.get(key)
        if found is None:
            parts = shown_token(token, text)
            assert parts is not None or isinstance(text, str)
            if parts is None:
                lines = [len(text or "")] if (text or "").isascii() else widths([Part(str(text), 0)])
            else:
                lines = widths(parts)
            found = self._laid_out[key] = _code(lines)
        return found


def segment_strip(reading: Reading, number: int) -> Strip:
    """A merged sequence of the rollout. Raises `BadInput`."""
    segments = reading.tokens.segments
    if not 0 <= number < len(segments):
        raise BadInput(f"this rollout has no sequence {number}: it has {len(segments)}")
    segment = segments[number]
    ids = segment.prompt_ids.tolist() + segment.completion_ids.tolist()
    return Strip(reading, ids, len(segment.prompt_ids), list(_stretches(reading, segment)))


def _stretches(reading: Reading, sequence: TokenSequence) -> list[Stretch]:
    """Every reply in the sequence, those too that another sequence trains (`trained` False)."""
    trained = {span.call for span in sequence.spans}
    found: list[Stretch] = []
    for place, number in enumerate(sequence.calls):
        call = reading.call(number)
        if call is None or call.capture is None:
            continue
        following = sequence.calls[place + 1] if place + 1 < len(sequence.calls) else None
        choice = (reading.tokens.placements[following].choice or 0) if following is not None else 0
        if call.capture.prompt_token_ids is None:  # several prompts: each is a sequence of one reply
            position = next(
                at for at, sampled in enumerate(call.capture.completions)
                if sampled.prompt_token_ids == sequence.prompt_ids and sampled.token_ids == sequence.completion_ids
            )  # fmt: skip
            start, choice = len(sequence.prompt_ids), position
        else:
            start = len(call.capture.prompt_token_ids)
        completion = call.capture.completions[choice]
        found.append(Stretch(number, choice, start, len(completion.token_ids or ()), number in trained, completion))
    return found


def call_strip(reading: Reading, number: int, choice: int) -> Strip:
    """One call: its prompt and one of its choices, also where it is not complete. Raises `BadInput`."""
    call = reading.call(number)
    if call is None:
        raise BadInput(f"this rollout has no call {number}")
    if call.capture is None:
        raise BadInput(f"call {number} has no token capture: {call.unreadable or 'it was made without'}")
    if call.capture.completions and not 0 <= choice < len(call.capture.completions):
        raise BadInput(f"call {number} has no choice {choice}: it has {len(call.capture.completions)}")
    completion = call.capture.completions[choice] if call.capture.completions else Completion(0, None)
    prompt_ids = (
        completion.prompt_token_ids if completion.prompt_token_ids is not None else call.capture.prompt_token_ids
    )
    prompt: list[int | None] = list(prompt_ids) if prompt_ids is not None else []
    number_of = max(len(completion.token_ids or ()), len(completion.logprobs or ()), len(completion.tokens or ()))
    sampled: list[int | None] = [None] * number_of if completion.token_ids is None else list(completion.token_ids)
    sampled += [None] * (number_of - len(sampled))
    trained = any(
        span.call == number and segment.completion_ids[span.offset : span.offset + span.length] == sampled
        for segment in reading.tokens.segments
        for span in segment.spans
    )
    return Strip(
        reading, prompt + sampled, len(prompt), [Stretch(number, choice, len(prompt), number_of, trained, completion)]
    )


def shown_token(token: int | None, text: str | bytes | None) -> list[Part] | None:
    """The parts of a token; None where it is its text and nothing else."""
    if text is None or text in ("", b""):
        return [Part("⟨?⟩" if token is None else f"⟨{token}⟩", SYMBOL)]
    parts = shown(text)
    return None if len(parts) == 1 and parts[0] == (text, 0) else parts


def alternatives(completion: Completion, offset: int) -> list[tuple[str, float]]:
    """What else could have been sampled there, the likeliest first: text and logprob."""
    tops = completion.top_logprobs or ()
    entries = tops[offset] if offset < len(tops) else ()
    found: list[tuple[str, float]] = []
    if isinstance(entries, dict):
        entries = [{"token": name, "logprob": value} for name, value in entries.items()]
    for entry in entries or ():
        if isinstance(entry, dict) and _is_number(entry.get("logprob")):
            found.append((str(entry.get("token") or ""), float(entry["logprob"])))
    return sorted(found, key=lambda pair: -pair[1])


def entropy_of(completion: Completion, offset: int) -> float | None:
    """At least so many nats: over the captured alternatives, with all others counted as a single outcome."""
    found = [value for _, value in alternatives(completion, offset)]
    if not found:
        return None
    values = completion.logprobs or ()
    own = values[offset] if offset < len(values) else None
    if _is_number(own) and own is not None and own < min(found) - 1e-6:
        found.append(own)
    chances = [math.exp(min(value, 0.0)) for value in found]
    rest = max(0.0, 1.0 - math.fsum(chances))
    return max(0.0, -math.fsum(p * math.log(p) for p in (*chances, rest) if p > 0.0))


def step(value: float, ends: Sequence[float], *, falling: bool = False) -> int:
    """Which color: 0 for what is expected, `len(ends)` for what surprises most."""
    if falling:
        return sum(value < end for end in ends)
    return sum(value >= end for end in ends)


def _code(lines: list[int]) -> tuple[int, list[int] | None]:
    if len(lines) == 1 and lines[0] <= WIDEST:
        return lines[0], None
    if lines == [1, 0]:
        return NEWLINE, None
    return (TWO_NEWLINES, None) if lines == [1, 1, 0] else (LISTED, lines)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()
