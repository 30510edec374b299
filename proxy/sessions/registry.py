"""All sessions of a proxy, and how they are found, opened and ended.

A session's key opens the model routes of this session, while it is open, and nothing else. In open mode a call to an
address (`/s/NAME/v1`) opens a session; no client closes those, so they end when they are unused.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from capture.errors import JournalError
from capture.journal.journal import JournalReader, JournalWriter, purpose_of
from capture.journal.layout import JOURNAL
from proxy.errors import NoSuchSession, Refusal, SessionError
from proxy.http.headers import Headers
from proxy.runtime.lru import MemoryBudget
from proxy.sessions.keys import KEY, digest, from_a_page, keys
from proxy.sessions.placement import Placement
from proxy.sessions.policy import Policy
from proxy.sessions.session import Session as Session
from proxy.settings import SessionOptions
from proxy.upstream.replicas import Replicas

log = logging.getLogger("proxy")
V = TypeVar("V")

#: Ended sessions of which the journal is remembered, or its end.
MOST_LEFT = 10_000
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass(slots=True)
class Defaults:
    """The options of a session that is opened by its address."""

    replicas: Replicas
    options: SessionOptions


class Sessions:
    """All sessions of one proxy, found by key, by id, and in open mode by name.

    Several sessions may share a name, each with its own journal. The name leads to the session that was opened first,
    until it ends; the others are reached by their ids and keys.
    """

    def __init__(
        self,
        *,
        open_mode: bool,
        out: Path | None,
        fsync: bool,
        grace: float,
        idle: float = 0.0,
        budget: MemoryBudget | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.open_mode = open_mode
        self.default: Session | None = None
        self.defaults: Defaults | None = None
        #: Calls of sessions that are closed, how many of them are complete, and how many are in no journal.
        self.calls = self.complete_calls = self.unrecorded = 0
        self._out = out
        self._fsync = fsync
        self._grace = grace
        self._idle = idle
        self.budget = budget or MemoryBudget()
        self._placement = placement or Placement(0, (0,))
        self._by_id: dict[str, Session] = {}
        self._by_key: dict[bytes, Session] = {}
        self._by_name: dict[str, list[Session]] = {}
        #: Policies that were set for sessions opened by their address: they outlast a session's end.
        self._policies: dict[str, Policy] = {}
        #: The journals of sessions that ended, by id and name.
        self._sealed: dict[str, Path] = {}
        #: The journals of sessions that ended unused, by name: size in bytes, and the number of the next call.
        self._left: dict[str, tuple[int, int]] = {}
        self._ending: asyncio.Task[None] | None = None

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def open(
        self,
        name: str,
        options: SessionOptions,
        replicas: Replicas,
        *,
        journal: Path | None = None,
        key: str | None = None,
        session_id: str | None = None,
    ) -> Session:
        """Opens a session and its journal, with this key and id where it is opened again. Raises `SessionError`."""
        if not NAME.fullmatch(name):
            raise SessionError(f"a session's name is letters, digits, '.', '_' and '-', not {name!r}")
        left = None
        if journal is None:
            if self._out is None:
                raise SessionError("a session needs a journal: the path of its llm_trajectory.jsonl")
            journal, left = self._out / name / JOURNAL, self._left.pop(name, None)
        try:
            writer = JournalWriter(journal, fsync=self._fsync, left=left)
        except JournalError as error:
            raise SessionError(str(error)) from error
        if left is None and writer.next_call and (before := purpose_of(journal)) != options.purpose:
            writer.close()
            raise SessionError(
                f"the journal {journal} has calls for {before}, and these would be for {options.purpose}: give another "
                f"journal (--out), or --purpose {before}"
            )
        key = key if key is not None else self._placement.new_key()
        session = Session(name, options, writer, replicas, key=key, session_id=session_id, budget=self.budget)
        if session.budget is not None and session.first_call:
            session.budget.count_earlier(JournalReader(journal))
        self._by_id[session.id] = session
        self._by_key[digest(session.api_key)] = session
        self._by_name.setdefault(name, []).append(session)
        return session

    def get(self, named: str) -> Session:
        """The session of this id, else the first opened of this name. Raises `SessionError` when there is none."""
        found = self._by_id.get(named) or next(iter(self._by_name.get(named, ())), None)
        if found is None:
            raise NoSuchSession(f"there is no session {named!r}")
        return found

    def journal(self, named: str) -> Path:
        """The journal of an open session, or of one of the last 10,000 that ended. Raises `NoSuchSession`."""
        try:
            return self.get(named).journal.path
        except NoSuchSession:
            if named not in self._sealed:
                raise
            return self._sealed[named]

    def set_policy(self, session: Session, policy: Policy) -> None:
        session.set_policy(policy)
        if session.by_address:
            self._policies[session.name] = policy

    def set_default_policy(self, policy: Policy) -> None:
        """For the default session, in whichever worker, and for sessions that an address opens later."""
        if self.default is not None:
            self.default.set_policy(policy)
        if self.defaults is not None:
            self.defaults.options = policy.options(self.defaults.options)

    def set_all_policies(self, policy: Policy) -> None:
        """For all open sessions, and for those that an address opens later."""
        self._policies.clear()
        self.set_default_policy(policy)
        for session in self:
            session.set_policy(policy)

    def set_policies(self, policies: Mapping[str, Policy]) -> None:
        """Restores policies by name: of the default session, and of sessions that an address opens later."""
        self._policies.update(policies)
        policy = self._policies.pop("default", None)
        if policy is not None:
            self.set_default_policy(policy)

    async def close(self, session_id: str) -> dict[str, Any]:
        session = self.get(session_id)
        await session.close(self._grace)
        self._forget(session)
        if session.by_address:
            self._policies.pop(session.name, None)
        return session.state()

    async def close_all(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        await asyncio.gather(*(self.close(session.id) for session in self))

    def _forget(self, session: Session) -> None:
        if self._by_id.pop(session.id, None) is None:
            return  # it was closed twice at once
        del self._by_key[digest(session.api_key)]
        same = self._by_name[session.name]
        same.remove(session)
        if not same:
            del self._by_name[session.name]
        _remember(self._sealed, session.id, session.journal.path)
        _remember(self._sealed, session.name, session.journal.path)
        session.replicas.leave(session.replica)
        self.calls += session.tally.calls
        self.complete_calls += session.tally.complete_calls
        self.unrecorded += session.tally.unrecorded

    def authorize(self, headers: Headers, path_name: str | None, *, may_open: bool = True) -> Session | None:
        """The session a request belongs to, by its key or, in open mode, by the name in its path.

        In open mode the first call to an address opens the session that it names; None where the request may not.

        Raises `Refusal`: 401, or 421 with its address for a session that lives in another worker.

        Keys are found by their digest and compared in constant time, so that timing reveals nothing about them.
        """
        for key in keys(headers):
            session = self._by_key.get(digest(key))
            if session and hmac.compare_digest(session.api_key.encode(), key.encode("utf-8", "replace")):
                if path_name and path_name not in (session.id, session.name):
                    raise Refusal(401, "the key does not belong to the session named in the path")
                return session
            self._placement.refuse_others(self._placement.of_key(key), headers, None)
            if key.startswith(KEY):  # our key of a session that has ended: never a client's placeholder
                raise Refusal(401, "the session of this key is closed; its key opens nothing any more")
        if self.open_mode:
            if from_a_page(headers):
                raise Refusal(
                    403, "a web page of another site may not use this proxy; to allow it, start it with --key"
                )
            if path_name is None and self.default is not None:
                return self.default
            if path_name is None or not self._has(path_name):
                self._placement.refuse_others(self._placement.of_name(path_name), headers, path_name)
            if path_name is not None:
                return self._named(path_name, may_open)
        raise Refusal(401, "no session has this API key; use the key the session was opened with")

    def _has(self, named: str) -> bool:
        return named in self._by_id or named in self._by_name

    # sessions that an address opens

    def _named(self, name: str, may_open: bool) -> Session | None:
        """In open mode `/s/<name>/v1` opens the session that it names: a rollout needs only its address."""
        if not self._has(name):
            if not may_open and self.defaults is not None and NAME.fullmatch(name):
                return None
            return self._open_named(name)
        session = self.get(name)
        session.touch()
        return session

    def _open_named(self, name: str) -> Session:
        if self.defaults is None or self._out is None:
            raise Refusal(401, "no session has this name")
        options = self.defaults.options
        if name in self._policies:
            options = self._policies[name].options(options)
        try:
            session = self.open(name, options, self.defaults.replicas)
        except SessionError as error:
            raise Refusal(503 if NAME.fullmatch(name) else 400, str(error)) from error
        session.by_address = True
        if self._idle and self._ending is None:
            self._ending = asyncio.ensure_future(self._end_idle())
        return session

    async def end_unused(self, seconds: float) -> None:
        """Ends the sessions opened by their addresses that had no call for `seconds`, one by one: each waits for the
        disk.
        """
        for session in self._opened_by_address():
            if session.unused() >= seconds and await session.end_unused(seconds):
                self._forget(session)
                self._remember_end(session)
                _log_ended(session, seconds)

    async def _end_idle(self) -> None:
        """Runs while sessions opened by their addresses are open."""
        try:
            while made := self._opened_by_address():
                await self.end_unused(self._idle)
                soonest = min((self._idle - session.unused() for session in made if not session.closed), default=0.0)
                await asyncio.sleep(max(soonest, self._idle / 20))
        finally:
            self._ending = None

    def _opened_by_address(self) -> list[Session]:
        return [session for session in self if session.by_address]

    def _remember_end(self, session: Session) -> None:
        with suppress(OSError):
            _remember(self._left, session.name, (session.journal.path.stat().st_size, session.next_call))


def _remember(memory: dict[str, V], name: str, value: V) -> None:
    """Keeps the last `MOST_LEFT` values."""
    memory.pop(name, None)
    memory[name] = value
    while len(memory) > MOST_LEFT:
        del memory[next(iter(memory))]


def say_stopped(who: str, sessions: Sessions) -> None:
    """Logs the last line: it says where calls are in no journal."""
    if sessions.unrecorded:
        log.error(
            "%sstopped: %d calls, %d complete, but %d of them are in no journal: a journal could not be written",
            who, sessions.calls, sessions.complete_calls, sessions.unrecorded,
        )  # fmt: skip
    else:
        log.info("%sstopped: %d calls recorded, %d complete", who, sessions.calls, sessions.complete_calls)


def _log_ended(session: Session, idle: float) -> None:
    tally = session.tally
    log.info(
        "session %s: no call for %g s; its journal is sealed (%d calls since it was opened, %d complete), and the next "
        "call to its address opens it again", session.name, idle, tally.calls, tally.complete_calls,
    )  # fmt: skip
    if session.journal_failed is not None:
        log.error(
            "session %s: %d calls of it went unrecorded: %s", session.name, tally.unrecorded, session.journal_failed
        )
