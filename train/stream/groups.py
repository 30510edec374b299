"""Groups of rollouts for GRPO-style training: who belongs together, who is withheld and why, and the advantages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from train.errors import BadInput
from train.rollouts.rollouts import Rollout

AdvantageKind = Literal["grpo", "dr-grpo", "rloo"]
Reason = Literal[
    "unscored", "no_model_calls", "mixed_sequences", "group_incomplete", "mixed_tasks", "unreadable_log", "retried"
]

#: What rollouts can be grouped by, in the order a group's id names them.
KEYS = ("task", "agent", "model", "task_digest", "job")
DEFAULT_BY = ("task", "agent", "model", "job")
KINDS: tuple[AdvantageKind, ...] = ("grpo", "dr-grpo", "rloo")
#: TRL's and BenchFlow's, added to the standard deviation.
EPS = 1e-4


def parse_group_by(text: str) -> tuple[str, ...]:
    """`task,agent,model` in any order -> the keys in the order of `KEYS`. Raises `BadInput`."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in KEYS]
    if unknown:
        raise BadInput(f"--group-by: {unknown[0]!r} is no key; give some of {', '.join(KEYS)}, with commas")
    if not words:
        raise BadInput(f"--group-by: no key is given; give some of {', '.join(KEYS)}, with commas")
    return tuple(key for key in KEYS if key in words)


def group_key(rollout: Rollout, by: Sequence[str] = DEFAULT_BY) -> dict[str, str | None]:
    """`{"task": .., "agent": .., ...}`; None where the rollout does not say.

    Repeats of a run are jobs of their own, also where they bear one name: their `job` here begins with the trial.
    """
    return {key: rollout.job_path if key == "job" else getattr(rollout, key) for key in KEYS if key in by}


def group_id(key: dict[str, str | None]) -> str:
    """`task=..|agent=..|model=..|job=..`; `null` where the rollout does not say."""
    return "|".join(f"{name}={'null' if value is None else value}" for name, value in key.items())


def advantages(rewards: Sequence[float], kind: AdvantageKind = "grpo", ddof: int = 1, eps: float = EPS) -> list[float]:
    """One advantage a reward, in order. Always finite, and exactly 0.0 where the rewards are equal as people mean it
    (0.1 three times; 0.1 + 0.2 beside 0.3), also for a single one.

    `grpo`: (reward - mean) / (std + eps), std with `ddof` (1: the sample's, as TRL, verl and BenchFlow; 0: the
    population's, as TRL's AsyncGRPO). `dr-grpo`: reward - mean. `rloo`: reward - mean of the others.
    """
    if not rewards or _equal(rewards):
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
    """The group's mean and standard deviation; exactly 0.0 deviation where the rewards are equal as people mean it."""
    scale = max((abs(value) for value in rewards), default=0.0) or 1.0
    scaled = [value / scale for value in rewards]
    mean = math.fsum(scaled) / max(len(scaled), 1)
    if _equal(rewards):
        return rewards[0] if rewards else 0.0, 0.0
    return _finite(mean * scale), _finite(_std(scaled, mean, ddof) * scale)


def _std(values: Sequence[float], mean: float, ddof: int) -> float:
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(len(values) - ddof, 1))


def _equal(rewards: Sequence[float]) -> bool:
    return not rewards or math.isclose(min(rewards), max(rewards), rel_tol=1e-9, abs_tol=1e-12)


def _finite(value: float) -> float:
    """Sums of rewards near the largest float may pass it."""
    if math.isfinite(value):
        return value + 0.0  # -0.0 becomes 0.0
    return math.copysign(1.7976931348623157e308, value)


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts of one key, in the order they finished; `size` is how many make it whole."""

    key: dict[str, str | None]
    size: int
    rollouts: list[Rollout]

    @property
    def id(self) -> str:
        return group_id(self.key)

    @property
    def full(self) -> bool:
        return len(self.rollouts) >= self.size

    @property
    def rewards(self) -> list[float]:
        """Of the scored ones."""
        return [rollout.reward for rollout in self.rollouts if rollout.reward is not None]


@dataclass(frozen=True, slots=True)
class Withheld:
    """Why no line of a group reaches the trainer: `reason` for programs, `detail` a sentence for people."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class MemberLog:
    """What a member's log says about it: `reached` - a model answered at least once; `sequence` - it has a token
    sequence; `unreadable` - a sentence, where the log cannot be read.
    """

    reached: bool
    sequence: bool
    unreadable: str | None = None


def why_withheld(group: Group, logs: Sequence[MemberLog] = (), ended: str = "the job ended") -> Withheld | None:
    """Why a group is withheld; None when it goes out whole. `logs` has one entry a member, in order.

    Without `logs` only what needs no log is looked at: ask so first, reading logs costs.
    """
    members = group.rollouts
    if not group.full:
        have, of = len(members), group.size
        return Withheld("group_incomplete", f"{ended} when {have} of the group's {of} rollouts had finished")
    for member in members:
        if not member.scored:
            why = member.error or member.verifier_error
            return Withheld("unscored", f"{member.rollout_path} has no reward" + (f": {why}" if why else ""))
    digests = sorted({member.task_digest for member in members if member.task_digest})
    if len(digests) > 1 and "task" in group.key:
        return Withheld(
            "mixed_tasks",
            f"the members ran {len(digests)} different versions of the task (task_digest "
            f"{', '.join(digest[:19] for digest in digests)}): their rewards do not compare",
        )
    for member, told in zip(members, logs, strict=False):
        if told.unreadable is not None:
            return Withheld("unreadable_log", f"{member.rollout_path}: {told.unreadable}")
        if not told.reached:
            return Withheld("no_model_calls", f"{member.rollout_path}'s log has no call that a model answered")
    without = [member.rollout_path for member, told in zip(members, logs, strict=False) if not told.sequence]
    if without and len(without) < len(members):
        return Withheld(
            "mixed_sequences",
            f"{len(without)} of {len(members)} members have no token sequence ({without[0]} is one): ask bench train "
            "token-coverage --explain why",
        )
    return None


@dataclass(slots=True)
class Groups:
    """Collects rollouts into groups of `size` as they finish."""

    size: int
    by: Sequence[str] = DEFAULT_BY
    _open: dict[tuple[str | None, ...], list[Rollout]] = field(default_factory=dict)

    def add(self, rollout: Rollout) -> Group | None:
        """Takes a rollout; returns its group when that is full now. Further rollouts of the key begin the next one."""
        key = group_key(rollout, self.by)
        held = self._open.setdefault(tuple(key.values()), [])
        held.append(rollout)
        if len(held) < self.size:
            return None
        del self._open[tuple(key.values())]
        return Group(key, self.size, held)

    def rest(self) -> Iterator[Group]:
        """The groups that never filled, oldest first; afterwards there are none."""
        held, self._open = self._open, {}
        for rollouts in held.values():
            yield Group(group_key(rollouts[0], self.by), self.size, rollouts)
