"""Failed rollouts that a job's runner starts again, and which later rollout replaces which."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from capture.journal.layout import JobDir
from train.rollouts.rollouts import Rollout, read_result

#: Categories of failures that BenchFlow does not retry, where `evaluation.json` lists none.
NOT_RETRIED = frozenset({"timeout", "provider_auth", "provider_rate_limit", "provider_rejected"})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`config.retry` of a job's `evaluation.json`: which failed rollouts its runner starts again."""

    max_retries: int = 0
    excluded: frozenset[str] = NOT_RETRIED
    #: None: every category that is not excluded.
    included: frozenset[str] | None = None

    @classmethod
    def read(cls, job: Path) -> RetryPolicy:
        """The policy of the job in that folder; one without retries where the job does not say."""
        config = (read_result(JobDir(job).evaluation) or {}).get("config")
        retry = config.get("retry") if isinstance(config, dict) else None
        if not isinstance(retry, dict):
            return cls()
        most = retry.get("max_retries")
        excluded = _categories(retry.get("exclude_categories"))
        return cls(
            max_retries=most if isinstance(most, int) and not isinstance(most, bool) else 0,
            excluded=NOT_RETRIED if excluded is None else excluded,
            included=_categories(retry.get("retry_categories")),
        )

    def would_retry(self, rollout: Rollout, attempt: int) -> bool:
        """Whether a rollout that was attempt number `attempt` (the first is 0) is started again."""
        if rollout.scored or attempt >= self.max_retries:
            return False
        if rollout.error is None and rollout.verifier_error is None:
            return False
        categories = {rollout.error_category, rollout.verifier_error_category} - {None}
        if categories & self.excluded:
            return False
        return self.included is None or bool(categories & self.included)


def _categories(value: object) -> frozenset[str] | None:
    return frozenset(str(category) for category in value) if isinstance(value, list) else None


@dataclass(slots=True)
class Attempts:
    """Which rollout of one job replaces which failed one, as they finish."""

    policy: RetryPolicy
    _failed: dict[str, Rollout] = field(default_factory=dict)  # by folder name: unscored, not replaced so far
    _awaiting: dict[tuple[str | None, ...], list[Rollout]] = field(default_factory=dict)  # by trial, oldest first
    _number: dict[str, int] = field(default_factory=dict)  # by folder name; the first attempt is 0

    def add(self, rollout: Rollout) -> Rollout | None:
        """Adds a rollout that finished; returns the failed one that it replaces, if there is one.

        The runner's `retry_of` decides where it is given. Otherwise it is the oldest failed rollout of the same task,
        agent and model that the policy retries and that ended before this one began.
        """
        before = self._replaced_by(rollout)
        number = 0
        if before is not None:
            del self._failed[before.path.name]
            number = self._number.pop(before.path.name) + 1
            waiting = self._awaiting.get(_trial(before), [])
            if before in waiting:
                waiting.remove(before)
        if not rollout.scored:
            self._failed[rollout.path.name] = rollout
            self._number[rollout.path.name] = number
            if self.policy.would_retry(rollout, number):
                self._awaiting.setdefault(_trial(rollout), []).append(rollout)
        return before

    def awaits_retry(self, rollout: Rollout) -> bool:
        """Whether another attempt of this failed rollout is expected, as long as its job runs."""
        return rollout in self._awaiting.get(_trial(rollout), ())

    def _replaced_by(self, rollout: Rollout) -> Rollout | None:
        if rollout.says_retry_of:
            return self._failed.get(rollout.retry_of or "")
        for before in self._awaiting.get(_trial(rollout), ()):
            if before.finished_at is None or rollout.started_at is None or rollout.started_at >= before.finished_at:
                return before
        return None


@dataclass(slots=True)
class AttemptsByJob:
    """`Attempts` of several jobs; each job's policy is read when its first rollout is added."""

    _jobs: dict[Path, Attempts] = field(default_factory=dict)

    def add(self, rollout: Rollout) -> Rollout | None:
        """See `Attempts.add`."""
        return self._of(rollout).add(rollout)

    def awaits_retry(self, rollout: Rollout) -> bool:
        """See `Attempts.awaits_retry`."""
        return self._of(rollout).awaits_retry(rollout)

    def _of(self, rollout: Rollout) -> Attempts:
        job = rollout.path.parent
        if job not in self._jobs:
            self._jobs[job] = Attempts(RetryPolicy.read(job))
        return self._jobs[job]


def replaced_attempts(rollouts: Iterable[Rollout]) -> dict[str, Rollout]:
    """`rollout_path` of each failed attempt -> its replacement. `rollouts` are in the order they finished."""
    attempts = AttemptsByJob()
    return {before.rollout_path: rollout for rollout in rollouts if (before := attempts.add(rollout)) is not None}


#: In BenchFlow's RL groups: `<task>__<group>-rNN-aK`. Attempts of one member share all but `-aK`.
_ATTEMPT = re.compile(r"(.*-r\d+)-a\d+$")


def _trial(rollout: Rollout) -> tuple[str | None, ...]:
    """What the attempts of one trial share."""
    member = _ATTEMPT.match(rollout.path.name)
    return (rollout.task, rollout.agent, rollout.model, member[1] if member else None)
