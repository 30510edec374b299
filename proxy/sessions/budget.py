"""What a session may use of the engine: calls, sampled tokens, seconds. Past it the proxy answers calls itself."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from capture.errors import RecordError
from capture.journal.call import Call
from capture.record import TokenCapture
from proxy.sampling import choices_of, output_limit
from proxy.settings import SessionOptions

#: Calls past the budget that are answered with a message. An agent that calls again all the same gets an error.
MESSAGES = 3


class BudgetReached(Exception):
    """The session has used up its budget; its text is for the agent and the record."""

    def __init__(self, limit: str, maximum: float, used: float, *, as_message: bool) -> None:
        super().__init__(
            f"The budget of this session is used up: {_SENTENCES[limit].format(used=used, maximum=maximum)}. "
            "No further call goes to the model; stop here."
        )
        self.limit, self.maximum, self.used = limit, maximum, used
        #: Whether the agent gets a message of the assistant, which ends its turn, or an error.
        self.as_message = as_message

    def to_json(self) -> dict[str, Any]:
        answer = "message" if self.as_message else "error"
        return {"limit": self.limit, "max": self.maximum, "used": self.used, "answer": answer}


_SENTENCES = {
    "max_calls": "{used} of {maximum} calls were made (max_calls)",
    "max_sampled_tokens": "{used} of {maximum} tokens were sampled (max_sampled_tokens)",
    "max_seconds": "{used:.1f} of {maximum:g} seconds have passed (max_seconds)",
}


@dataclass(slots=True)
class Reservation:
    """One call's part of the budget, until it has ended. `limit`: the tokens that each of its choices may sample."""

    tokens: int = 0
    limit: int | None = None


class Budget:
    """Reserved from when a call starts, so that calls at the same time cannot pass it together.

    A call that would ask for more tokens than are left waits for those that run, as they may leave some; the last one
    is cut to what is left. Without a limit of its own a call asks for all that is left. A call that the engine did not
    answer is not counted.
    """

    def __init__(self, options: SessionOptions) -> None:
        self._max_calls = math.inf if options.max_calls is None else options.max_calls
        self._max_tokens = options.max_sampled_tokens
        self._max_seconds = math.inf if options.max_seconds is None else options.max_seconds
        self.calls = self.sampled = self.ended = 0
        self.reached: str | None = None
        self._first: float | None = None
        self._running = self._reserved = 0
        #: Set when a running call has ended; there only while calls wait for that.
        self._settled: asyncio.Event | None = None

    @classmethod
    def of(cls, options: SessionOptions) -> Budget | None:
        """None where the session has no limit."""
        limits = (options.max_calls, options.max_sampled_tokens, options.max_seconds)
        return None if limits == (None, None, None) else cls(options)

    def count_earlier(self, calls: Iterable[Call]) -> None:
        """Counts the calls that a journal has already: the session was opened before, by its address or a process
        that was killed. Seconds begin anew."""
        for call in calls:
            if call.outcome in ("error", "ended"):
                continue
            self.calls += 1
            with suppress(RecordError):
                self.sampled += sampled_tokens(call.capture, call.response_body.get("usage"))

    async def reserve(self, body: dict[str, Any]) -> Reservation:
        """The part of the chat or completions call `body`. Raises `BudgetReached`."""
        if self._first is None:
            self._first = time.monotonic()
        choices = choices_of(body)
        while True:
            self._check(self._first)
            if self._max_tokens is None:
                reservation = Reservation()
                break
            asked, left = output_limit(body), self._max_tokens - self.sampled - self._reserved
            wanted = math.inf if asked is None else asked * choices
            if wanted <= left:
                reservation = Reservation(int(wanted))
                break
            if not self._running:
                if left < choices:
                    self._end("max_sampled_tokens", self._max_tokens, self.sampled)
                reservation = Reservation(left, left // choices)
                break
            self._settled = self._settled or asyncio.Event()
            await self._settled.wait()
        self.calls += 1
        self._running += 1
        self._reserved += reservation.tokens
        return reservation

    def must_wait(self, body: dict[str, Any]) -> bool:
        """Whether `reserve` would wait for calls that run."""
        if self._max_tokens is None or not self._running:
            return False
        asked = output_limit(body)
        return asked is None or asked * choices_of(body) > self._max_tokens - self.sampled - self._reserved

    def _check(self, first: float) -> None:
        seconds = time.monotonic() - first
        if self.calls >= self._max_calls:
            self._end("max_calls", self._max_calls, self.calls)
        if self._max_tokens is not None and self.sampled >= self._max_tokens:
            self._end("max_sampled_tokens", self._max_tokens, self.sampled)
        if seconds >= self._max_seconds:
            self._end("max_seconds", self._max_seconds, round(seconds, 3))

    def _end(self, limit: str, maximum: float, used: float) -> NoReturn:
        self.reached = self.reached or limit
        self.ended += 1
        raise BudgetReached(limit, maximum, used, as_message=self.ended <= MESSAGES)

    def settle(self, reservation: Reservation, sampled: int, *, answered: bool) -> None:
        """The call has ended, with so many tokens sampled."""
        self._running -= 1
        self._reserved -= reservation.tokens
        self.sampled += sampled
        if not answered:
            self.calls -= 1
        if self._settled is not None:
            self._settled.set()
            self._settled = None

    def state(self) -> dict[str, Any]:
        """`reached` is the first limit that ended a call, `ended_calls` how many the proxy answered itself."""
        return {
            "calls": self.calls,
            "sampled_tokens": self.sampled,
            "reached": self.reached,
            "ended_calls": self.ended,
        }


def sampled_tokens(capture: TokenCapture | None, usage: object) -> int:
    """How many tokens one call sampled: those that the engine counts, or that came before it broke off, of all choices
    (llama.cpp counts the first alone).
    """
    counted = usage.get("completion_tokens", usage.get("output_tokens")) if isinstance(usage, dict) else 0
    came = 0 if capture is None else sum(len(choice.token_ids or ()) for choice in capture.completions)
    return max(came, counted if type(counted) is int else 0)
