"""The groups of a service: the request for each, its finished rollouts, and who waits for more."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from sandbox.service.group_request import GroupRequest
from sandbox.tasks.task import Task

#: States of a group.
STATES: Final = ("open", "complete", "withheld", "cancelled")


@dataclass(eq=False)
class RolloutGroup:
    """One accepted group. Threads that run its rollouts change it; the event loop reads it."""

    request: GroupRequest
    task: Task
    #: Names of the members' folders, by index; None where there is no final result.
    members: list[str | None]
    #: How often the service's policy had changed when it was accepted; -1: in an earlier run, and again since.
    policy_changes: int = 0
    #: The same in the order in which they finished.
    finished: list[str] = field(default_factory=list)
    verdict: dict[str, Any] | None = None
    cancelled: bool = False
    #: Why its rollouts were stopped, or could not run, for a person.
    trouble: str | None = None
    #: Set when its rollouts must stop.
    stop: threading.Event = field(default_factory=threading.Event)
    #: Stops it at its deadline.
    timer: threading.Timer | None = None
    #: Members that wait or run.
    open_members: int = 0
    #: Failed rollouts that a continued member replaces, by index.
    replaces: dict[int, str] = field(default_factory=dict)
    #: Names of its rollouts that run.
    running: set[str] = field(default_factory=set)

    @property
    def key(self) -> str:
        return self.request.key

    @property
    def state(self) -> str:
        """`open` until it has its verdict, then `complete`, `withheld` or `cancelled`."""
        return "open" if self.verdict is None else str(self.verdict["state"])

    def summary(self) -> dict[str, Any]:
        """A row of `GET /groups`."""
        return {
            "key": self.key,
            "task": self.request.task,
            "size": self.request.size,
            "state": self.state,
            "finished": len(self.finished),
        }


class Waiters:
    """Wakes the coroutines that wait for a change; `wake` may be called from any thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: set[asyncio.Event] = set()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def wake(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it everybody who waited
                self._loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        for event in self._events:
            event.set()

    @contextlib.contextmanager
    def event(self) -> Iterator[asyncio.Event]:
        """An event that is set by every `wake`; clear it before looking at what may have changed."""
        event = asyncio.Event()
        self._events.add(event)
        try:
            yield event
        finally:
            self._events.discard(event)
