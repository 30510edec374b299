"""Finished rollouts as records, while a job runs or afterwards, one by one or in whole groups with advantages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.errors import BadInput, JobStopped, NoSuchPath, StreamTimeout
from train.groups.groups import Group, GroupCollector, GroupKey, GroupOptions, finish_order, group_key
from train.groups.withhold import MemberLog, Withheld, member_log, why_withheld
from train.rollouts.attempts import AttemptsByJob
from train.rollouts.follow import Finished, Tree
from train.rollouts.job_state import JobState
from train.rollouts.purpose import check_purpose, is_wanted, other
from train.rollouts.rollouts import Rollout, Warn, read_rollout
from train.stream.records import Encode, record
from train.tokens.rollout_tokens import RolloutTokens, UnreadableLog, read_log

#: The logs of a group up to this many bytes together are read once; larger ones are read again for the records.
MEMORY = 64 << 20
#: How the reading ended, by the job's state.
ENDED = {
    "finished": "the job ended",
    "stopped": "the job was stopped",
    "running": "reading ended while the job was running,",
    "waiting": "reading ended before the job began,",
}


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What a stream does; see `stream_rollouts`. `poll_interval` and `timeout` are seconds."""

    follow: bool = True
    poll_interval: float = 1.0
    timeout: float | None = None
    groups: GroupOptions = field(default_factory=GroupOptions)
    #: `train`, `eval` or `all`.
    purpose: str = "train"

    def check(self) -> None:
        """Raises `BadInput`."""
        self.groups.check()
        check_purpose(self.purpose)
        if not 0 < self.poll_interval < float("inf"):
            raise BadInput("--poll-interval must be more than 0 seconds")
        if self.timeout is not None and not self.timeout >= 0:
            raise BadInput("--timeout must be 0 seconds or more")


@dataclass
class Counts:
    """How many rollouts and groups went where."""

    streamed: int = 0
    withheld_groups: int = 0
    withheld_rollouts: int = 0
    replaced: int = 0
    other_purpose: int = 0


