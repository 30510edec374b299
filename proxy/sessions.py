"""Whose call is it: sessions, their keys, journals and policy versions.

A session is one rollout's door. Its key opens the model routes of this session, for as long as it lives, and nothing
else. Calls of one session may overlap; two sessions share nothing but the engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from capture.errors import JournalError
from capture.journal import JournalWriter
from capture.layout import JOURNAL
from capture.purpose import Purposes
from capture.record import TokenCapture
from proxy.errors import Refusal, SessionError
from proxy.kept import Kept
from proxy.replicas import Replica, Replicas
from proxy.retries import Retries
from proxy.settings import is_loopback
from proxy.token_in import TokenIn

log = logging.getLogger("proxy")

#: A line longer than this is written off the event loop.
INLINE_LINE = 256 * 1024
#: What the keys of opened sessions begin with.
KEY = "sk-capture-"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass(slots=True)
class Tally:
    """What a session has seen so far; `GET /sessions/<id>` shows it."""

    calls: int = 0
    complete_calls: int = 0
    incomplete: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    last_error: str | None = None


class Session:
    def __init__(
        self,
        *,
        name: str,
        key: str | None,
        journal: JournalWriter,
        replicas: Replicas,
        model: str | None,
        capture: bool,
        top_logprobs: int | None,
        policy_version: str | None,
        sampling: dict[str, object],
        token_in: str,
    ) -> None:
        self.id = "s-" + secrets.token_hex(8)
        self.name = name
        self.api_key = key if key is not None else KEY + secrets.token_urlsafe(24)
        self.journal = journal
        self.replicas = replicas
        self.replica: Replica | None = None
        self._home: Replica | None = None
        self.model = model
        self.capture = capture
        self.top_logprobs = top_logprobs
        self.policy_version = policy_version
        self.sampling = sampling
        self.token_in = TokenIn(name, token_in) if token_in != "off" else None
        self.tally = Tally()
        self.earlier = Kept()
        self.purposes = Purposes()
        self.retries = Retries()
        self.journal_failed: str | None = None
        self.closed = False
        self._begun = journal.next_call
        self._in_flight: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._writing = asyncio.Lock()

    @contextmanager
    def call(self) -> Iterator[int]:
        """Counts a call as in flight; gives its number, in the order calls began. A closed session refuses."""
        if self.closed:
            raise Refusal(401, "this session is closed; its key opens nothing any more")
        number = self._begun
        self._begun += 1
        task = asyncio.current_task()
        assert task is not None
        self._in_flight.add(task)
        self._idle.clear()
        try:
            yield number
        finally:
            self._in_flight.discard(task)
            if not self._in_flight:
                self._idle.set()

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def route(self, avoid: set[Replica] | None = None) -> Replica | None:
        """The replica to call: the session's own while it is up; None when all are to be avoided."""
        self.replica = self.replicas.pick(self.replica, avoid, self._home)
        self._home = self._home or self.replica
        return self.replica

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
        """`write`, where that takes no waiting; None where it does, and nothing was done."""
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
            log.error("session %s: %s; its calls go on unrecorded", self.name, error)
        self.journal_failed = str(error)
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

    def state(self) -> dict[str, Any]:
        tally = self.tally
        return {
            "session": self.id,
            "name": self.name,
            "calls": tally.calls,
            "complete_calls": tally.complete_calls,
            "incomplete": dict(tally.incomplete),
            "prompt_tokens": tally.prompt_tokens,
            "completion_tokens": tally.completion_tokens,
            "in_flight": self.in_flight,
            "policy_version": self.policy_version,
            "token_in": None if self.token_in is None else self.token_in.state(),
            "journal": str(self.journal.path),
            "journal_failed": self.journal_failed,
            "last_error": tally.last_error,
            "closed": self.closed,
        }


@dataclass(slots=True)
class Defaults:
    """What a session is like that is made by its name alone."""

    replicas: Replicas
    model: str | None
    capture: bool
    top_logprobs: int | None
    policy_version: str | None
    sampling: dict[str, object]
    token_in: str


