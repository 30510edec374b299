"""The model routes: whose call it is, its body, and then one exchange with the engine."""

from __future__ import annotations

import asyncio
import logging

from proxy.admin.metrics import Metrics
from proxy.calls.exchange import Exchange
from proxy.calls.request_body import Request
from proxy.calls.translated_exchange import TranslatedExchange
from proxy.calls.upstream_call import Route
from proxy.dialects.base import Dialect
from proxy.errors import FAILED, Refusal, error_body
from proxy.http.client_request import AgentLeft, ClientRequest
from proxy.http.headers import JSON_HEADERS
from proxy.sessions.registry import Session, Sessions
from proxy.settings import Settings

log = logging.getLogger("proxy")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ENDED = "the call was ended before its answer came: its session was closed, or the proxy is being stopped"


class Endpoint:
    """A route. `answer` may raise `Refusal`, which is told in the words of the route's dialect."""

    dialect: Dialect | None = None

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions

    async def __call__(self, agent: ClientRequest) -> None:
        session: Session | None = None
        try:
            session = self.sessions.authorize(agent.headers, agent.session)
            await self.answer(agent, session)
        except Refusal as refusal:
            refuse(agent, session, refusal, self.dialect)
        except AgentLeft:
            pass  # before its request was here: there is nothing to answer, nor to record
        except asyncio.CancelledError:  # its session is closed, or the proxy stops, and the grace is over
            if not agent.started:
                refuse(agent, session, Refusal(503, ENDED), self.dialect)
            raise
        except Exception as error:
            log.exception("a call failed by a fault of the proxy's own (%s); please report it", error)
            if not agent.started:
                refuse(agent, session, Refusal(500, FAILED), self.dialect)

    async def answer(self, agent: ClientRequest, session: Session) -> None:
        raise NotImplementedError


class Relay(Endpoint):
    """The route of one wire (`openai-chat`, `openai-completions`): calls go on as the agent made them."""

    def __init__(self, wire: str, path: str, sessions: Sessions, settings: Settings, metrics: Metrics) -> None:
        super().__init__(sessions)
        self.route = Route(wire, path, settings, metrics)

    async def answer(self, agent: ClientRequest, session: Session) -> None:
        raw = await agent.body(self.route.settings.max_body_mb << 20)
        number = session.begins(agent.task)
        self.route.metrics.running += 1
        try:
            await self.exchange(session, number, agent, Request.of(raw, session)).run()
        finally:
            self.route.metrics.running -= 1
            session.ends(agent.task)

    def exchange(self, session: Session, number: int, agent: ClientRequest, request: Request) -> Exchange:
        return Exchange(self.route, session, number, agent, request)


class Translated(Relay):
    """The route of a dialect that the engine hears as chat completions."""

    def __init__(self, dialect: Dialect, sessions: Sessions, settings: Settings, metrics: Metrics) -> None:
        super().__init__("openai-chat", CHAT, sessions, settings, metrics)
        self.dialect: Dialect = dialect

    def exchange(self, session: Session, number: int, agent: ClientRequest, request: Request) -> Exchange:
        dialect = self.dialect.for_call(agent.path, agent.query)
        return TranslatedExchange(dialect, self.route, session, number, agent, request)


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
