"""The sessions that the admin routes opened, and what it takes to open them again in a new process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from proxy.sessions.policy import Policy


@dataclass(slots=True)
class OpenedSession:
    """`fields` are those of `POST /sessions`, with the latest policy that was set."""

    worker: int
    id: str
    key: str
    name: str
    fields: dict[str, Any]


class OpenedSessions:
    """Sessions that were opened and not closed yet, in that order. Of several with one name, the name means the first,
    as in `Sessions`."""

    def __init__(self, workers: int) -> None:
        #: How many sessions each worker has been asked to open, and has not yet.
        self.opening = [0] * workers
        #: Policies of the default session and of those made by address, by name.
        self.policies: dict[str, Policy] = {}
        self._by_id: dict[str, OpenedSession] = {}

    def add(self, session: OpenedSession) -> None:
        self._by_id[session.id] = session

    def find(self, named: str) -> OpenedSession | None:
        """The session with this id, else the first opened with this name."""
        by_name = (session for session in self._by_id.values() if session.name == named)
        return self._by_id.get(named) or next(by_name, None)

    def of_worker(self, index: int) -> list[OpenedSession]:
        return [session for session in self._by_id.values() if session.worker == index]

    def least_loaded(self) -> int:
        """The worker with the fewest sessions, opened or being opened; the first, with the default, comes last."""
        counts = list(self.opening)
        for session in self._by_id.values():
            counts[session.worker] += 1
        return min(range(len(counts)), key=lambda index: (counts[index], -index))

    def set_policy(self, session_id: str, name: str, policy: Policy) -> None:
        found = self._by_id.get(session_id)
        if found is None:
            self.policies[name] = policy
        else:
            found.fields |= policy.fields()

    def set_all_policies(self, policy: Policy) -> None:
        self.policies.clear()
        for session in self._by_id.values():
            session.fields |= policy.fields()

    def remove(self, session_id: str, name: str) -> None:
        if self._by_id.pop(session_id, None) is None:
            self.policies.pop(name, None)
