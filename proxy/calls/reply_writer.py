"""The agent's side of a call: pieces go out as they come, the end of the reply only with `end`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from proxy.calls.reply_bytes import one_event
from proxy.http.client_request import ClientRequest
from proxy.http.headers import SSE_HEADERS, Headers


@dataclass(frozen=True, slots=True)
class WholeReply:
    """A reply that does not stream; `event` is what stands for it in a stream that has begun."""

    status: int
    headers: Headers
    body: bytes
    event: bytes | None = None


class ReplyWriter:
    """`write` sends at once; held events and a whole reply are sent by `end`.

    So the journal line of a call is written before its agent can know that the reply has ended.
    """

    __slots__ = ("_agent", "_cut", "_held", "_whole", "holding")

    def __init__(self, agent: ClientRequest) -> None:
        self._agent = agent
        self._held: list[bytes] = []
        self._whole: WholeReply | None = None
        self._cut = False
        #: Whether all that comes from here on belongs to the end.
        self.holding = False

    @property
    def started(self) -> bool:
        """Whether the agent has seen the head of a stream."""
        return self._agent.started

    def start(self, headers: Headers) -> None:
        if not self._agent.started:
            self._agent.start(200, headers)

    def write(self, data: bytes) -> bool:
        """Sends events now. Returns whether there is room for more."""
        return self._agent.push(data)

    def hold(self, data: bytes) -> None:
        """Holds events, and all that follow, for the end."""
        self.holding = True
        self._held.append(data)

    def hold_first(self, data: bytes) -> None:
        """Holds events that come before those already held."""
        self._held.insert(0, data)

    def reply(self, reply: WholeReply | bytes) -> None:
        """The whole reply, or all its events. After a keep-alive a whole reply becomes an event."""
        if isinstance(reply, bytes):
            self.hold(reply)
        elif self._agent.started:
            self.hold(one_event(reply.body) if reply.event is None else reply.event)
        else:
            self._whole = reply

    def cut(self) -> None:
        """The stream breaks off without an end, as the engine's did."""
        self._cut = True

    def end(self) -> None:
        """Sends the end of the reply."""
        agent = self._agent
        if agent.left:
            return
        if self._whole is not None:
            agent.answer(self._whole.status, self._whole.headers, self._whole.body)
            return
        rest = b"".join(self._held)
        if self._cut:
            agent.push(rest)
        elif agent.started or rest:
            self.start(SSE_HEADERS)
            agent.end(rest)

    @asynccontextmanager
    async def kept_alive(self, seconds: float, ping: Callable[[], bytes]) -> AsyncIterator[None]:
        """While the agent waits for a stream that the engine was not asked to stream, it gets a ping this often."""

        async def tick() -> None:
            while True:
                await asyncio.sleep(seconds)
                self.start(SSE_HEADERS)
                if not self._agent.push(ping()):
                    await self._agent.room()

        ticking = asyncio.ensure_future(tick())
        try:
            yield
        finally:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)
