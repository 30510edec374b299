"""What agents reach: the model routes and what goes with them, and nothing else."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from proxy.admin.metrics import Metrics
from proxy.calls.handlers import CHAT, COMPLETIONS, CallRoute
from proxy.calls.models import CountTokens, Models
from proxy.calls.upstream_call import Route
from proxy.dialects.registry import DIALECTS
from proxy.errors import Refusal, error_body
from proxy.http.client_request import ClientRequest
from proxy.http.connection import Handler
from proxy.http.headers import JSON_HEADERS
from proxy.http.target import parse_target
from proxy.sessions.registry import Sessions
from proxy.settings import Settings


class Routes:
    """What a sandbox reaches: the model routes and what goes with them, and nothing else."""

    def __init__(self, sessions: Sessions, settings: Settings, metrics: Metrics) -> None:
        chat = Route("openai-chat", CHAT, settings, metrics)
        calls: dict[str, Handler] = {
            CHAT: CallRoute(chat, sessions),
            COMPLETIONS: CallRoute(Route("openai-completions", COMPLETIONS, settings, metrics), sessions),
        }
        self._posts: dict[str, Handler] = {}
        self._below: dict[str, Handler] = {}
        for dialect in DIALECTS:
            for path in dialect.paths:
                to = self._below if path.endswith("/") else calls
                to[path] = CallRoute(chat, sessions, dialect)
            if dialect.count_path:
                self._posts[dialect.count_path] = CountTokens(dialect, sessions, settings)
        self._posts |= calls
        self._at_once = {path.encode(): (path, call) for path, call in calls.items()}
        self._models = Models(sessions)

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
            below = next((handler for prefix, handler in self._below.items() if path.startswith(prefix)), no_route)
            return self._posts.get(path, below)
        if agent.method == "GET" and (path == "/v1/models" or path.startswith("/v1/models/")):
            return self._models
        return healthy if agent.method in ("GET", "HEAD") and path in ("/", "/health") else no_route


async def healthy(agent: ClientRequest) -> None:
    agent.answer(200, JSON_HEADERS, b'{"status":"ok"}')


async def no_target(agent: ClientRequest) -> None:
    agent.answer(400, JSON_HEADERS, error_body(Refusal(400, "the request's target is no path")))


async def no_route(agent: ClientRequest) -> None:
    paths = [dialect.paths[0] for dialect in DIALECTS]
    served = ", ".join((CHAT, COMPLETIONS, *(f"{path}…" if path.endswith("/") else path for path in paths)))
    message = f"{agent.method} {agent.path} is not served here; the model routes are POST {served}"
    for dialect in DIALECTS:
        if dialect.not_served and agent.path.startswith(dialect.paths):
            message = f"{agent.method} {agent.path} is not served here: {dialect.not_served}"
    if agent.path.startswith(("/sessions", "/metrics")):
        message = f"{agent.method} {agent.path} is not served here but on the admin port: --admin-port opens it"
    status, body = 404, error_body(Refusal(404, message))
    for dialect in DIALECTS:
        if dialect.client_header and agent.header(dialect.client_header) is not None:
            status, body = dialect.error(404, message)
    agent.answer(status, JSON_HEADERS, body)
