"""What every route for agents does first and last: whose call it is, and an answer of our own where none came."""

from __future__ import annotations

import asyncio
import logging

from proxy.dialects.base import Dialect
from proxy.errors import FAILED, Refusal, error_body
from proxy.http.client_request import AgentLeft, ClientRequest
from proxy.http.headers import JSON_HEADERS
from proxy.sessions.registry import Session, Sessions

log = logging.getLogger("proxy")

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


def refuse(agent: ClientRequest, session: Session | None, refusal: Refusal, dialect: Dialect | None = None) -> None:
    """Our own answer instead of the engine's, in the shape of the agent's dialect, else of the engine."""
    status, headers = refusal.status, list(JSON_HEADERS)
    if dialect is not None:
        status, body = dialect.error(refusal.status, refusal.message)
    else:
        engine = session.replica.engine if session and session.replica else None
        body = error_body(engine.name if engine else None, refusal)
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refusal.status in (408, 413):
        agent.keeps = False  # the rest of its body is not waited for
    agent.answer(status, headers, body)
