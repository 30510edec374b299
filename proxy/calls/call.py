"""One call, from the agent's request to the journal line: translate, send, pass on, record, end.

The record is written before the agent can know that the reply is over: from the chunk with the last finish reason on,
what belongs to the end is held back until the line is in the journal.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from capture.record import TokenCapture
from capture.sse import Event, EventDecoder
from proxy.calls.budget_reply import last_message
from proxy.calls.facts import Facts
from proxy.calls.journal_line import journal_line
from proxy.calls.reply_bytes import is_event_stream, loads, refusal_text
from proxy.calls.reply_writer import ReplyWriter, WholeReply
from proxy.calls.request_body import Request
from proxy.calls.translator import Translator
from proxy.calls.upstream_call import REQUEST_ID, Route, UpstreamCall
from proxy.errors import FAILED, NotBridged, Refusal, UpstreamBroke, UpstreamError, UpstreamFault, error_body
from proxy.http.client_request import AgentLeft, ClientRequest, reply_headers
from proxy.http.headers import Headers
from proxy.sessions.budget import Budget, BudgetReached, Reservation, sampled_tokens
from proxy.sessions.session import Session
from proxy.upstream.client import Response
from proxy.upstream.gate import Gate

log = logging.getLogger("proxy")

#: Seconds that an engine may take to end its answer after [DONE].
LINGER = 0.25
#: Seconds that a cancelled call may take to write its line.
WRITING = 10.0
#: Every answer that contains an error contains these bytes.
ERROR = b'"error"'
REDIRECTED = "the engine answered with a redirect; give its final address as --upstream"


class Call:
    """One call: what the engine is asked (`upstream`), and what the agent gets (`writer`, by `translator`)."""

    def __init__(
        self,
        route: Route,
        session: Session,
        agent: ClientRequest,
        request: Request,
        facts: Facts,
        translator: Translator,
    ) -> None:
        self.route = route
        self.session = session
        self.agent = agent
        self.request = request
        self.facts = facts
        self.translator = translator
        self.upstream = UpstreamCall(route, session, agent, facts)
        self.writer = ReplyWriter(agent)
        self._done = False
        self._reservation: Reservation | None = None
        facts.retry_of = session.retries.of(request.raw, request.body, agent.header(REQUEST_ID))

    async def run(self) -> None:
        """Runs the call. Whatever happens, the call is recorded before the agent gets the end of its reply."""
        try:
            with self.agent.watched():
                await self._exchange()
        except AgentLeft:
            self.facts.outcome = "aborted"
        except BudgetReached as reached:
            self._ended(reached)
        except Refusal as refusal:
            self._refused(refusal)
        except UpstreamError as error:
            self._failed(error)
        except asyncio.CancelledError:  # the proxy, or the session, is being stopped
            self.facts.outcome = "aborted"
            await self._record()
            raise
        except Exception as error:
            log.exception("a call failed by a fault of the proxy's own (%s); please report it", error)
            self._failed(UpstreamBroke(FAILED), status=500)
        await self._record()
        self.writer.end()

    async def _exchange(self) -> None:
        self.request = self.translator.request(self.request, self.session.options)
        if self.session.budget is not None:
            await self._reserve(self.session.budget)
        gate = self.session.replicas.gate
        while gate.closed:
            await self._hold(gate)
        self.facts.take_policy(self.session.options)
        self.request = self.request.to_model(self.session.options.model)
        with gate:
            await self._call_engine()

    async def _reserve(self, budget: Budget) -> None:
        """Takes the call's part of the budget, and cuts the reply to it. Raises `BudgetReached`."""
        if self.request.streams and budget.must_wait(self.request.upstream):
            async with self.writer.kept_alive(self.route.settings.keepalive, self.translator.ping):
                self._reservation = await budget.reserve(self.request.upstream)
        else:
            self._reservation = await budget.reserve(self.request.upstream)
        if self._reservation.limit is not None:
            self.request = self.request.capped(self._reservation.limit, "max_sampled_tokens")

    async def _hold(self, gate: Gate) -> None:
        """Waits while engines are paused."""
        since = time.perf_counter()
        try:
            if self.request.streams:
                async with self.writer.kept_alive(self.route.settings.keepalive, self.translator.ping):
                    await gate.opened()
            else:
                await gate.opened()
        finally:
            self.facts.held_seconds += time.perf_counter() - since

    async def _call_engine(self) -> None:
        if await self.upstream.will_be_unstreamed(self.request):
            async with self.writer.kept_alive(self.route.settings.keepalive, self.translator.ping):
                await self._send()
        else:
            await self._send()

    async def _send(self) -> None:
        response = await self.upstream.send(self.request)
        try:
            await self._answered(response)
        finally:
            response.close()

    async def _answered(self, response: Response) -> None:
        self.facts.status = response.status
        if 300 <= response.status < 400:
            raise UpstreamBroke(REDIRECTED)
        if response.status != 200:
            await self._engine_error(response)
        elif is_event_stream(response.headers):
            await self._stream(response)
        else:
            await self._whole(response)

    # what the engine answered

    async def _stream(self, response: Response) -> None:
        """Chunks go out as they come in, less what exists only because we asked."""
        writer, reader = self.writer, self.upstream.reader
        assert reader is not None
        headers = self._headers(response)
        if self.translator.starts_at_once:
            writer.start(headers)
        decoder = EventDecoder()

        limits = self.route.settings.answer_limits
        received = 0

        def take(data: bytes) -> bool:
            nonlocal received
            self.facts.first_byte()
            out = self._events(decoder.feed(data))
            received += len(data)
            if decoder.pending > limits.event or received > limits.size:
                raise UpstreamBroke(
                    f"the engine's stream is larger than {limits.size >> 20} MiB, or an event of it than "
                    f"{limits.event >> 20} MiB"
                )
            if self._done:
                response.end_within(LINGER)
                if reader.finished and reader.error is None:
                    writer.hold_first(out)  # what came with the end goes out with it, as soon as the line is written
                    return True
            if out:
                writer.start(headers)
            return writer.write(out)

        try:
            await response.pump(take, self.agent.room)
        except UpstreamError:
            if not self._done:  # nothing has to follow [DONE]: an engine that lingers must not delay the agent
                raise
        self._events(decoder.flush())
        writer.hold(self.translator.finish(reader))
        if reader.error is not None or not reader.finished:
            self.facts.outcome = "truncated"

    def _events(self, events: list[Event]) -> bytes:
        """Sends what the agent may have now; holds what belongs to the end of the reply."""
        reader, writer, translator = self.upstream.reader, self.writer, self.translator
        assert reader is not None
        out: list[bytes] = []
        for event in events:
            data = event.data
            if not data:
                piece = translator.comment(event)
            elif data.strip() == b"[DONE]":
                writer.holding = self._done = True
                piece = translator.done(reader, event)
            else:
                if ERROR in data:
                    event = replace(event, data=self.upstream.scrub(data), raw=self.upstream.scrub(event.raw))
                piece = translator.event(reader, event)
                if reader.finished or reader.error is not None:
                    writer.holding = True
            if writer.holding:
                writer.hold(piece)
            else:
                out.append(piece)
        return b"".join(out)

    async def _whole(self, response: Response) -> None:
        """The engine did not stream. The agent gets its answer as it is, or as the events of a stream."""
        reader = self.upstream.reader
        assert reader is not None
        data = await response.read(self.route.settings.answer_limits.size)
        if ERROR in data:  # model text is never changed
            data = self.upstream.scrub(data)
        self.facts.first_byte()
        await self.upstream.ask_follow_ups()
        self.writer.reply(self.translator.whole(reader, data, self._headers(response), streams=self.request.streams))

    async def _engine_error(self, response: Response) -> None:
        data = self.upstream.scrub(await response.read(self.route.settings.answer_limits.size))
        self.facts.outcome = "error"
        self.session.tally.last_error = f"HTTP {response.status}: {refusal_text(data)}"
        if response.status == 401:
            log.warning("session %s: the engine refused our key (401); check --upstream-key", self.session.name)
        self._error_reply(self.translator.engine_error(response.status, data, self._headers(response)))

    def _headers(self, response: Response) -> Headers:
        return reply_headers(response.headers, self.upstream.scrub)

    # what went wrong

    def _refused(self, refusal: Refusal) -> None:
        """The request is not sent as it is: the agent gets our own answer."""
        self.facts.outcome = "error"
        self.facts.failure = self.facts.refusal = refusal.message
        self._error_reply(self.translator.error(refusal, flat=self.upstream.flat_errors))

    def _ended(self, reached: BudgetReached) -> None:
        """The session's budget is used up: the agent is answered so that it stops, and the record has no reply."""
        self.facts.ended, self.facts.failure = reached.to_json(), str(reached)
        refusal = Refusal(403, str(reached), "budget_reached")
        self.facts.error_body = loads(error_body(refusal))
        if reached.as_message:
            self.writer.reply(last_message(self.translator, self.request, self.route.wire, str(reached)))
        else:
            self.writer.reply(self.translator.error(refusal))
        self.facts.outcome, self.facts.status = "ended", refusal.status

    def _failed(self, error: UpstreamError, status: int | None = None) -> None:
        log.warning("session %s, call %d: %s", self.session.name, self.facts.number, error)
        self.session.tally.last_error = self.facts.failure = str(error)
        if isinstance(error, NotBridged):
            self.facts.refusal = str(error)
        if isinstance(error, UpstreamBroke):
            self.upstream.doubt()
        began = self.writer.started and self.upstream.started
        self.facts.outcome = "truncated" if began else "error"
        if began and self.translator.cuts and isinstance(error, UpstreamBroke):
            self.writer.cut()
            return
        engine_error = error.engine_error if isinstance(error, UpstreamFault) else None
        refusal = Refusal(status or error.status, str(error))
        reply = self.translator.error(refusal, engine_error, flat=self.upstream.flat_errors)
        if began:
            self.writer.reply(reply)
        else:
            self._error_reply(reply)

    def _error_reply(self, reply: WholeReply) -> None:
        """Answers the call with this error."""
        self.facts.status = reply.status
        self.facts.error_body = loads(reply.body)
        self.writer.reply(reply)

    # the end

    async def _record(self) -> None:
        """The call's line is in the journal when this returns, or the session says why it is not. Never raises."""
        facts, session, metrics = self.facts, self.session, self.route.metrics
        facts.finish(session.options)
        try:
            capture, line = self._line()
        except Exception as error:
            facts.capture_fails(error)
            self.upstream.reader = None
            capture, line = self._line()
        reader = self.upstream.reader
        usage = reader.usage if reader is not None else {}
        if session.budget is not None and self._reservation is not None:
            sampled = sampled_tokens(capture, usage)
            answered = sampled > 0 or facts.outcome in ("ok", "truncated")
            session.budget.settle(self._reservation, sampled, answered=answered)
        if facts.ended is None:
            name = self.agent.header(REQUEST_ID)
            session.retries.remember(self.request.raw, self.request.body, name, facts.number, facts.outcome)
            session.count(capture, usage)
            self.upstream.learn(capture)
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
        if self.upstream.uncapped:
            self.request = self.request.uncapped()
        reader = self.upstream.reader
        translated = self.translator.translated(reader, self.facts.outcome)
        capture = self.upstream.capture(self.request, translated.call_ids if translated else ())
        line = journal_line(self.facts, self.request, self.agent.headers, self.session, reader, capture, translated)
        return capture, line


async def shield_until_done(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end even where the waiting task is cancelled meanwhile; then raises `CancelledError`."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=WRITING)
        raise
