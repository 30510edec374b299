"""The advantages of a group's rewards: always finite, and exactly 0.0 where the rewards are equal."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Final, Literal

AdvantageKind = Literal["grpo", "dr-grpo", "rloo"]

FORMULAS: Final[dict[AdvantageKind, str]] = {
    "grpo": "(reward - mean) / (std + eps)",
    "dr-grpo": "reward - mean",
    "rloo": "reward - mean of the others",
}
#: Added to the standard deviation; the value of TRL and BenchFlow.
EPS: Final = 1e-4


def advantages(rewards: Sequence[float], kind: AdvantageKind = "grpo", ddof: int = 1, eps: float = EPS) -> list[float]:
    """One advantage per reward, in order.

    Exactly 0.0 where the rewards are equal up to rounding (0.1 + 0.2 and 0.3), and for a single reward. `ddof` 1 is the
    sample's standard deviation (TRL, verl, BenchFlow), 0 the population's (TRL's AsyncGRPO).
    """
    if not rewards or _all_equal(rewards):
        return [0.0] * len(rewards)
    scale = max(abs(value) for value in rewards)  # so that no square or sum can overflow
    scaled = [value / scale for value in rewards]
    mean = math.fsum(scaled) / len(scaled)
    if kind == "grpo":
        divisor = _std(scaled, mean, ddof) + eps / scale
        return [_finite((value - mean) / divisor) for value in scaled]
    factor = 1.0 if kind == "dr-grpo" else len(scaled) / (len(scaled) - 1)
    return [_finite((value - mean) * factor * scale) for value in scaled]


def mean_and_std(rewards: Sequence[float], ddof: int = 1) -> tuple[float, float]:
    """The mean and the standard deviation of the rewards; the deviation is exactly 0.0 where they are equal."""
    if not rewards:
        return 0.0, 0.0
    if _all_equal(rewards):
        return rewards[0], 0.0
    scale = max(abs(value) for value in rewards)
    scaled = [value / scale for value in rewards]
    mean = math.fsum(scaled) / len(scaled)
    return _finite(mean * scale), _finite(_std(scaled, mean, ddof) * scale)


def _std(values: Sequence[float], mean: float, ddof: int) -> float:
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(len(values) - ddof, 1))


def _all_equal(rewards: Sequence[float]) -> bool:
    return math.isclose(min(rewards), max(rewards), rel_tol=1e-9, abs_tol=1e-12)


def _finite(value: float) -> float:
    """Sums of rewards near the largest float may exceed it."""
    if math.isfinite(value):
        return value + 0.0  # -0.0 becomes 0.0
    return math.copysign(sys.float_info.max, value)