class Sessions:
    """All sessions of one proxy, found by key, by id, and in open mode by name."""

    def __init__(self, *, open_mode: bool, out: Path | None, fsync: bool, grace: float) -> None:
        self.open_mode = open_mode
        self.default: Session | None = None
        self.defaults: Defaults | None = None
        #: Calls recorded by sessions that are closed, and how many of them are complete.
        self.calls = self.complete_calls = 0
        self._out = out
        self._fsync = fsync
        self._grace = grace
        self._by_id: dict[str, Session] = {}
        self._by_key: dict[bytes, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def open(
        self,
        name: str,
        *,
        replicas: Replicas,
        journal: Path | None = None,
        key: str | None = None,
        model: str | None = None,
        capture: bool = True,
        top_logprobs: int | None = None,
        policy_version: str | None = None,
        sampling: dict[str, object] | None = None,
        token_in: str = "off",
    ) -> Session:
        """Opens a session and its journal. Raises `SessionError`."""
        if not NAME.fullmatch(name):
            raise SessionError(f"a session's name is letters, digits, '.', '_' and '-', not {name!r}")
        if journal is None:
            if self._out is None:
                raise SessionError("a session needs a journal: the path of its llm_trajectory.jsonl")
            journal = self._out / name / JOURNAL
        try:
            writer = JournalWriter(journal, fsync=self._fsync)
        except JournalError as error:
            raise SessionError(str(error)) from error
        session = Session(
            name=name,
            key=key,
            journal=writer,
            replicas=replicas,
            model=model,
            capture=capture,
            top_logprobs=top_logprobs,
            policy_version=policy_version,
            sampling=sampling or {},
            token_in=token_in,
        )
        self._by_id[session.id] = session
        self._by_key[_digest(session.api_key)] = session
        return session

    def get(self, session_id: str) -> Session:
        """Raises `SessionError` when there is none of that id or name."""
        found = self._by_id.get(session_id)
        if found is None:
            found = next((one for one in self._by_id.values() if one.name == session_id), None)
        if found is None:
            raise SessionError(f"there is no session {session_id!r}")
        return found

    async def close(self, session_id: str) -> dict[str, Any]:
        session = self.get(session_id)
        await session.close(self._grace)
        self._by_id.pop(session.id, None)
        if self._by_key.pop(_digest(session.api_key), None) is not None:  # else it was closed twice at once
            session.replicas.leave(session.replica)
            self.calls += session.tally.calls
            self.complete_calls += session.tally.complete_calls
        return session.state()

    async def close_all(self) -> None:
        await asyncio.gather(*(self.close(one.id) for one in self))

    def authorize(self, headers: list[tuple[bytes, bytes]], path_name: str | None) -> Session:
        """The session a call belongs to, by its key or, in open mode, by the name in its path. Raises `Refusal` (401).

        Keys are found by their digest and compared in constant time, so that timing tells nothing about them.
        """
        for key in keys(headers):
            session = self._by_key.get(_digest(key))
            if session and hmac.compare_digest(session.api_key.encode(), key.encode("utf-8", "replace")):
                if path_name and path_name not in (session.id, session.name):
                    raise Refusal(401, "the key does not belong to the session named in the path")
                return session
            if key.startswith(KEY):  # one of ours, and of no session that lives: never somebody's placeholder
                raise Refusal(401, "the session of this key is closed; its key opens nothing any more")
        if self.open_mode:
            if _from_a_page(headers):
                raise Refusal(
                    403, "a web page of another site may not use this proxy; to allow it, start it with --key"
                )
            if path_name is None and self.default is not None:
                return self.default
            if path_name is not None:
                return self._named(path_name)
        raise Refusal(401, "no session has this API key; use the key the session was opened with")

    def _named(self, name: str) -> Session:
        """In open mode `/s/<name>/v1` makes the session it names: one address a rollout is all it takes."""
        try:
            return self.get(name)
        except SessionError:
            pass
        like = self.defaults
        if like is None or self._out is None:
            raise Refusal(401, "no session has this name")
        try:
            return self.open(
                name,
                replicas=like.replicas,
                model=like.model,
                capture=like.capture,
                top_logprobs=like.top_logprobs,
                policy_version=like.policy_version,
                sampling=like.sampling,
                token_in=like.token_in,
            )
        except SessionError as error:
            raise Refusal(400, str(error)) from error


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _from_a_page(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether a browser sends this for a page that is not of this machine: any site could, also by a name of its own
    that leads here, and an open proxy asks for no key. Editors' own windows have other schemes."""
    origin = next((value.decode("latin-1") for name, value in headers if name == b"origin"), None)
    if origin is None or not origin.startswith(("http:", "https:", "null")):
        return False
    try:
        return not is_loopback(urlsplit(origin).hostname or "")
    except ValueError:
        return True


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def keys(headers: list[tuple[bytes, bytes]]) -> Iterator[str]:
    """The keys that a request offers, in the order of its headers."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                yield key.strip().decode("latin-1")
        elif name in (b"x-api-key", b"x-goog-api-key"):
            yield value.strip().decode("latin-1")
