"""One call, from the agent's request to the journal line: authorize, prepare, send, pump, capture, journal, end.

The record is written before the agent can know that the reply is over: from the chunk with the last finish reason on,
what belongs to the end is held back until the line is in the journal.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from capture.assemble import stream_of
from capture.engines.base import Ask, Engine, Reader, Wants
from capture.record import TokenCapture
from capture.sse import Decoder, Event
from proxy.agent import Agent, AgentLeft, reply_headers
from proxy.errors import Refusal, UpstreamBroke, UpstreamError, UpstreamTimeout, UpstreamUnreachable, error_body
from proxy.line import Facts, journal_line
from proxy.metrics import Metrics
from proxy.replicas import Replica
from proxy.requests import Request
from proxy.sessions import Session, Sessions
from proxy.settings import Settings
from proxy.upstream import Headers, Response

log = logging.getLogger("proxy")

SSE_HEADERS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
KEEP_ALIVE = b": keep-alive\n\n"
#: Codes of a finished stream that an unstreamed call may cure.
LOST_IN_STREAMS = frozenset(
    ("server_ignored_return_token_ids", "streamed_tokens_dropped_by_parser", "logprobs_incomplete_in_stream",
     "logprobs_not_returned", "no_prompt_ids", "usage_not_returned")
)  # fmt: skip
#: Seconds that an engine may take to end its answer after [DONE].
LINGER = 0.25
#: Seconds that a cancelled call may take over its line.
WRITING = 10.0
REDIRECTED = "the engine answered with a redirect; give its final address as --upstream"


class Relay:
    """The route of one wire (`openai-chat`, `openai-completions`)."""

    def __init__(self, wire: str, path: str, sessions: Sessions, settings: Settings, metrics: Metrics) -> None:
        self.wire = wire
        self.path = path
        self.sessions = sessions
        self.settings = settings
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        agent = Agent(scope, receive, send)
        session: Session | None = None
        try:
            session = self.sessions.authorize(agent.headers, scope.get("capture.session"))
            raw = await agent.body(self.settings.max_body_mb << 20)
            with session.call() as number, self.metrics.in_flight.track_inprogress():
                await Exchange(self, session, number, agent, Request.of(raw, session)).run()
        except Refusal as refusal:
            await refuse(agent, session, refusal)
        except AgentLeft:
            pass  # before its request was here: there is no call to record
        except Exception as error:
            log.exception("a call failed by a fault of the proxy's own (%s); please report it", error)
            if not agent.started:
                await refuse(agent, session, Refusal(500, "the proxy failed; its log says how"))


class CutOff(Exception):
    """The engine's reply broke off; the agent's breaks off in the same place."""


class Exchange:
    """One call on its way."""

    def __init__(self, relay: Relay, session: Session, number: int, agent: Agent, request: Request) -> None:
        self.relay = relay
        self.session = session
        self.agent = agent
        self.request = request
        self.facts = Facts(number=number, wire=relay.wire, path=relay.path, policy_version=session.policy_version)
        self.facts.retry_of = session.retry_of(request.fingerprint)
        self.reader: Reader | None = None
        self.ask: Ask | None = None
        self.engine: Engine | None = None
        self._held: list[bytes] = []
        self._holding = False
        self._done = False
        self._reply: tuple[int, Headers, bytes] | None = None
        self._cut = False

    async def run(self) -> None:
        """The story. Whatever happens in it, the call is recorded before the agent is told that it is over."""
        try:
            async with self.agent.watched():
                await self._exchange()
        except AgentLeft:
            self.facts.outcome = "aborted"
        except UpstreamError as error:
            self._engine_failed(error)
        except asyncio.CancelledError:  # the proxy, or the session, is being stopped
            self.facts.outcome = "aborted"
            await surely(self._record())
            raise
        except Exception as error:
            log.exception("a call failed by a fault of the proxy's own (%s); please report it", error)
            self._engine_failed(UpstreamBroke("the proxy failed; its log says how"), status=500)
        await surely(self._record())
        await self._end()

    async def _exchange(self) -> None:
        async with self._kept_alive() if await self._will_be_unstreamed() else nullcontext():
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

    # sending

    async def _send(self) -> Response:
        """The head of the answer of the first replica that can be reached."""
        tried: set[Replica] = set()
        while True:
            replica = self.session.route(tried)
            if replica is None:
                raise UpstreamUnreachable("the engine cannot be reached; is it up?")
            try:
                self.engine = await replica.identify()
                self.facts.sent_to(replica)
                return await self._ask(replica, self.engine)
            except UpstreamUnreachable:
                self.session.replicas.failed(replica)
                tried.add(replica)

    async def _ask(self, replica: Replica, engine: Engine) -> Response:
        """Sends the request with what we ask for besides; where the engine says no, once more as the agent sent it.

        So an agent's own mistake gets the engine's own words, and a refusal of our fields costs the record, not the
        call. A stream whose capture fields are refused (SGLang before streamed ids) is first tried unstreamed.
        """
        wants = self._wants(replica)
        response = await self._post(replica, engine, wants)
        while response.status in (400, 422) and self.ask is not None and self.ask.injected:
            said = replica.scrub(await response.read())
            response.close()
            in_stream = self.request.streams and not self.ask.unstreamed
            if in_stream and engine.refused(self.ask, response.status, loads(said)):
                wants = replace(wants, buffered=True)
            else:
                wants = replace(self._wants(replica), capture=False)
            response = await self._post(replica, engine, wants)
            if response.status == 200 and wants.capture:
                replica.buffered.add(self.relay.wire)
            elif response.status == 200:
                self.facts.refused = refusal_text(said)
                log.warning(
                    "session %s: asked for tokens, the engine refused: %s", self.session.name, self.facts.refused
                )
        return response

    def _wants(self, replica: Replica) -> Wants:
        return Wants(
            capture=self.session.capture,
            top_logprobs=self.session.top_logprobs,
            buffered=self.relay.settings.buffered or self.relay.wire in replica.buffered,
        )

    async def _will_be_unstreamed(self) -> bool:
        """Whether an agent that streams will wait for the whole answer, and needs comments to stay on the line."""
        replica = self.session.route() if self.request.streams else None
        if replica is None:
            return False
        try:
            engine = await replica.identify()
        except UpstreamError:
            return False  # sending finds another replica, or says what is wrong
        return engine.ask(self.relay.wire, self.request.upstream, self._wants(replica)).unstreamed

    async def _post(self, replica: Replica, engine: Engine, wants: Wants) -> Response:
        try:
            self.ask = engine.ask(self.relay.wire, self.request.upstream, wants)
            self.reader = engine.reader(self.relay.wire, self.request.upstream, self.ask)
        except Exception as error:
            self._capture_failed(error)
            self.ask = Ask(dict(self.request.upstream))
            self.reader = Engine().reader(self.relay.wire, self.request.upstream, self.ask)
        body = self.request.dump(self.ask.body)
        headers = [
            *self.agent.upstream_headers(),
            (b"accept-encoding", b"identity"),
            *((name.encode(), value.encode()) for name, value in self.ask.headers.items()),
        ]
        self.relay.metrics.added.observe(time.perf_counter() - self.facts.started)
        return await replica.client.send("POST", self.relay.path, replica.auth(headers, body), body)

    # what the engine answered

    async def _stream(self, response: Response) -> None:
        """Chunks go out as they come in, less what exists only because we asked."""
        if not self.agent.started:
            await self.agent.start(200, reply_headers(response.headers, self._scrub))
        decoder = Decoder()
        try:
            async with asyncio.timeout(None) as lingering:
                async for data in response.chunks():
                    self.facts.first_byte()
                    out = self._events(decoder.feed(data))
                    if out:
                        await self.agent.write(out)
                    if self._done and lingering.when() is None:
                        lingering.reschedule(asyncio.get_running_loop().time() + LINGER)
        except (TimeoutError, UpstreamError):
            if not self._done:  # after [DONE] nothing has to come: an engine that lingers or breaks holds nobody up
                raise
        self._events(decoder.flush())
        assert self.reader is not None
        self._held.append(_sse(self.reader.rest()))
        if self.reader.error is not None or not self.reader.finished:
            self.facts.outcome = "truncated"

    def _events(self, events: list[Event]) -> bytes:
        """What may go out now; what belongs to the end of the reply is put aside."""
        out: list[bytes] = []
        for event in events:
            if event.data is not None:
                clean = self._scrubbed(event.data)
                if clean is not event.data:
                    event = replace(event, data=clean, raw=self._scrub(event.raw))
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
            return _sse(reader.rest()) + event.raw
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
        return name + _sse(given)

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
                self._held.append(_one_event(data))
            else:
                self._reply = 200, reply_headers(response.headers, self._scrub), data
            return
        chunks = stream_of(body, include_usage=self.request.include_usage)
        self._holding = True
        self._held += [b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks]
        self._held.append(b"data: [DONE]\n\n")
        if not self.agent.started:
            await self.agent.start(200, SSE_HEADERS)

    def _read(self, data: bytes) -> bytes:
        """What the agent gets of an answer that came whole; the engine's own bytes where reading it fails."""
        assert self.reader is not None
        try:
            return self.reader.body(data)
        except Exception as error:
            self._capture_failed(error)
            return data

    def _capture_failed(self, error: Exception) -> None:
        """A fault of ours in reading an answer costs the record, not the call."""
        if self.facts.capture_failed is None:
            log.exception("session %s, call %d: the answer could not be read", self.session.name, self.facts.number)
        self.facts.capture_failed = f"{type(error).__name__}: {error}"

    async def _side_questions(self) -> None:
        replica = self.session.replica
        if self.session.capture and self.engine is not None and self.reader is not None and replica is not None:
            await replica.answer_questions(self.engine, self.reader)

    async def _error(self, response: Response) -> None:
        data = self._scrub(await response.read())
        self.facts.outcome = "error"
        self.facts.error_body = loads(data)
        self.session.tally.last_error = f"HTTP {response.status}: {refusal_text(data)}"
        if response.status == 401:
            log.warning("session %s: the engine refused our key (401); check --upstream-key", self.session.name)
        if self.agent.started:  # the reply has begun with comments: the error becomes an event, as in a stream
            self._holding = True
            self._held.append(_one_event(data))
        else:
            self._reply = response.status, reply_headers(response.headers, self._scrub), data

    def _scrub(self, data: bytes) -> bytes:
        replica = self.session.replica
        return data if replica is None else replica.scrub(data)

    def _scrubbed(self, data: bytes) -> bytes:
        """An answer, or one event of it: cleaned where it holds an error, for model text is never changed."""
        return self._scrub(data) if b'"error"' in data else data

    def _engine_failed(self, error: UpstreamError, status: int | None = None) -> None:
        log.warning("session %s, call %d: %s", self.session.name, self.facts.number, error)
        self.session.tally.last_error = str(error)
        began = self.agent.started and self.reader is not None and self.reader.began
        self.facts.outcome = "truncated" if began else "error"
        self.facts.failure = str(error)
        refusal = Refusal(status or (504 if isinstance(error, UpstreamTimeout) else 502), str(error))
        name = self.engine.name if self.engine else None
        body = error_body(name, refusal)
        if not began:
            self.facts.status = refusal.status
            self.facts.error_body = loads(body)
        if not self.agent.started:
            self._reply = refusal.status, [(b"content-type", b"application/json")], body
        elif isinstance(error, UpstreamBroke) and began:
            self._cut = True  # as the engine's own reply was cut
        else:
            self._held.append(b"data: " + body + b"\n\n")

    @asynccontextmanager
    async def _kept_alive(self) -> AsyncIterator[None]:
        """While an agent that streams waits for an unstreamed answer, comments keep its connection open."""

        async def tick() -> None:
            while True:
                await asyncio.sleep(self.relay.settings.keepalive)
                if not self.agent.started:
                    await self.agent.start(200, SSE_HEADERS)
                await self.agent.write(KEEP_ALIVE)

        ticking = asyncio.ensure_future(tick())
        try:
            yield
        finally:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)

    # the end

    async def _record(self) -> None:
        """The call's line is in the journal when this returns, or the session says why it is not. Never raises."""
        facts, session, metrics = self.facts, self.session, self.relay.metrics
        facts.over(session.policy_version)
        try:
            capture, line = self._line()
        except Exception as error:
            self._capture_failed(error)
            self.reader = None
            capture, line = self._line()
        session.remember(self.request.fingerprint, facts.number, facts.outcome)
        usage = self.reader.usage if self.reader is not None else {}
        session.count(capture, usage)
        self._learn(capture)
        metrics.count(facts.wire, facts.outcome, facts.ttft_ms, capture)
        with metrics.journal_queue.track_inprogress():
            if not await session.write(line):
                metrics.journal_failures.inc()

    def _learn(self, capture: TokenCapture | None) -> None:
        """An engine that loses ids or logprobs in its streams is called unstreamed from the next call on.

        Where that loses them too (an engine that knows no ids at all), agents get their streams back.
        """
        replica, ask, wire = self.session.replica, self.ask, self.relay.wire
        if replica is None or ask is None or capture is None or not self.request.streams or self.facts.outcome != "ok":
            return
        lost = next((why.code for why in capture.unavailable.values() if why.code in LOST_IN_STREAMS), None)
        if lost and not ask.unstreamed and wire not in replica.streams_anyway:
            replica.buffered.add(wire)
            log.warning(
                "%s: a streamed call came back incomplete (%s); from now on it is called unstreamed",
                replica.label,
                lost,
            )
        elif lost and ask.unstreamed and wire in replica.buffered:
            replica.buffered.discard(wire)
            replica.streams_anyway.add(wire)
            log.warning("%s: unstreamed calls are incomplete too (%s); streams are streams again", replica.label, lost)

    def _line(self) -> tuple[TokenCapture | None, bytes]:
        capture = self.facts.capture(self.reader, self.session.capture, self.request.is_object)
        return capture, journal_line(self.facts, self.request, self.agent.headers, self.session, self.reader, capture)

    async def _end(self) -> None:
        if self.agent.left:
            return
        if self._reply is not None:
            await self.agent.answer(*self._reply)
        elif self._cut:
            await self.agent.write(b"".join(self._held))
        elif self.agent.started:
            await self.agent.end(b"".join(self._held))


