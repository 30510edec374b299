"""`bench train audit`: the logprobs of captured ids, computed again with transformers and compared.

Where both agree, a trainer's importance ratios begin at 1. Where they do not, it is another checkpoint, another
precision, or quantized weights. Where the engine's logprobs have the temperature applied, so have the computed ones.
Those of a cut distribution (top_k, top_p, min_p) are not computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from capture.engines.meaning import APPLIED
from capture.sequences.sequences import TokenSequence
from train.errors import BadInput
from train.extras import optional
from train.rollouts.rollouts import Warn, find_rollouts
from train.tokens.call_summary import CallSummary
from train.tokens.coverage import sampling_sentence
from train.tokens.rollout_tokens import read_tokens
from train.tokens.sampling import TRUNCATION, certain, is_applied, temperature_in

#: Logits in memory at once: 256 M of them are 1 GB.
LOGITS: Final = 256 << 20
#: Upper ends of the histogram's bins.
BINS: Final = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, math.inf)

#: `score(ids, positions, temperatures)`: the natural-log probability of each id at `positions`, given the ids before
#: it; the logits of each are divided by its temperature.
Score = Callable[[Sequence[int], Sequence[int], Sequence[float]], Sequence[float]]


@dataclass(frozen=True, slots=True)
class CallDifference:
    """How far the recorded logprobs of one call are from the computed ones: absolute differences, in nats."""

    rollout: str
    call: int
    line: int
    tokens: int
    largest: float
    mean: float
    #: Index of the largest difference within the call's sampled ids, and its id.
    at: int
    token_id: int


@dataclass(slots=True)
class Audit:
    """All calls that were computed again, and their differences."""

    tolerance: float
    calls: list[CallDifference] = field(default_factory=list)
    histogram: list[int] = field(default_factory=lambda: [0] * len(BINS))
    #: A sentence for each rollout that was not sampled plainly.
    sampling: list[str] = field(default_factory=list)
    #: Calls that are not complete.
    skipped: int = 0
    #: Calls whose logprobs are those of a cut distribution.
    cut: int = 0

    @property
    def tokens(self) -> int:
        return sum(call.tokens for call in self.calls)

    @property
    def largest(self) -> float:
        return max((call.largest for call in self.calls), default=0.0)

    @property
    def mean(self) -> float:
        return math.fsum(call.mean * call.tokens for call in self.calls) / max(self.tokens, 1)

    @property
    def beyond(self) -> list[CallDifference]:
        """The calls with a token beyond the tolerance, the largest difference first."""
        found = [call for call in self.calls if not call.largest <= self.tolerance]
        return sorted(found, key=lambda call: -call.largest)

    def to_json(self) -> dict[str, Any]:
        return {
            "calls": len(self.calls),
            "tokens": self.tokens,
            "largest": self.largest,
            "mean": self.mean,
            "tolerance": self.tolerance,
            "histogram": [
                {"below": end if math.isfinite(end) else None, "tokens": number}
                for end, number in zip(BINS, self.histogram, strict=True)
            ],
            "beyond": [
                {name: getattr(call, name) for name in CallDifference.__slots__ if not name.startswith("_")}
                for call in self.beyond
            ],
            "sampling": self.sampling,
            "skipped_calls": self.skipped,
            "cut_calls": self.cut,
        }


def audit(
    path: Path, score: Score, *, tolerance: float = 1e-3, limit: int | None = None, on_warning: Warn | None = None
) -> Audit:
    """Computes the logprobs of every captured call at `path` again, one pass per token sequence; at most `limit` calls.

    Raises `NoSuchPath`, `BadInput`.
    """
    found = Audit(tolerance)
    for rollout in find_rollouts(path, on_warning):
        tokens = read_tokens(rollout)
        found.skipped += sum(not call.complete for call in tokens.calls)
        if tokens.segments and (text := sampling_sentence(tokens)) is not None:
            found.sampling.append(f"{rollout.rollout_path}: {text}")
        cut = {call.line for call in tokens.calls if _is_cut(call)}
        temperatures = {call.line: _temperature(call) for call in tokens.calls}
        for sequence in tokens.segments:
            found.cut += len(cut.intersection(sequence.lines))
            for call, differences, ids in _differences(sequence, score, temperatures):
                if call[1] in cut:
                    continue
                if limit is not None and len(found.calls) >= limit:
                    return found
                found.calls.append(_of_call(rollout.rollout_path, call, differences, ids))
                for value in differences:
                    found.histogram[next(n for n, end in enumerate(BINS) if value < end or end == math.inf)] += 1
    return found


def _is_cut(call: CallSummary) -> bool:
    """Whether its logprobs are renormalized over what top_k, top_p or min_p left."""
    named = {word.partition(" ")[0] for word in certain(call.not_plain)}
    return call.logprobs.truncation == APPLIED and bool(named.intersection(TRUNCATION))


def _temperature(call: CallSummary) -> float:
    """What its logprobs' logits were divided by."""
    for word in call.not_plain:
        if is_applied(word, call.logprobs):
            return temperature_in(word) or 1.0
    return 1.0


