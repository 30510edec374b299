"""What agents reach: the model routes and what goes with them, and nothing else."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from proxy.admin.metrics import Metrics
from proxy.calls.handlers import CHAT, COMPLETIONS, ByPath, Relay, Translated
from proxy.calls.models import CountTokens, Models
from proxy.dialects.anthropic.dialect import Messages
from proxy.dialects.base import Dialect
from proxy.dialects.gemini.dialect import PREFIXES, Gemini
from proxy.dialects.responses.dialect import Responses
from proxy.errors import Refusal, error_body
from proxy.http.client_request import ClientRequest
from proxy.http.connection import Handler
from proxy.http.headers import JSON_HEADERS
from proxy.http.target import parse_target
from proxy.sessions.registry import Sessions
from proxy.settings import Settings

DIALECTS: tuple[Dialect, ...] = (Messages(), Responses())


class Routes:
    """What a sandbox reaches: the model routes and what goes with them, and nothing else."""

    def __init__(self, sessions: Sessions, settings: Settings, metrics: Metrics) -> None:
        calls: dict[str, Handler] = {
            CHAT: Relay("openai-chat", CHAT, sessions, settings, metrics),
            COMPLETIONS: Relay("openai-completions", COMPLETIONS, sessions, settings, metrics),
            **{one.path: Translated(one, sessions, settings, metrics) for one in DIALECTS},
        }
        self._posts: dict[str, Handler] = {
            **calls,
            "/v1/messages/count_tokens": CountTokens(Messages(), sessions, settings),
        }
        self._at_once = {path.encode(): (path, call) for path, call in calls.items()}
        self._models = Models(sessions)
        self._gemini = ByPath(Gemini(), sessions, settings, metrics)

    def __call__(self, agent: ClientRequest) -> Coroutine[Any, Any, None]:
        found = self._at_once.get(agent.target)
        if found is not None and agent.method == "POST":
            agent.path, handler = found
            return handler(agent)
        return self._found(agent)(agent)

    def _found(self, agent: ClientRequest) -> Handler:
        target = parse_target(agent.target)
        if target is None:
            return no_target
        agent.session, path, agent.query = target
        agent.path = path
        if agent.method == "POST":
            return self._gemini if path.startswith(PREFIXES) else self._posts.get(path, no_route)
        if agent.method == "GET" and (path == "/v1/models" or path.startswith("/v1/models/")):
            return self._models
        return healthy if agent.method in ("GET", "HEAD") and path in ("/", "/health") else no_route


async def healthy(agent: ClientRequest) -> None:
    agent.answer(200, JSON_HEADERS, b'{"status":"ok"}')


async def no_target(agent: ClientRequest) -> None:
    agent.answer(400, JSON_HEADERS, error_body(None, Refusal(400, "the request's target is no path")))


async def no_route(agent: ClientRequest) -> None:
    served = ", ".join((CHAT, COMPLETIONS, *(one.path for one in DIALECTS), Gemini.path + "…"))
    message = f"{agent.method} {agent.path} is not served here; the model routes are POST {served}"
    if agent.path.startswith("/v1/responses"):
        message = (
            f"{agent.method} {agent.path} is not served here: no answer is kept to be fetched, and no background runs. "
            "POST /v1/responses is, with the whole history or a previous_response_id of the same session"
        )
    if agent.path.startswith(("/sessions", "/metrics")):
        message = f"{agent.method} {agent.path} is not served here but on the admin port: --admin-port opens it"
    status, body = 404, error_body(None, Refusal(404, message))
    if agent.header(b"anthropic-version") is not None:
        status, body = Messages().error(404, message)
    agent.answer(status, JSON_HEADERS, body)
