"""What agents reach: the model routes and what goes with them, and nothing else."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from proxy.admin.metrics import Metrics
from proxy.calls.forwarded_headers import allowed_names
from proxy.calls.handlers import CHAT, COMPLETIONS, CallRoute
from proxy.calls.models import MODELS, CountTokens, Models
from proxy.calls.upstream_call import Route
from proxy.dialects.registry import DIALECTS
from proxy.errors import Refusal, error_body
from proxy.http.client_request import ClientRequest
from proxy.http.connection import Handler
from proxy.http.headers import JSON_HEADERS, Headers
from proxy.http.target import parse_target
from proxy.sessions.registry import Sessions
from proxy.settings import Settings


class Routes:
    """What a sandbox reaches: the model routes and what goes with them, and nothing else."""

    def __init__(self, sessions: Sessions, settings: Settings, metrics: Metrics) -> None:
        allowed = allowed_names(settings.forward_header)
        chat = Route("openai-chat", CHAT, settings, metrics, allowed)
        calls: dict[str, Handler] = {
            CHAT: CallRoute(chat, sessions),
            COMPLETIONS: CallRoute(Route("openai-completions", COMPLETIONS, settings, metrics, allowed), sessions),
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
        self._models = Models(sessions, settings)

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
        if agent.session == "":
            return no_session
        posts, gets = self._post_handler(path), self._get_handler(path)
        if posts is None and gets is None:
            return no_route
        if agent.method == "POST":
            return posts or GETS_ONLY
        if agent.method in ("GET", "HEAD"):
            return gets or POSTS_ONLY
        return POSTS_ONLY if gets is None else GETS_ONLY

    def _post_handler(self, path: str) -> Handler | None:
        below = (handler for prefix, handler in self._below.items() if path.startswith(prefix))
        return self._posts.get(path) or next(below, None)

    def _get_handler(self, path: str) -> Handler | None:
        if path == MODELS or path.startswith(f"{MODELS}/"):
            return self._models
        return healthy if path in ("/", "/health") else None


async def healthy(agent: ClientRequest) -> None:
    agent.answer(200, JSON_HEADERS, b'{"status":"ok"}')


async def no_target(agent: ClientRequest) -> None:
    _refuse(agent, Refusal(400, "the request's target is no path"))


async def no_session(agent: ClientRequest) -> None:
    _refuse(agent, Refusal(400, "the address names no session: /s/NAME/v1, with a name between the slashes"))


def wrong_method(allow: bytes) -> Handler:
    async def refuse(agent: ClientRequest) -> None:
        methods = allow.decode()
        message = f"{agent.method} {agent.path} is not served here; this route takes {methods}"
        for dialect in DIALECTS:
            if dialect.not_served and agent.path.startswith(dialect.paths):
                message = f"{agent.method} {agent.path} is not served here: {dialect.not_served}"
        _refuse(agent, Refusal(405, message), [(b"allow", allow)])

    return refuse


POSTS_ONLY, GETS_ONLY = wrong_method(b"POST"), wrong_method(b"GET, HEAD")


async def no_route(agent: ClientRequest) -> None:
    paths = [dialect.paths[0] for dialect in DIALECTS]
    served = ", ".join((CHAT, COMPLETIONS, *(f"{path}…" if path.endswith("/") else path for path in paths)))
    message = f"{agent.method} {agent.path} is not served here; the model routes are POST {served}"
    for dialect in DIALECTS:
        if dialect.not_served and agent.path.startswith(dialect.paths):
            message = f"{agent.method} {agent.path} is not served here: {dialect.not_served}"
    if agent.path.startswith(("/sessions", "/metrics")):
        message = f"{agent.method} {agent.path} is not served here but on the admin port: --admin-port opens it"
    _refuse(agent, Refusal(404, message))


def _refuse(agent: ClientRequest, refusal: Refusal, headers: Headers | None = None) -> None:
    """Our own answer where no handler is: in the dialect that the client's headers show, else as vLLM's."""
    status, body = refusal.status, error_body(refusal)
    for dialect in DIALECTS:
        if dialect.client_header and agent.header(dialect.client_header) is not None:
            _, body = dialect.error(status, refusal.message)
    agent.answer(status, [*JSON_HEADERS, *(headers or ())], body)
