"""The engine's side of a call: which replica, with which capture fields, and again without them where it refuses."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from capture.engines.base import Engine
from capture.engines.grammars import grammars, offers_tools
from capture.engines.inject import final_usage
from capture.engines.meaning import LOGITS
from capture.engines.reader import Reader
from capture.engines.request import CaptureOptions, UpstreamRequest
from capture.record import TokenCapture
from capture.sequences.versions import version_in_name
from capture.unavailable import why
from proxy.admin.metrics import Metrics
from proxy.calls.facts import Facts
from proxy.calls.forwarded_headers import forwarded
from proxy.calls.reply_bytes import loads, refusal_text
from proxy.calls.request_body import Request
from proxy.dialects.engine_errors import limit_too_large
from proxy.errors import Refusal, UpstreamError, UpstreamUnreachable
from proxy.http.client_request import ClientRequest
from proxy.sessions.session import Session
from proxy.settings import Settings
from proxy.token_in.planner import PromptPlan, TokenIn
from proxy.upstream.client import Response
from proxy.upstream.replicas import Replica

log = logging.getLogger("proxy")

#: Codes of a finished stream that an unstreamed call may cure.
LOST_IN_STREAMS = frozenset(
    ("server_ignored_return_token_ids", "streamed_tokens_dropped_by_parser", "logprobs_incomplete_in_stream",
     "logprobs_not_returned", "no_prompt_ids", "usage_not_returned", "count_mismatch_ids_logprobs")
)  # fmt: skip


#: The header by which a client names a call, the same when it makes it again.
REQUEST_ID = b"x-client-request-id"


@dataclass(frozen=True, slots=True)
class Route:
    """What all calls of one route share: the engine's wire (`openai-chat`, `openai-completions`) and its path there."""

    wire: str
    path: str
    settings: Settings
    metrics: Metrics
    #: Names of the agent's headers that go on.
    forwarded: frozenset[bytes]


