"""Through which calls reach their engines: closed while a trainer changes weights, open otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from proxy.errors import Refusal, SettingsError

#: Seconds that a pause waits for calls to end.
LONGEST_WAIT = 3600.0
STOPPED = "the call was ended before it was sent: the proxy is being stopped while its engines are paused"


class Gate:
    """`with gate:` is around a call's time at its engine. While the gate is closed, `opened` waits before it.

    One proxy has one gate for all of its engines.
    """

    def __init__(self) -> None:
        #: Whether calls wait here.
        self.closed = False
        #: Calls at their engines, and calls that wait for the gate to open.
        self.in_flight = self.waiting = 0
        self._opened_at = 0.0
        self._ended = False
        self._open = asyncio.Event()
        self._draining = 0
        self._drained = asyncio.Event()

    def close(self) -> None:
        """Calls that are not at their engine yet wait from now on."""
        self.closed = True
        self._open.clear()

    def open(self) -> None:
        """Lets the calls go that wait."""
        if self.closed:
            self.closed = False
            self._opened_at = asyncio.get_running_loop().time()
        self._open.set()

    def counts_from(self, now: float) -> float:
        """Since when the time that an engine takes counts: not while the gate is closed, nor before that. In seconds of
        the loop's clock.
        """
        return now if self.closed else self._opened_at

    def end(self) -> None:
        """The proxy stops: calls that wait are refused, as no engine may be called."""
        self._ended = True
        self._open.set()

    async def opened(self) -> None:
        """Returns when the gate is open. Raises `Refusal` (503) where the proxy stops first."""
        self.waiting += 1
        try:
            while self.closed:
                if self._ended:
                    raise Refusal(503, STOPPED)
                await self._open.wait()
        finally:
            self.waiting -= 1

    async def drained(self, seconds: float) -> int:
        """Waits until no call is at an engine, for at most `seconds`; returns how many are."""
        self._draining += 1
        try:
            async with asyncio.timeout(seconds):
                while self.in_flight:
                    self._drained.clear()
                    await self._drained.wait()
        except TimeoutError:
            pass
        finally:
            self._draining -= 1
        return self.in_flight

    def __enter__(self) -> None:
        self.in_flight += 1

    def __exit__(self, *_: object) -> None:
        self.in_flight -= 1
        if self._draining and not self.in_flight:
            self._drained.set()


def seconds_to_wait(fields: Mapping[str, Any], default: float) -> float:
    """How long a pause waits for calls in flight, by the `wait` of its request. Raises `SettingsError`."""
    wait = fields.get("wait", default)
    if not isinstance(wait, int | float) or isinstance(wait, bool) or not 0 <= wait <= LONGEST_WAIT:
        raise SettingsError(f"`wait` is a number of seconds from 0 to {LONGEST_WAIT:g}")
    return wait