def _differences(
    sequence: TokenSequence, score: Score, temperatures: Mapping[int, float]
) -> Iterator[tuple[tuple[int, int], list[float], list[int]]]:
    """For each call whose ids were sampled in the sequence: (number, line), differences, ids."""
    prompt, completion = sequence.prompt_ids.tolist(), sequence.completion_ids.tolist()
    start = len(prompt)
    positions = [start + span.offset + n for span in sequence.spans for n in range(span.length)]
    if not positions:
        return
    if positions[0] == 0:
        raise BadInput("a call has no prompt, so its first token has nothing before it to be computed from")
    divisors = [temperatures.get(span.line, 1.0) for span in sequence.spans for _ in range(span.length)]
    again = score(prompt + completion, positions, divisors)
    at = 0
    for span in sequence.spans:
        end = at + span.length
        ids = completion[span.offset : span.offset + span.length]
        pairs = zip(sequence.logprobs[at:end], again[at:end], strict=True)
        if span.length:
            yield (span.call, span.line), [abs(recorded - computed) for recorded, computed in pairs], ids
        at = end


def _of_call(rollout: str, call: tuple[int, int], differences: Sequence[float], ids: Sequence[int]) -> CallDifference:
    at = max(range(len(differences)), key=lambda n: differences[n] if differences[n] == differences[n] else math.inf)
    mean = math.fsum(differences) / len(differences)
    return CallDifference(rollout, call[0], call[1], len(ids), differences[at], mean, at, ids[at])


def load_score(model: Path | str) -> Score:
    """A scorer from a Hugging Face folder, in float32 on the CPU. Raises `BadInput`."""
    needed_for = "audit requires the benchflow trl extra"
    torch = optional("torch", needed_for=needed_for, extra="trl")
    float32 = optional("torch", "float32", needed_for=needed_for, extra="trl")  # also where half of it is installed
    loader = optional("transformers", "AutoModelForCausalLM", needed_for=needed_for, extra="trl")
    optional("transformers.utils.logging", needed_for=needed_for, extra="trl").disable_progress_bar()
    if not Path(model).is_dir():
        raise BadInput(f"--model {model}: no such folder; give a Hugging Face model's folder (config.json and weights)")
    try:
        loaded = loader.from_pretrained(model, dtype=float32, local_files_only=True).eval()
    except (OSError, ValueError) as error:
        raise BadInput(f"--model {model}: cannot be loaded ({_first_line(error)})") from error
    vocabulary = int(loaded.config.get_text_config().vocab_size)
    at_once = max(1, LOGITS // vocabulary)

    def score(ids: Sequence[int], positions: Sequence[int], temperatures: Sequence[float]) -> list[float]:
        if max(ids) >= vocabulary:
            raise BadInput(
                f"--model {model}: token id {max(ids)} is beyond its vocabulary of {vocabulary}; it is another model's"
            )
        tokens = torch.tensor([list(ids)])
        made: list[float] = []
        with torch.inference_mode():
            for start in range(0, len(positions), at_once):
                wanted = torch.tensor(positions[start : start + at_once])
                logits = loaded(tokens, logits_to_keep=wanted - 1, use_cache=False).logits[0].float()
                logits /= torch.tensor(temperatures[start : start + at_once])[:, None]
                chosen = tokens[0, wanted][:, None]
                made += torch.log_softmax(logits, dim=-1).gather(1, chosen)[:, 0].tolist()
        return made

    return score


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