class UpstreamCall:
    """The engine's side of a call: which replica was asked, for what, and what reads its answer."""

    def __init__(self, route: Route, session: Session, agent: ClientRequest, facts: Facts) -> None:
        self.route = route
        self.session = session
        self.agent = agent
        self.facts = facts
        #: What reads the answer; None before the request is sent.
        self.reader: Reader | None = None
        self.ask: UpstreamRequest | None = None
        #: The replica of this call. The session may be on another by now: its calls overlap, and any may find it down.
        self.replica: Replica | None = None
        self.engine: Engine | None = None
        self.plan = PromptPlan()
        #: Whether a limit of the reply's length that the proxy added did not fit the context.
        self.uncapped = False
        self._made: tuple[Engine, CaptureOptions, UpstreamRequest] | None = None

    async def send(self, request: Request) -> Response:
        """The head of the answer of the first replica that can be reached. Raises `UpstreamError`."""
        tried: set[Replica] = set()
        while True:
            replica = self.session.route(tried)
            if replica is None:
                raise UpstreamUnreachable("the engine cannot be reached; is it up?")
            self.replica = replica
            try:
                self.engine = await replica.identify()
                self.facts.sent_to(replica)
                if self.facts.policy_version is None:
                    await self._read_version(replica, request.upstream.get("model"))
                self._refuse_grammars(self.engine, request.upstream)
                return await self._ask(replica, self.engine, request)
            except UpstreamUnreachable:
                self.session.replicas.failed(replica)
                tried.add(replica)

    async def _read_version(self, replica: Replica, model: object) -> None:
        """Where nobody told the version, it is that of the adapter which the call names, as TRL names them."""
        version = version_in_name(model)
        if version is None:
            return
        adapter = str(model).rpartition(":")[2]  # SGLang's BASE:ADAPTER
        with suppress(UpstreamError):  # the call itself says what is wrong
            if await replica.serves_adapter(adapter):
                self.facts.policy_version, self.facts.version_in_name = version, True

    async def _ask(self, replica: Replica, engine: Engine, request: Request) -> Response:
        """Sends the request with what we ask for besides; where the engine refuses, once more as the agent sent it.

        So an agent's own mistake gets the engine's own words, and a refusal of our fields costs the record, not the
        call. A stream whose capture fields are refused (SGLang before streamed ids) is first tried unstreamed.
        """
        wants = self._wants(replica)
        if self.session.token_in is None:
            response = await self._post(replica, engine, request, wants)
        else:
            response = await self._bridged(replica, engine, request, wants, self.session.token_in)
        while response.status in (400, 422) and self.ask is not None and self.ask.injected:
            refusal = await _read_refusal(replica, response)
            in_stream = request.streams and not self.ask.unstreamed
            if in_stream and engine.refused(self.ask, response.status, loads(refusal)):
                wants = wants._replace(buffered=True)
            else:
                wants = self._wants(replica)._replace(capture=False)
            response = await self._post(replica, engine, request, wants)
            if response.status == 200 and wants.capture:
                replica.buffered.add(self.route.wire)
            elif response.status == 200:
                self.facts.refused = refusal_text(refusal)
                log.warning(
                    "session %s: asked for tokens, the engine refused: %s", self.session.name, self.facts.refused
                )
        return response

    async def _bridged(
        self, replica: Replica, engine: Engine, request: Request, wants: CaptureOptions, token_in: TokenIn
    ) -> Response:
        """Sends the request, its prompt as ids where it continues a known call (token-in); where the engine
        refuses those, once more without. Raises `NotBridged` where token-in is required and cannot be done.
        """
        body = {} if request.lenient else request.upstream
        self.plan = await token_in.plan(replica, engine, self.route.wire, body)
        token_in.require(self.plan)
        response = await self._post(replica, engine, request, wants)
        if self.plan.prompt is not None and response.status in (400, 413, 422, 500):
            self.plan.drop("engine_refused", refusal_text(await _read_refusal(replica, response)))
            token_in.require(self.plan)
            response = await self._post(replica, engine, request, wants)
        return response

    def _wants(self, replica: Replica) -> CaptureOptions:
        return CaptureOptions(
            capture=self.session.options.capture,
            top_logprobs=self.session.options.top_logprobs,
            buffered=self.route.settings.buffered or self.route.wire in replica.buffered,
        )

    async def will_be_unstreamed(self, request: Request) -> bool:
        """Whether an agent that streams will wait for the whole answer, and needs pings to stay on the line."""
        replica = self.session.route() if request.streams else None
        if replica is None:
            return False
        try:
            engine = await replica.identify()
        except UpstreamError:
            return False  # sending finds another replica, or says what is wrong
        return self._asks(engine, request, self._wants(replica)).unstreamed

    def _asks(self, engine: Engine, request: Request, wants: CaptureOptions) -> UpstreamRequest:
        """What to ask of an engine, made once where it is asked about before it is sent."""
        made = self._made
        if made is None or made[0] is not engine or made[1] != wants:
            made = self._made = engine, wants, engine.ask(self.route.wire, request.upstream, wants)
        return made[2]

    def _refuse_grammars(self, engine: Engine, body: dict[str, Any]) -> None:
        if self.session.options.grammars != "refuse":
            return
        found = grammars(body)
        if engine.tool_grammar is not None and offers_tools(body):
            found.append(engine.tool_grammar)
        if found:
            raise Refusal(
                400,
                f"this call would be sampled with {found[0]}, which biases logprobs, and this session refuses that "
                "(--grammars refuse); make the call without it",
            )

    async def _post(self, replica: Replica, engine: Engine, request: Request, wants: CaptureOptions) -> Response:
        """Sends the request; where the engine refuses a limit that the agent did not set, once more without it."""
        if self.uncapped:
            request = request.uncapped()
        response = await self._post_once(replica, engine, request, wants)
        if response.status in (400, 422) and request.limit_is_ours:
            self.uncapped = limit_too_large(refusal_text(await _read_refusal(replica, response)))
            response = await self._post_once(replica, engine, request.uncapped() if self.uncapped else request, wants)
        return response

    async def _post_once(self, replica: Replica, engine: Engine, request: Request, wants: CaptureOptions) -> Response:
        try:
            self.ask, self._made = self._asks(engine, request, wants), None  # its body may be changed from here on
            if (
                not wants.capture
                and self.session.options.max_sampled_tokens is not None
                and self.ask.body.get("stream")
            ):
                self.ask.injected += tuple(final_usage(self.ask))  # nothing else counts what it samples
            self.reader = Reader(engine, self.route.wire, request.upstream, self.ask)
            self.reader.prompt_before = self.session.prompt
        except Exception as error:
            self.facts.capture_fails(error)
            self.ask = UpstreamRequest(dict(request.upstream))
            self.reader = Reader(Engine(), self.route.wire, request.upstream, self.ask)
        if self.plan.prompt is not None and wants.capture:
            engine.set_prompt_ids(self.ask.body, self.plan.prompt)
        body = request.dump(self.ask.body)
        headers = [
            *forwarded(self.agent.headers, self.route.forwarded),
            (b"accept-encoding", b"identity"),
            *((name.encode(), value.encode()) for name, value in self.ask.headers.items()),
        ]
        self.route.metrics.added.observe(time.perf_counter() - self.facts.started - self.facts.held_seconds)
        return await replica.client.send("POST", self.route.path, replica.auth(headers, body), body)

    @property
    def flat_errors(self) -> bool:
        return self.engine is not None and self.engine.flat_errors

    @property
    def started(self) -> bool:
        """Whether part of an answer has arrived."""
        return self.reader is not None and self.reader.started

    def doubt(self) -> None:
        """The engine broke off: another engine may come back at its address."""
        if self.replica is not None:
            self.replica.doubt()

    def scrub(self, data: bytes) -> bytes:
        """`data` without the engine's key and address."""
        return data if self.replica is None else self.replica.scrub(data)

    async def ask_follow_ups(self) -> None:
        """Asks the engine for what its answer does not say and its other routes do."""
        if self.engine is None or self.reader is None or self.replica is None or not self.session.options.capture:
            return
        try:
            await self.replica.answer_follow_ups(self.engine, self.reader)
        except Exception as error:
            self.facts.capture_fails(error)

    def capture(self, request: Request, call_ids: Sequence[str] = ()) -> TokenCapture | None:
        """The token capture of a call that has ended; token-in remembers the call for those that continue it.

        `call_ids` are the ids of the answer's tool calls where the agent got others than the engine gave.
        """
        facts, token_in = self.facts, self.session.token_in
        capture = facts.capture(self.reader, self.session.options.capture, request.is_object)
        if self.replica is not None and self.replica.measured is not None:
            facts.logprobs = self.replica.describe_logprobs()  # it may have been measured while the call ran
        if capture is not None and facts.logprobs is not None and facts.logprobs["values"] == LOGITS:
            capture = replace(
                capture, unavailable=capture.unavailable | {"logprobs": why("logits_not_logprobs")}, digest=None
            )
        if capture is not None and capture.prompt_token_ids is not None:
            self.session.prompt = capture.prompt_token_ids
        if token_in is not None and facts.token_in is None:
            facts.token_in = token_in.record_call(
                self.plan, facts.number, self.engine, request.upstream, facts.outcome, capture, self.reader, call_ids
            )
        return capture

    def learn(self, capture: TokenCapture | None) -> None:
        """An engine that loses ids or logprobs in its streams is called unstreamed from the next call on.

        Where that loses them too (an engine that knows no ids at all), agents get their streams back.
        """
        replica, ask, reader, wire = self.replica, self.ask, self.reader, self.route.wire
        if replica is None or ask is None or reader is None or capture is None or self.facts.outcome != "ok":
            return
        if reader.request.get("stream") is not True:
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


async def _read_refusal(replica: Replica, response: Response) -> bytes:
    """A refusal that is not passed on to the agent; its connection is free again, also where the agent leaves now."""
    try:
        return replica.scrub(await response.read())
    finally:
        response.close()
