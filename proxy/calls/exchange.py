"""One call, from the agent's request to the journal line: prepare, send, pump, capture, journal, end.

The record is written before the agent can know that the reply is over: from the chunk with the last finish reason on,
what belongs to the end is held back until the line is in the journal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import orjson

from capture.assemble import stream_of
from capture.record import TokenCapture
from capture.sse import Decoder, Event
from proxy.calls.journal_line import journal_line
from proxy.calls.reply_bytes import (
    KEEP_ALIVE,
    is_event_stream,
    loads,
    one_event,
    refusal_text,
    sse,
)
from proxy.calls.request_body import Request
from proxy.calls.upstream_call import REQUEST_ID, Route, UpstreamCall
from proxy.errors import FAILED, Refusal, UpstreamBroke, UpstreamError, error_body
from proxy.http.client_request import AgentLeft, ClientRequest, reply_headers
from proxy.http.headers import JSON_HEADERS, SSE_HEADERS, Headers
from proxy.sessions.registry import Session
from proxy.upstream.client import Response

log = logging.getLogger("proxy")

#: Seconds that an engine may take to end its answer after [DONE].
LINGER = 0.25
#: Seconds that a cancelled call may take over its line.
WRITING = 10.0
#: What an answer that holds an error has in it.
ERROR = b'"error"'
REDIRECTED = "the engine answered with a redirect; give its final address as --upstream"


class Exchange(UpstreamCall):
    """One call on its way, as the agent made it."""

    #: Whether a stream's head goes out with the engine's; a translated one waits, for an error may still have a status.
    starts_at_once = True

    def __init__(self, route: Route, session: Session, number: int, agent: ClientRequest, request: Request) -> None:
        super().__init__(route, session, number, agent, request)
        self._held: list[bytes] = []
        self._holding = False
        self._done = False
        self._reply: tuple[int, Headers, bytes] | None = None
        self._cut = False

    async def run(self) -> None:
        """The story. Whatever happens in it, the call is recorded before the agent is told that it is over."""
        try:
            with self.agent.watched():
                await self._exchange()
        except AgentLeft:
            self.facts.outcome = "aborted"
        except UpstreamError as error:
            self._engine_failed(error)
        except asyncio.CancelledError:  # the proxy, or the session, is being stopped
            self.facts.outcome = "aborted"
            await self._record()
            raise
        except Exception as error:
            log.exception("a call failed by a fault of the proxy's own (%s); please report it", error)
            self._engine_failed(UpstreamBroke(FAILED), status=500)
        await self._record()
        self._end()

    async def _exchange(self) -> None:
        if await self._will_be_unstreamed():
            async with self._kept_alive():
                await self._asked()
        else:
            await self._asked()

    async def _asked(self) -> None:
        response = await self._send()
        try:
            await self._answered(response)
        finally:
            response.close()

    async def _answered(self, response: Response) -> None:
        self.facts.status = response.status
        if 300 <= response.status < 400:
            raise UpstreamBroke(REDIRECTED)
        if response.status != 200:
            await self._error(response)
        elif is_event_stream(response.headers):
            await self._stream(response)
        elif self.request.streams and self.ask and self.ask.unstreamed:
            await self._restream(response)
        else:
            await self._whole(response)

    # what the engine answered

    async def _stream(self, response: Response) -> None:
        """Chunks go out as they come in, less what exists only because we asked."""
        headers = reply_headers(response.headers, self._scrub)
        if self.starts_at_once and not self.agent.started:
            self.agent.start(200, headers)
        decoder = Decoder()

        def take(data: bytes) -> bool:
            self.facts.first_byte()
            out = self._events(decoder.feed(data))
            if self._done:
                response.end_within(LINGER)
            if self._done and self.reader is not None and self.reader.finished and self.reader.error is None:
                self._held.insert(0, out)  # what came with the end goes out with it, as soon as the line is written
                return True
            if out and not self.agent.started:
                self.agent.start(200, headers)
            return self.agent.push(out)

        try:
            await response.pump(take, self.agent.room)
        except UpstreamError:
            if not self._done:  # after [DONE] nothing has to come: an engine that lingers or breaks holds nobody up
                raise
        self._events(decoder.flush())
        self._stream_over()

    def _stream_over(self) -> None:
        assert self.reader is not None
        self._held.append(sse(self.reader.rest()))
        if self.reader.error is not None or not self.reader.finished:
            self.facts.outcome = "truncated"

    def _events(self, events: list[Event]) -> bytes:
        """What may go out now; what belongs to the end of the reply is put aside."""
        out: list[bytes] = []
        for event in events:
            if event.data is not None and ERROR in event.data:
                event = replace(event, data=self._scrub(event.data), raw=self._scrub(event.raw))
            piece = self._event(event)
            if self._holding:
                self._held.append(piece)
            else:
                out.append(piece)
        return b"".join(out)

    def _event(self, event: Event) -> bytes:
        reader, data = self.reader, event.data
        if not data or reader is None:
            return event.raw  # a comment
        if data.strip() == b"[DONE]":
            self._holding = self._done = True
            return sse(reader.rest()) + event.raw
        try:
            given = reader.event(data)
        except Exception as error:
            self._capture_failed(error)
            return event.raw
        if reader.finished or reader.error is not None:
            self._holding = True
        if given is data:
            return event.raw
        if given is None:
            return b""
        name = b"event: " + event.event + b"\n" if event.event else b""
        return name + sse(given)

    async def _whole(self, response: Response) -> None:
        data = self._scrubbed(await response.read())
        self.facts.first_byte()
        await self._side_questions()
        self._reply = 200, reply_headers(response.headers, self._scrub), self._read(data)

    async def _restream(self, response: Response) -> None:
        """The engine answered whole; the agent gets the chunks it would have seen."""
        data = self._scrubbed(await response.read())
        self.facts.first_byte()
        await self._side_questions()
        body = loads(self._read(data))
        if not isinstance(body, dict):
            if self.agent.started:  # by comments
                self._held.append(one_event(data))
            else:
                self._reply = 200, reply_headers(response.headers, self._scrub), data
            return
        chunks = stream_of(body, include_usage=self.request.include_usage)
        self._holding = True
        self._held += [b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks]
        self._held.append(b"data: [DONE]\n\n")
        if not self.agent.started:
            self.agent.start(200, SSE_HEADERS)

    def _read(self, data: bytes) -> bytes:
        """What the agent gets of an answer that came whole; the engine's own bytes where reading it fails."""
        assert self.reader is not None
        try:
            return self.reader.body(data)
        except Exception as error:
            self._capture_failed(error)
            return data

    async def _side_questions(self) -> None:
        if (
            self.session.options.capture
            and self.engine is not None
            and self.reader is not None
            and self.replica is not None
        ):
            try:
                await self.replica.answer_follow_ups(self.engine, self.reader)
            except Exception as error:
                self._capture_failed(error)

    async def _error(self, response: Response) -> None:
        data = self._scrub(await response.read())
        self._note_error(response.status, data)
        self.facts.error_body = loads(data)
        if self.agent.started:  # the reply has begun with comments: the error becomes an event, as in a stream
            self._holding = True
            self._held.append(one_event(data))
        else:
            self._reply = response.status, reply_headers(response.headers, self._scrub), data

    def _note_error(self, status: int, data: bytes) -> None:
        self.facts.outcome = "error"
        self.session.tally.last_error = f"HTTP {status}: {refusal_text(data)}"
        if status == 401:
            log.warning("session %s: the engine refused our key (401); check --upstream-key", self.session.name)

    def _scrub(self, data: bytes) -> bytes:
        return data if self.replica is None else self.replica.scrub(data)

    def _scrubbed(self, data: bytes) -> bytes:
        """An answer, or one event of it: cleaned where it holds an error, for model text is never changed."""
        return self._scrub(data) if ERROR in data else data

    def _engine_failed(self, error: UpstreamError, status: int | None = None) -> None:
        log.warning("session %s, call %d: %s", self.session.name, self.facts.number, error)
        self.session.tally.last_error = str(error)
        if isinstance(error, UpstreamBroke) and self.replica is not None:
            self.replica.doubted = True  # an engine that died may come back as another
        began = self.agent.started and self.reader is not None and self.reader.started
        self.facts.outcome = "truncated" if began else "error"
        self.facts.failure = str(error)
        refusal = Refusal(status or error.status, str(error))
        if not began:
            self.facts.status = refusal.status
        self._tell(error, refusal, began)

    def _tell(self, error: UpstreamError, refusal: Refusal, began: bool) -> None:
        """What the agent hears of a failure: an error while nothing was said, else a cut where the engine's was."""
        body = error_body(refusal, flat=self.engine is not None and self.engine.flat_errors)
        if not began:
            self.facts.error_body = loads(body)
        if not self.agent.started:
            self._reply = refusal.status, list(JSON_HEADERS), body
        elif isinstance(error, UpstreamBroke) and began:
            self._cut = True
        else:
            self._held.append(sse(body))

    @asynccontextmanager
    async def _kept_alive(self) -> AsyncIterator[None]:
        """While an agent that streams waits for an unstreamed answer, comments keep its connection open."""

        async def tick() -> None:
            while True:
                await asyncio.sleep(self.route.settings.keepalive)
                if not self.agent.started:
                    self.agent.start(200, SSE_HEADERS)
                if not self.agent.push(self._keep_alive()):
                    await self.agent.room()

        ticking = asyncio.ensure_future(tick())
        try:
            yield
        finally:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)

    def _keep_alive(self) -> bytes:
        return KEEP_ALIVE

    # the end

    async def _record(self) -> None:
        """The call's line is in the journal when this returns, or the session says why it is not. Never raises."""
        facts, session, metrics = self.facts, self.session, self.route.metrics
        facts.over(session.policy_version)
        try:
            capture, line = self._line()
        except Exception as error:
            self._capture_failed(error)
            self.reader = None
            capture, line = self._line()
        name = self.agent.header(REQUEST_ID)
        session.retries.remember(self.request.raw, self.request.body, name, facts.number, facts.outcome)
        usage = self.reader.usage if self.reader is not None else {}
        session.count(capture, usage)
        self._learn(capture)
        metrics.count(facts.dialect, facts.outcome, facts.ttft_ms, capture)
        written = session.write_at_once(line)
        if written is None:
            await shield_until_done(self._write(line))
        elif not written:
            metrics.journal_failures.inc()

    async def _write(self, line: bytes) -> None:
        metrics = self.route.metrics
        with metrics.journal_queue.track_inprogress():
            if not await self.session.write(line):
                metrics.journal_failures.inc()

    def _line(self) -> tuple[TokenCapture | None, bytes]:
        capture = self._captured()
        return capture, journal_line(self.facts, self.request, self.agent.headers, self.session, self.reader, capture)

    def _end(self) -> None:
        if self.agent.left:
            return
        if self._reply is not None:
            self.agent.answer(*self._reply)
        elif self._cut:
            self.agent.push(b"".join(self._held))
        elif self.agent.started:
            self.agent.end(b"".join(self._held))


async def shield_until_done(work: Coroutine[Any, Any, None]) -> None:
    """Does `work` to its end even where the task that waits for it is cancelled meanwhile; then says so."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=WRITING)
        raise