class Stream:
    """One pass over a job: iterate over it once; afterwards `end` is the job's state."""

    def __init__(
        self,
        path: Path,
        options: StreamOptions,
        encode: Encode,
        *,
        on_withheld: Callable[[list[Any]], None] | None = None,
        on_warning: Warn | None = None,
        on_status: Warn | None = None,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        """`wait(seconds)` pauses between polls and returns whether to stop. Raises `BadInput`, `NoSuchPath`."""
        options.check()
        if path.is_file():
            raise BadInput(f"{path} is a file; give a job folder, or the folder that holds a run's trials")
        if not options.follow and not path.exists():
            raise NoSuchPath(f"no such job folder: {path}")
        self.path = path if path.parts else Path.cwd()
        self.options, self.encode = options, encode
        self.counts = Counts()
        self.end: JobState | None = None
        self.timed_out = False
        self._on_withheld, self._on_status = on_withheld, on_status or (lambda _: None)
        self._warned: set[str] = set()
        self._on_warning = on_warning or (lambda _: None)
        self._stopping = threading.Event()
        self._wait = wait or self._stopping.wait
        self._attempts = AttemptsByJob()
        self._replaces: dict[Path, str] = {}  # rollout's folder -> rollout_path of the attempt it replaces
        self._replaced: set[Path] = set()
        self._awaiting: dict[Path, Rollout] = {}  # failed and to be retried; only while grouping
        groups = options.groups
        self._groups = GroupCollector(groups.size, groups.by) if groups.size is not None else None

    def stop(self) -> None:
        """Ends a stream that waits; called from another thread."""
        self._stopping.set()

    def warn(self, text: str) -> None:
        """Passes each warning on once."""
        if text not in self._warned:
            self._warned.add(text)
            self._on_warning(text)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        tree = Tree(self.path, self.warn)
        deadline = None if self.options.timeout is None else time.monotonic() + self.options.timeout
        while True:
            self.end, finished = tree.poll()
            job_finished = self.end.over
            yield from self._process(finished, job_finished)
            if job_finished or not self.options.follow or self._stopping.is_set():
                break
            left = self.options.poll_interval if deadline is None else deadline - time.monotonic()
            if left <= 0:
                self.timed_out = True
                break
            if self.end.kind == "waiting":
                self._on_status(self.end.detail)
            if self._wait(min(left, self.options.poll_interval)):
                break
        for text in tree.missing_trials():
            self.warn(text)
        yield from self._flush()

    def raise_end(self) -> None:
        """Raises `JobStopped` or `StreamTimeout` when the stream ended so; the text says how many were streamed."""
        if self.timed_out:
            raise StreamTimeout(self.summary())
        if self.end is not None and self.end.kind == "stopped":
            raise JobStopped(self.summary())

    def summary(self, withheld_file: Path | None = None) -> str:
        """How the stream ended, in one line: the job's state unless it finished, and the counts."""
        counts = self.streamed(withheld_file)
        if self.end is not None and self.timed_out:
            return f"job not finished after {self.options.timeout:g}s ({self.end.detail}); {counts}"
        if self.end is not None and self.end.kind == "stopped":
            return f"{self.end.detail}; {counts}"
        return counts

    def streamed(self, withheld_file: Path | None = None) -> str:
        """`9 rollouts streamed; 1 group withheld (3 rollouts), written to withheld.jsonl`."""
        counts = self.counts
        text = f"{_count(counts.streamed, 'rollout')} streamed"
        if counts.withheld_groups:
            text += f"; {_count(counts.withheld_groups, 'group')} withheld"
            text += f" ({_count(counts.withheld_rollouts, 'rollout')})"
            text += f", written to {withheld_file}" if withheld_file else "; --withheld FILE says why"
        if counts.replaced:
            text += f"; {_count(counts.replaced, 'rollout')} left out, replaced by a retry"
        if counts.other_purpose:
            what = other(self.options.purpose)
            text += f"; {_count(counts.other_purpose, f'{what} rollout')} left out (--purpose {self.options.purpose})"
        return text

    def _process(self, finished: list[Finished], job_finished: bool) -> Iterator[dict[str, Any]]:
        found = [rollout for item in finished if (rollout := self._read(item)) is not None]
        rollouts = [rollout for rollout in found if is_wanted(rollout, self.options.purpose)]
        self.counts.other_purpose += len(found) - len(rollouts)
        rollouts.sort(key=finish_order)  # a reading of the whole job makes the same groups as rows do
        for rollout in rollouts:  # all of them first: a later one may replace an earlier one
            self._link(rollout)
        for rollout in rollouts:
            awaits = not job_finished and self._attempts.awaits_retry(rollout)
            replaced = rollout.path in self._replaced
            if self._groups is None:
                yield self._record(rollout, self._tokens(rollout), retried=awaits or replaced)
                self.counts.streamed += 1
            elif replaced:
                self._leave_out(rollout)
            elif awaits:
                self._awaiting[rollout.path] = rollout
            else:
                yield from self._add_to_group(rollout)

    def _read(self, finished: Finished) -> Rollout | None:
        return read_rollout(Path(finished.path), self.path, self.warn)

    def _link(self, rollout: Rollout) -> None:
        before = self._attempts.add(rollout)
        if before is not None:
            self._replaced.add(before.path)
            self._replaces[rollout.path] = before.rollout_path
            if (awaiting := self._awaiting.pop(before.path, None)) is not None:
                self._leave_out(awaiting)

    def _flush(self) -> Iterator[dict[str, Any]]:
        """At the end, attempts that no retry replaced count after all, and groups that never filled are withheld."""
        assert self.end is not None
        if self._groups is None:
            return
        awaiting, self._awaiting = self._awaiting, {}
        for rollout in awaiting.values():
            yield from self._add_to_group(rollout)
        for group in self._groups.drain():
            why = why_withheld(group, ended=ENDED[self.end.kind])
            assert why is not None  # it is not full
            self._withhold(group, why)

    def _add_to_group(self, rollout: Rollout) -> Iterator[dict[str, Any]]:
        assert self._groups is not None
        group = self._groups.add(rollout)
        if group is None:
            return
        why = why_withheld(group)
        tokens: list[RolloutTokens | UnreadableLog] = []
        if why is None:
            why, tokens = self._judge(group)
        if why is not None:
            self._withhold(group, why)
            return
        for position, (member, signal) in enumerate(
            zip(group.rollouts, group.signals(self.options.groups), strict=True)
        ):
            read = tokens[position] if tokens else self._tokens(member)
            yield self._record(member, read, key=group.key, group_complete=True, more=signal)
            self.counts.streamed += 1

    def _judge(self, group: Group) -> tuple[Withheld | None, list[RolloutTokens | UnreadableLog]]:
        """Why the group is withheld, from its logs; and what was read of them, where that is small enough to keep."""
        small = sum(_size(member.journal) for member in group.rollouts) < MEMORY
        logs: list[MemberLog] = []
        read: list[RolloutTokens | UnreadableLog] = []
        for member in group.rollouts:
            tokens = self._tokens(member)
            logs.append(member_log(member, tokens))
            if small:
                read.append(tokens)
        return why_withheld(group, logs), read

    def _withhold(self, group: Group, why: Withheld) -> None:
        self.counts.withheld_groups += 1
        self.counts.withheld_rollouts += len(group.rollouts)
        if self._on_withheld is not None:
            self._on_withheld([self._withheld(member, group.key, why, group.full) for member in group.rollouts])

    def _leave_out(self, rollout: Rollout) -> None:
        self.counts.replaced += 1
        if self._on_withheld is not None:
            why = Withheld(
                "retried", f"{rollout.rollout_path} failed before it could be scored, and a retry replaced it"
            )
            key = group_key(rollout, self.options.groups.by)
            self._on_withheld([self._withheld(rollout, key, why, None)])

    def _withheld(self, member: Rollout, key: GroupKey, why: Withheld, complete: bool | None) -> dict[str, Any]:
        more = {"withheld": why.reason, "withheld_detail": why.detail}
        retried = why.reason == "retried"
        return self._record(member, self._tokens(member), key=key, group_complete=complete, more=more, retried=retried)

    def _record(
        self,
        rollout: Rollout,
        tokens: RolloutTokens | UnreadableLog,
        *,
        key: GroupKey | None = None,
        retried: bool = False,
        group_complete: bool | None = None,
        more: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return record(
            rollout,
            tokens,
            group_key(rollout, self.options.groups.by) if key is None else key,
            self.encode,
            retried=retried,
            replaces=self._replaces.get(rollout.path),
            group_complete=group_complete,
            more=more,
        )

    def _tokens(self, rollout: Rollout) -> RolloutTokens | UnreadableLog:
        tokens = read_log(rollout)
        if isinstance(tokens, UnreadableLog):
            self.warn(tokens.reason)
        return tokens


def _size(journal: Path | None) -> int:
    try:
        return journal.stat().st_size if journal else 0
    except OSError:
        return 0


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