async def refuse(agent: Agent, session: Session | None, refusal: Refusal) -> None:
    engine = session.replica.engine if session and session.replica else None
    body = error_body(engine.name if engine else None, refusal)
    headers = [(b"content-type", b"application/json")]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refusal.status == 413:
        await agent.answer_unread(refusal.status, headers, body)
    else:
        await agent.answer(refusal.status, headers, body)


async def surely(work: Coroutine[Any, Any, None]) -> None:
    """Does `work` to its end even where the task that waits for it is cancelled meanwhile; then says so."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=WRITING)
        raise


def _one_event(data: bytes) -> bytes:
    """What came whole, as one event: its line ends would break it."""
    return b"data: " + b" ".join(data.splitlines()) + b"\n\n"


def _sse(data: bytes | None) -> bytes:
    return b"" if data is None else b"data: " + data + b"\n\n"


def is_event_stream(headers: Headers) -> bool:
    return any(name == b"content-type" and value.lower().startswith(b"text/event-stream") for name, value in headers)


def loads(data: bytes) -> Any:
    with suppress(orjson.JSONDecodeError):
        return orjson.loads(data)
    return None


def refusal_text(data: bytes) -> str:
    """The sentence in an engine's error body, shortened."""
    body = loads(data)
    error = body.get("error", body) if isinstance(body, dict) else body
    text = error.get("message") if isinstance(error, dict) else error
    text = text if isinstance(text, str) else data[:200].decode("utf-8", "replace")
    return " ".join(text.split())[:300]
