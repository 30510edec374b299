"""Which rollouts belong together, in what order groups fill, and what a whole group says about each member."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from train.errors import BadInput
from train.groups.advantage import EPS, FORMULAS, AdvantageKind, advantages, mean_and_std
from train.rollouts.attempts import replaced_attempts
from train.rollouts.rollouts import Rollout

#: What rollouts can be grouped by, in the order in which a group's id names them.
KEYS: Final = ("task", "agent", "model", "task_digest", "job")
DEFAULT_BY: Final = ("task", "agent", "model", "job")

#: The values of `KEYS` that a group was made by; None where a rollout does not say.
GroupKey = dict[str, str | None]


def parse_group_by(text: str) -> tuple[str, ...]:
    """`task,agent,model` in any order -> the keys in the order of `KEYS`. Raises `BadInput`."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in KEYS]
    if unknown:
        raise BadInput(f"--group-by: {unknown[0]!r} is not a key; give some of {', '.join(KEYS)}, with commas")
    if not words:
        raise BadInput(f"--group-by: no key is given; give some of {', '.join(KEYS)}, with commas")
    return tuple(key for key in KEYS if key in words)


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How rollouts are grouped and how their advantage is computed.

    `size` rollouts make a group. None: rows and the view make one group of all rollouts with the same key, and the
    stream makes none.
    """

    by: Sequence[str] = DEFAULT_BY
    size: int | None = None
    kind: AdvantageKind = "grpo"
    ddof: int = 1
    eps: float = EPS

    def check(self) -> None:
        """Raises `BadInput`."""
        if self.size is not None and self.size < 1:
            raise BadInput("--group-size must be at least 1")
        if self.kind not in FORMULAS:
            raise BadInput(f"--advantage must be one of {', '.join(FORMULAS)}, not {self.kind!r}")
        if self.ddof not in (0, 1):
            raise BadInput("--std-ddof must be 0 (the population's deviation) or 1 (the sample's)")
        if not 0 <= self.eps < float("inf"):
            raise BadInput("--eps must be 0 or more")

    def to_json(self) -> dict[str, Any]:
        """What a manifest says about the training signal."""
        return {
            "group_advantage": self.kind,
            "formula": FORMULAS[self.kind],
            "group_by": list(self.by),
            "group_size": self.size,
            "std_ddof": self.ddof,
            "eps": self.eps,
        }


def group_key(rollout: Rollout, by: Sequence[str] = DEFAULT_BY) -> GroupKey:
    """`{"task": .., "agent": .., ...}`.

    Repeats of a run are separate jobs, even where they share a name: their `job` here begins with the trial. Members
    of a group that a trainer asked for have its key as `group` too, whatever else they are grouped by; rollouts of an
    evaluation are in no group with others.
    """
    key = {key: rollout.job_path if key == "job" else getattr(rollout, key) for key in KEYS if key in by}
    if rollout.group is not None:
        key["group"] = rollout.group
    if rollout.purpose != "train":
        key["purpose"] = rollout.purpose
    return key


def group_id(key: GroupKey) -> str:
    """`task=..|agent=..|model=..|job=..`; `null` where the rollout does not say."""
    return "|".join(f"{name}={'null' if value is None else value}" for name, value in key.items())


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts with the same key, in the order they finished; `size` rollouts make it full."""

    key: GroupKey
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
        """The rewards of the scored rollouts."""
        return [rollout.reward for rollout in self.rollouts if rollout.reward is not None]

    def signals(self, options: GroupOptions) -> list[dict[str, Any]]:
        """The training signal of each member of a group that is not withheld, in order.

        `advantage` is None in a group of one: there is nothing to compare it with.
        """
        mean, std = mean_and_std(self.rewards, options.ddof)
        values: list[float | None] = [None]
        if len(self.rollouts) > 1:
            values = [*advantages(self.rewards, options.kind, options.ddof, options.eps)]
        return [
            {
                "advantage": value,
                "advantage_kind": options.kind,
                "group_size": len(self.rollouts),
                "group_mean": mean,
                "group_std": std,
                "ddof": options.ddof,
                "eps": options.eps,
            }
            for value in values
        ]


@dataclass(slots=True)
class GroupCollector:
    """Collects rollouts into groups of `size` as they finish."""

    size: int
    by: Sequence[str] = DEFAULT_BY
    _open: dict[tuple[str | None, ...], list[Rollout]] = field(default_factory=dict)

    def add(self, rollout: Rollout) -> Group | None:
        """Adds a rollout; returns its group when that is now full. Further rollouts of the key begin the next one."""
        key = group_key(rollout, self.by)
        members = self._open.setdefault(tuple(key.values()), [])
        members.append(rollout)
        if len(members) < self.size:
            return None
        del self._open[tuple(key.values())]
        return Group(key, self.size, members)

    def drain(self) -> Iterator[Group]:
        """The groups that never filled, oldest first; afterwards there are none."""
        unfilled, self._open = self._open, {}
        for members in unfilled.values():
            yield Group(group_key(members[0], self.by), self.size, members)


def finish_order(rollout: Rollout) -> tuple[str, int, str]:
    """Sorts rollouts in the order they finished: `finished_at`, then the time of `result.json`, then the path."""
    return rollout.finished_at or "", rollout.written_at, rollout.rollout_path


def group_finished(rollouts: Iterable[Rollout], options: GroupOptions) -> tuple[list[Group], dict[str, Rollout]]:
    """All groups of these rollouts, in the order of their first members; the last group of a key may be short.

    The second value maps the `rollout_path` of each failed attempt, which is in no group, to the retry that replaced
    it.
    """
    ordered = sorted(rollouts, key=finish_order)
    replaced = replaced_attempts(ordered)
    members = [rollout for rollout in ordered if rollout.rollout_path not in replaced]
    collector = GroupCollector(options.size or max(len(members), 1), options.by)
    groups = [group for rollout in members if (group := collector.add(rollout)) is not None]
    for group in collector.drain():
        groups.append(group if options.size else Group(group.key, len(group.rollouts), group.rollouts))
    return sorted(groups, key=lambda group: finish_order(group.rollouts[0])), replaced
