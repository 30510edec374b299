"""One session: a rollout's door, its journal, and what it has seen.

Calls of one session may overlap; two sessions share only the engine and the bound on their memory.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from capture.errors import JournalError
from capture.journal.journal import JournalWriter
from capture.record import TokenCapture
from capture.sequences.purpose import Purposes
from capture.token_ids import Ids
from proxy.errors import Refusal
from proxy.runtime.lru import BoundedLRU, MemoryBudget
from proxy.sessions.answer_cache import AnswerCache
from proxy.sessions.budget import Budget
from proxy.sessions.policy import Policy
from proxy.sessions.retry_tracker import Retries
from proxy.settings import SessionOptions
from proxy.token_in.call_history import CallHistory
from proxy.token_in.planner import TokenIn
from proxy.upstream.replicas import Replica, Replicas

log = logging.getLogger("proxy")

#: A line longer than this is written off the event loop.
INLINE_LINE = 256 * 1024
#: Bytes of a prompt's ids from which on it is remembered, and up to which.
LONG_PROMPT, LONGEST_PROMPT = 4096, 8 << 20


@dataclass(slots=True)
class Tally:
    """What a session has seen so far; `GET /sessions/<id>` shows it."""

    calls: int = 0
    complete_calls: int = 0
    incomplete: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    last_error: str | None = None
    unrecorded: int = 0


class Session:
    def __init__(
        self,
        name: str,
        options: SessionOptions,
        journal: JournalWriter,
        replicas: Replicas,
        *,
        key: str,
        session_id: str | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        self.id = session_id or "s-" + secrets.token_hex(8)
        self.name = name
        self.api_key = key
        self.journal = journal
        self.replicas = replicas
        self.replica: Replica | None = None
        self._home: Replica | None = None
        self.options = options
        #: The number of its first call: the journal has those before it, of which nothing is remembered.
        self.first_call = journal.next_call
        self.token_in = None
        if options.token_in != "off":
            self.token_in = TokenIn(name, options.token_in, self.first_call > 0, history=CallHistory(budget))
        self.tally = Tally()
        self.earlier = AnswerCache(budget=budget)
        self._prompt: BoundedLRU[None, Ids] = BoundedLRU(1, LONGEST_PROMPT, budget)
        self.purposes = Purposes()
        self.retries = Retries()
        self.budget = Budget.of(options)
        self.journal_failed: str | None = None
        self.closed = False
        #: Opened by a call to its address: it ends when no call comes for a while, and the next call opens it again.
        self.by_address = False
        self.next_call = self.first_call
        self._used = time.monotonic()
        self._in_flight: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._writing = asyncio.Lock()

    def start_call(self, call: asyncio.Task[Any]) -> int:
        """Counts a call as in flight; gives its number, in the order in which calls began. A closed session refuses."""
        if self.closed and self.by_address:  # while the request's body came in
            raise Refusal(503, "this session has just ended; the call, made again, opens it again")
        if self.closed:
            raise Refusal(401, "this session is closed; its key opens nothing any more")
        number = self.next_call
        self.next_call += 1
        self._in_flight.add(call)
        self._idle.clear()
        return number

    def finish_call(self, call: asyncio.Task[Any]) -> None:
        self._in_flight.discard(call)
        self.touch()
        if not self._in_flight:
            self._idle.set()

    def touch(self) -> None:
        """Resets the time that it is unused."""
        self._used = time.monotonic()

    def unused(self) -> float:
        """Seconds since it was last in use; 0 while a call runs, or a line of one is being written."""
        return 0.0 if self._in_flight or self._writing.locked() else time.monotonic() - self._used

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def route(self, avoid: set[Replica] | None = None) -> Replica | None:
        """The replica to call: the session's own while it is up; None when all are to be avoided."""
        self.replica = self.replicas.pick(self.replica, avoid, self._home)
        self._home = self._home or self.replica
        return self.replica

    @property
    def policy_version(self) -> str | None:
        """The version of the weights now; a trainer sets it while the session lives."""
        return self.options.policy_version

    def set_policy(self, policy: Policy) -> None:
        if self.token_in is not None and policy.model is not None:
            self.token_in.rename_policy(self.options.model, policy.model)
        self.options = policy.options(self.options)

    @property
    def prompt(self) -> Ids | None:
        """The ids of the last long prompt: the next one usually begins with them, and only the rest is checked."""
        return self._prompt.get(None)

    @prompt.setter
    def prompt(self, ids: Ids) -> None:
        if len(ids.text) >= LONG_PROMPT:
            self._prompt.put(None, ids.bare(), len(ids.text))

    def count(self, capture: TokenCapture | None, usage: dict[str, Any]) -> None:
        """Adds one ended call to the tally."""
        tally = self.tally
        tally.calls += 1
        if capture is None:
            tally.incomplete["capture_off"] += 1
        elif capture.complete:
            tally.complete_calls += 1
        else:
            tally.incomplete[next(iter(capture.unavailable.values())).code] += 1
        tally.prompt_tokens += _number(usage.get("prompt_tokens"))
        tally.completion_tokens += _number(usage.get("completion_tokens"))

    def write_at_once(self, line: bytes) -> bool | None:
        """`write` without waiting; None where it would have to wait, and nothing was written."""
        if self.journal.fsync or len(line) > INLINE_LINE or self._writing.locked():
            return None
        try:
            self.journal.append(line)
            return True
        except JournalError as error:
            return self._journal_fails(error)

    async def write(self, line: bytes) -> bool:
        """Appends a call's line, in the order the calls end. A journal that fails never fails the call: False."""
        async with self._writing:
            try:
                if self.journal.fsync or len(line) > INLINE_LINE:
                    await asyncio.get_running_loop().run_in_executor(None, self.journal.append, line)
                else:
                    self.journal.append(line)
                return True
            except JournalError as error:
                return self._journal_fails(error)

    def _journal_fails(self, error: JournalError) -> bool:
        if self.journal_failed is None:
            log.error("session %s: %s; calls are answered but no longer recorded", self.name, error)
        self.journal_failed = str(error)
        self.tally.unrecorded += 1
        return False

    async def close(self, grace: float) -> None:
        """No new calls; waits up to `grace` seconds for those in flight, ends the rest, seals the journal."""
        self.closed = True
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            log.warning("session %s: %d calls still running after %g s; ending them", self.name, self.in_flight, grace)
            for task in list(self._in_flight):
                task.cancel()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), 5)
        async with self._writing:
            await asyncio.get_running_loop().run_in_executor(None, self.journal.close)
        self._forget()

    async def end_unused(self, seconds: float) -> bool:
        """Seals the journal of a session that was unused for `seconds`; whether it did.

        The slow part comes first, while the session is still open: a call that begins meanwhile keeps it open.
        """
        await asyncio.get_running_loop().run_in_executor(None, self.journal.sync)
        if self.closed or self.unused() < seconds:
            return False
        self.closed = True
        self.journal.close(synced=True)
        self._forget()
        return True

    def _forget(self) -> None:
        """Frees its share of the bound of all sessions."""
        self.earlier.end()
        self._prompt.close()
        if self.token_in is not None:
            self.token_in.history.end()

    def state(self) -> dict[str, Any]:
        tally = self.tally
        return {
            "session": self.id,
            "name": self.name,
            "first_call": self.first_call,
            "calls": tally.calls,
            "complete_calls": tally.complete_calls,
            "incomplete": dict(tally.incomplete),
            "prompt_tokens": tally.prompt_tokens,
            "completion_tokens": tally.completion_tokens,
            "in_flight": self.in_flight,
            "policy_version": self.policy_version,
            "purpose": self.options.purpose,
            "budget": None if self.budget is None else self.budget.state(),
            "token_in": None if self.token_in is None else self.token_in.state(),
            "journal": str(self.journal.path),
            "journal_failed": self.journal_failed,
            "unrecorded": tally.unrecorded,
            "last_error": tally.last_error,
            "closed": self.closed,
        }


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
