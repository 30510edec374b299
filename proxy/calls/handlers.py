"""The model routes: whose call it is, its body, and then one exchange with the engine."""

from __future__ import annotations

from proxy.admin.metrics import Metrics
from proxy.calls.exchange import Exchange
from proxy.calls.request_body import Request
from proxy.calls.translated_exchange import TranslatedExchange
from proxy.calls.upstream_call import Route
from proxy.dialects.base import Dialect
from proxy.dialects.gemini.dialect import Gemini
from proxy.endpoint import Endpoint
from proxy.http.client_request import ClientRequest
from proxy.sessions.registry import Session, Sessions
from proxy.settings import Settings

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


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
        return TranslatedExchange(self.dialect, self.route, session, number, agent, request)


class ByPath(Translated):
    """The route of Gemini's dialect, whose paths say which model is called, and whether it streams."""

    def __init__(self, dialect: Gemini, sessions: Sessions, settings: Settings, metrics: Metrics) -> None:
        super().__init__(dialect, sessions, settings, metrics)
        self.any = dialect

    def exchange(self, session: Session, number: int, agent: ClientRequest, request: Request) -> Exchange:
        dialect = self.any.called(agent.path, agent.query)
        exchange = TranslatedExchange(dialect, self.route, session, number, agent, request)
        exchange.facts.path = agent.path
        return exchange
