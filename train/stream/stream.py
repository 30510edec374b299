"""Finished rollouts as records, while a job runs or afterwards, alone or in whole groups with advantages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capture.errors import CaptureError
from train.errors import BadInput, JobStopped, NoSuchPath, StreamTimeout
from train.rollouts.follow import Finished, Tree
from train.rollouts.job_state import Attempts, JobState, RetryPolicy
from train.rollouts.rollouts import Rollout, Warn, read_rollout
from train.stream.groups import (
    DEFAULT_BY,
    EPS,
    KINDS,
    AdvantageKind,
    Group,
    Groups,
    MemberLog,
    Withheld,
    advantages,
    group_key,
    mean_and_std,
    why_withheld,
)  # fmt: skip
from train.stream.records import Encode, Tokens, Unreadable, record

#: Logs of a group up to this many bytes are read once and held; larger ones are read again for the records.
HELD = 64 << 20
#: How the reading ended, by the job's state.
ENDED = {
    "finished": "the job ended",
    "stopped": "the job was stopped",
    "running": "reading ended, and the job went on,",
    "waiting": "reading ended, and the job had not begun,",
}


@dataclass(frozen=True, slots=True)
class Options:
    """What a stream does; see `stream_rollouts`."""

    follow: bool = True
    poll_interval: float = 1.0
    timeout: float | None = None
    group_size: int | None = None
    group_by: tuple[str, ...] = DEFAULT_BY
    advantage: AdvantageKind = "grpo"
    std_ddof: int = 1
    eps: float = EPS

    def check(self) -> None:
        """Raises `BadInput`."""
        if self.group_size is not None and self.group_size < 1:
            raise BadInput("--group-size must be at least 1")
        if not 0 < self.poll_interval < float("inf"):
            raise BadInput("--poll-interval must be more than 0 seconds")
        if self.timeout is not None and not self.timeout >= 0:
            raise BadInput("--timeout must be 0 seconds or more")
        if self.advantage not in KINDS:
            raise BadInput(f"--advantage must be one of {', '.join(KINDS)}")
        if self.std_ddof not in (0, 1):
            raise BadInput("--std-ddof must be 0 (the population's deviation) or 1 (the sample's)")
        if not 0 <= self.eps < float("inf"):
            raise BadInput("--eps must be 0 or more")


@dataclass
class Counts:
    """What went where."""

    streamed: int = 0
    groups: int = 0
    withheld: int = 0
    retried: int = 0


@dataclass
class _Jobs:
    """Attempts of each job, by its folder."""

    _known: dict[str, Attempts] = field(default_factory=dict)

    def of(self, job: str) -> Attempts:
        if job not in self._known:
            self._known[job] = Attempts(RetryPolicy.read(Path(job)))
        return self._known[job]


class Stream:
    """One pass over a job: iterate it once; afterwards `end` says how the job stands."""

    def __init__(
        self,
        path: Path,
        options: Options,
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
        self._jobs = _Jobs()
        self._replaces: dict[str, str] = {}  # rollout's folder -> rollout_path of the attempt it replaces
        self._replaced: set[str] = set()
        self._held: dict[str, Rollout] = {}  # failed, to be tried again, while grouping
        self._groups = Groups(options.group_size, options.group_by) if options.group_size else None

    def stop(self) -> None:
        """Ends a stream that waits, from another thread."""
        self._stopping.set()

    def warn(self, text: str) -> None:
        """Says each thing once."""
        if text not in self._warned:
            self._warned.add(text)
            self._on_warning(text)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        tree = Tree(self.path, self.warn)
        deadline = None if self.options.timeout is None else time.monotonic() + self.options.timeout
        while True:
            self.end, found = tree.poll()
            over = self.end.over
            yield from self._take(found, over)
            if over or not self.options.follow or self._stopping.is_set():
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
        yield from self._rest()

    def raise_end(self) -> None:
        """Raises `JobStopped` or `StreamTimeout` when the stream ended so; its text tells how many were streamed."""
        if self.timed_out and self.end is not None:
            raise StreamTimeout(
                f"job not finished after {self.options.timeout:g}s ({self.end.detail}); {self.streamed()}"
            )
        if self.end is not None and self.end.kind == "stopped":
            raise JobStopped(f"{self.end.detail}; {self.streamed()}")

    def streamed(self, withheld_file: Path | None = None) -> str:
        """`9 rollouts streamed; 1 group withheld (3 rollouts), written to withheld.jsonl`."""
        counts = self.counts
        text = f"{_many(counts.streamed, 'rollout')} streamed"
        if counts.groups:
            text += f"; {_many(counts.groups, 'group')} withheld ({_many(counts.withheld, 'rollout')})"
            text += f", written to {withheld_file}" if withheld_file else "; --withheld FILE says why"
        if counts.retried:
            text += f"; {_many(counts.retried, 'rollout')} left out, a retry stands in"
        return text

    def _take(self, found: list[Finished], over: bool) -> Iterator[dict[str, Any]]:
        for one in found:  # all of them first: a later one may replace an earlier one
            self._link(one)
        for one in found:
            rollout = self._read(one)
            if rollout is None:
                continue
            awaits = not over and self._jobs.of(one.job).awaits_retry(rollout)
            retried = awaits or one.path in self._replaced
            if self._groups is None:
                yield self._record(rollout, self._tokens(rollout), retried=retried)
                self.counts.streamed += 1
            elif one.path in self._replaced:
                self._leave_out(rollout)
            elif awaits:
                self._held[one.path] = rollout
            else:
                yield from self._grouped(rollout)

    def _link(self, one: Finished) -> None:
        rollout = self._read(one)
        before = rollout and self._jobs.of(one.job).add(rollout)
        if before is not None:
            self._replaced.add(str(before.path))
            self._replaces[one.path] = before.rollout_path
            if (held := self._held.pop(str(before.path), None)) is not None:
                self._leave_out(held)

    def _read(self, one: Finished) -> Rollout | None:
        return read_rollout(Path(one.path), self.path, self.warn)

    def _rest(self) -> Iterator[dict[str, Any]]:
        """At the end: attempts that no retry replaced count after all, and groups that never filled are withheld."""
        assert self.end is not None
        if self._groups is None:
            return
        held, self._held = self._held, {}
        for rollout in held.values():
            yield from self._grouped(rollout)
        ended = ENDED[self.end.kind]
        for group in self._groups.rest():
            self._withhold(group, why_withheld(group, ended=ended))

    def _grouped(self, rollout: Rollout) -> Iterator[dict[str, Any]]:
        assert self._groups is not None
        group = self._groups.add(rollout)
        if group is None:
            return
        why = why_withheld(group)
        tokens: list[Tokens] = []
        if why is None:
            why, tokens = self._judge(group)
        if why is not None:
            self._withhold(group, why)
            return
        options, rewards = self.options, group.rewards
        mean, std = mean_and_std(rewards, options.std_ddof)
        counted = advantages(rewards, options.advantage, options.std_ddof, options.eps)
        for position, member in enumerate(group.rollouts):
            more = {
                "advantage": counted[position] if group.size > 1 else None,
                "advantage_kind": options.advantage,
                "group_size": group.size,
                "group_mean": mean,
                "group_std": std,
                "ddof": options.std_ddof,
                "eps": options.eps,
            }
            read = tokens[position] if tokens else self._tokens(member)
            yield self._record(member, read, key=group.key, group_complete=True, more=more)
            self.counts.streamed += 1

    def _judge(self, group: Group) -> tuple[Withheld | None, list[Tokens]]:
        """Why it is withheld, asking the logs; and what was read of them, where that is small enough to be held."""
        small = sum(_size(member.journal) for member in group.rollouts) < HELD
        logs: list[MemberLog] = []
        held: list[Tokens] = []
        for member in group.rollouts:
            tokens = self._tokens(member)
            logs.append(member_log(member, tokens))
            if small:
                held.append(tokens)
        return why_withheld(group, logs), held

    def _withhold(self, group: Group, why: Withheld | None) -> None:
        assert why is not None
        self.counts.groups += 1
        self.counts.withheld += len(group.rollouts)
        if self._on_withheld is not None:
            self._on_withheld([self._withheld(member, group.key, why, group.full) for member in group.rollouts])

    def _leave_out(self, rollout: Rollout) -> None:
        self.counts.retried += 1
        if self._on_withheld is not None:
            why = Withheld(
                "retried", f"{rollout.rollout_path} failed before it could be scored, and a retry replaced it"
            )
            key = group_key(rollout, self.options.group_by)
            self._on_withheld([self._withheld(rollout, key, why, None)])

    def _withheld(
        self, member: Rollout, key: dict[str, str | None], why: Withheld, complete: bool | None
    ) -> dict[str, Any]:
        more = {"withheld": why.reason, "withheld_detail": why.detail}
        retried = why.reason == "retried"
        return self._record(member, self._tokens(member), key=key, group_complete=complete, more=more, retried=retried)

    def _record(
        self,
        rollout: Rollout,
        tokens: Tokens,
        *,
        key: dict[str, str | None] | None = None,
        retried: bool = False,
        group_complete: bool | None = None,
        more: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        key = group_key(rollout, self.options.group_by) if key is None else key
        return record(
            rollout,
            tokens,
            key,
            self.encode,
            retried=retried,
            replaces=self._replaces.get(str(rollout.path)),
            group_complete=group_complete,
            more=more,
        )

    def _tokens(self, rollout: Rollout) -> Tokens:
        from train.tokens.rollout_tokens import read_tokens

        try:
            return read_tokens(rollout)
        except CaptureError as error:
            self.warn(str(error))
            return Unreadable(str(error))


def member_log(rollout: Rollout, tokens: Tokens) -> MemberLog:
    """What the group rules ask about a member's log. Of calls that never went through the proxy the runner tells."""
    if isinstance(tokens, Unreadable):
        return MemberLog(False, False, tokens.reason)
    elsewhere = rollout.journal is None and rollout.endpoint_kind == "agent_native"
    return MemberLog(tokens.reached or elsewhere, tokens.training_grade)


def _size(journal: Path | None) -> int:
    try:
        return journal.stat().st_size if journal else 0
    except OSError:
        return 0


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
