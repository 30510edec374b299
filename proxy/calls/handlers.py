"""The model routes: they authorize a request, read its body, and run the call."""

from __future__ import annotations

import asyncio
import logging

from proxy.calls.call import Call
from proxy.calls.dialect_translator import DialectTranslator
from proxy.calls.facts import Facts
from proxy.calls.request_body import Request
from proxy.calls.translator import PassThrough, Translator
from proxy.calls.upstream_call import Route
from proxy.dialects.base import Dialect
from proxy.errors import FAILED, Refusal, error_body
from proxy.http.client_request import AgentLeft, ClientRequest
from proxy.http.headers import JSON_HEADERS
from proxy.sessions.registry import Session, Sessions

log = logging.getLogger("proxy")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ENDED = "the call was ended before its answer came: its session was closed, or the proxy is being stopped"


class Endpoint:
    """A route. `answer` may raise `Refusal`, which is answered in the route's dialect."""

    dialect: Dialect | None = None

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions

    async def __call__(self, agent: ClientRequest) -> None:
        session: Session | None = None
        try:
            # A GET has no effects: a page of another site can make one. The session of its address need not be open.
            session = self.sessions.authorize(agent.headers, agent.session, may_open=agent.method == "POST")
            await (self.answer_unopened(agent) if session is None else self.answer(agent, session))
        except Refusal as refusal:
            refuse(agent, session, refusal, self.dialect)
        except AgentLeft:
            pass  # before its request was here: there is nothing to answer, nor to record
        except asyncio.CancelledError:  # its session is closed, or the proxy stops, and the grace has passed
            if not agent.started:
                refuse(agent, session, Refusal(503, ENDED), self.dialect)
            raise
        except Exception as error:
            log.exception("a call failed by a fault of the proxy's own (%s); please report it", error)
            if not agent.started:
                refuse(agent, session, Refusal(500, FAILED), self.dialect)

    async def answer(self, agent: ClientRequest, session: Session) -> None:
        raise NotImplementedError

    async def answer_unopened(self, agent: ClientRequest) -> None:
        """For a GET at the address of a session that no call has opened yet."""
        raise NotImplementedError


class CallRoute(Endpoint):
    """A model route: of the engine itself (`wire`), or of a dialect that goes to the engine as chat completions."""

    def __init__(self, route: Route, sessions: Sessions, dialect: Dialect | None = None) -> None:
        super().__init__(sessions)
        self.route = route
        self.dialect = dialect

    async def answer(self, agent: ClientRequest, session: Session) -> None:
        raw = await agent.body(self.route.settings.max_body_mb << 20)
        dialect = self.dialect and self.dialect.for_call(agent.path, agent.query)
        number = session.start_call(agent.task)
        self.route.metrics.running += 1
        try:
            options = session.options
            facts = Facts(number, self.route.wire, agent.path, options.policy_version, options.model)
            translator: Translator
            if dialect is None:
                translator = PassThrough(facts.capture_fails)
            else:
                facts.dialect, facts.call_type = dialect.wire, dialect.call_type
                translator = DialectTranslator(dialect, session.earlier)
            await Call(self.route, session, agent, Request.of(raw, options), facts, translator).run()
        finally:
            self.route.metrics.running -= 1
            session.finish_call(agent.task)


def refuse(agent: ClientRequest, session: Session | None, refusal: Refusal, dialect: Dialect | None = None) -> None:
    """Our own answer instead of the engine's, in the shape of the agent's dialect, else of the engine."""
    status, headers = refusal.status, list(JSON_HEADERS)
    if dialect is not None:
        status, body = dialect.error(refusal.status, refusal.message)
    else:
        engine = session.replica.engine if session and session.replica else None
        body = error_body(refusal, flat=engine is not None and engine.flat_errors)
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refusal.status in (408, 413):
        agent.keep_alive = False  # the rest of its body is not waited for
    agent.answer(status, headers, body)
