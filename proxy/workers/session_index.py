"""Which worker has which session, and what it takes to open that session again in another process."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

from proxy.sessions.keys import digest
from proxy.workers.fd_channel import Who


@dataclass(slots=True)
class Opened:
    """A session that was opened by the admin routes. `fields` are those of `POST /sessions`, the policy version the
    latest that was set."""

    worker: int
    session: str
    key: str
    name: str
    fields: dict[str, Any]


class Directory:
    """Sessions that were opened, by key, id and name; those that their address makes by their name alone.

    Of several of one name the first has it, as in `Sessions`.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        #: How many sessions each worker has been asked to open, and has not yet.
        self.opening = [0] * workers
        self._by_key: dict[bytes, Opened] = {}
        self._by_id: dict[str, Opened] = {}
        self._by_name: dict[str, list[Opened]] = {}
        #: Policy versions of sessions that were not opened here, by name: of the default and of those made by address.
        self.versions: dict[str, str] = {}

    def opened(self, one: Opened) -> None:
        self._by_key[digest(one.key)] = self._by_id[one.session] = one
        self._by_name.setdefault(one.name, []).append(one)

    def of_name(self, name: str) -> int:
        """The worker of the session with this id or name."""
        found = self._by_id.get(name)
        if found is None and name != "default":
            found = next(iter(self._by_name.get(name, ())), None)
        if found is not None:
            return found.worker
        return 0 if name == "default" else zlib.crc32(name.encode()) % self._workers

    def of(self, who: Who) -> int:
        """The worker of a request; one that no session has goes to the first, which has the default, or refuses."""
        for key in who.keys:
            found = self._by_key.get(digest(key))
            if found is not None:
                return found.worker
        return 0 if who.name is None else self.of_name(who.name)

    def of_worker(self, index: int) -> list[Opened]:
        """Its sessions, in the order they were opened."""
        return [one for one in self._by_id.values() if one.worker == index]

    def least(self) -> int:
        """The worker with the fewest sessions, opened or being opened."""
        held = list(self.opening)
        for one in self._by_id.values():
            held[one.worker] += 1
        return min(range(self._workers), key=lambda index: (held[index], -index))

    def set_version(self, session: str, name: str, version: str) -> None:
        found = self._by_id.get(session)
        if found is None:
            self.versions[name] = version
        else:
            found.fields["policy_version"] = version

    def is_opened(self, session: str) -> bool:
        return session in self._by_id

    def closed(self, session: str, name: str) -> None:
        found = self._by_id.pop(session, None)
        if found is None:
            self.versions.pop(name, None)
            return
        del self._by_key[digest(found.key)]
        same = self._by_name[found.name]
        same.remove(found)
        if not same:
            del self._by_name[found.name]
