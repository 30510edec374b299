"""The routes: what agents reach, and what the person who runs the proxy reaches on another listener."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from proxy.admin.metrics import Metrics
from proxy.calls.handlers import CHAT, COMPLETIONS, ByPath, Relay, Translated
from proxy.calls.models import CountTokens, Models
from proxy.dialects.anthropic.dialect import Messages
from proxy.dialects.base import Dialect
from proxy.dialects.gemini.dialect import PREFIXES, Gemini
from proxy.dialects.responses.dialect import Responses
from proxy.errors import ProxyError, Refusal, SessionError, SettingsError, error_body
from proxy.http.client_request import ClientRequest
from proxy.http.connection import Handler
from proxy.http.headers import JSON_HEADERS
from proxy.http.target import parse_target
from proxy.sessions.registry import Defaults, Session, Sessions
from proxy.settings import Settings, check_engine, check_key, check_token_in, check_top_logprobs
from proxy.upstream.replicas import Replicas

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


async def health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


class Admin:
    """Sessions and metrics, for whoever started the proxy."""

    def __init__(self, sessions: Sessions, settings: Settings, metrics: Metrics, door: SessionFactory) -> None:
        self.sessions = sessions
        self.settings = settings
        self.metrics = metrics
        self.door = door

    def app(self) -> ASGIApp:
        return Starlette(
            routes=[
                Route("/health", health, methods=["GET"]),
                Route("/metrics", self._guarded(self.show_metrics), methods=["GET"]),
                Route("/sessions", self._guarded(self.list), methods=["GET"]),
                Route("/sessions", self._guarded(self.open), methods=["POST"]),
                Route("/sessions/{id}", self._guarded(self.show), methods=["GET"]),
                Route("/sessions/{id}", self._guarded(self.close), methods=["DELETE"]),
                Route("/sessions/{id}/policy", self._guarded(self.policy), methods=["POST"]),
            ]
        )

    def _guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            wanted = self.settings.admin_key
            if wanted is not None and not hmac.compare_digest(given.encode(), wanted.encode()):
                return problem(401, "the admin routes need the admin key: Authorization: Bearer KEY")
            try:
                return await handler(request)
            except SettingsError as error:
                return problem(400, str(error))
            except SessionError as error:
                return problem(404 if str(error).startswith("there is no session") else 409, str(error))
            except ProxyError as error:
                return problem(502, str(error))

        return guarded

    async def show_metrics(self, request: Request) -> Response:
        self.metrics.sessions.set(len(list(self.sessions)))
        self.metrics.tasks.set(len(asyncio.all_tasks()))
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4")

    async def list(self, request: Request) -> Response:
        return JSONResponse({"sessions": [one.state() for one in self.sessions]})

    async def open(self, request: Request) -> Response:
        fields = await _object(request)
        unknown = set(fields) - _SESSION_FIELDS
        if unknown:
            raise SettingsError(f"unknown field {sorted(unknown)[0]!r}; known are {', '.join(sorted(_SESSION_FIELDS))}")
        if "\0" in str(fields.get("journal")):
            raise SettingsError("`journal` is no path")
        if "name" not in fields or "journal" not in fields:
            raise SettingsError(
                "a session needs a `name` and a `journal`, the path of its llm_trajectory.jsonl: "
                '{"name": "a", "journal": "a.jsonl"}'
            )
        for name, kinds in _SESSION_TYPES.items():
            if fields.get(name) is not None and not isinstance(fields[name], kinds):
                raise SettingsError(f"`{name}` is of the wrong type")
        journal = Path(str(fields.pop("journal")))
        session = self.door.open_session(str(fields.pop("name")), journal=journal, **fields)
        host = request.url.hostname or "127.0.0.1"
        root = f"http://{host}:{self.door.port}"
        return JSONResponse(
            {
                "session": session.id,
                "api_key": session.api_key,
                "base_url": f"{root}/v1",
                "anthropic_base_url": root,
            },
            status_code=201,
        )

    async def show(self, request: Request) -> Response:
        return JSONResponse(self.sessions.get(request.path_params["id"]).state())

    async def close(self, request: Request) -> Response:
        return JSONResponse(await self.sessions.close(request.path_params["id"]))

    async def policy(self, request: Request) -> Response:
        version = (await _object(request)).get("version")
        if not isinstance(version, str | int) or isinstance(version, bool):
            raise SettingsError('give the policy\'s version as a string: {"version": "step-120"}')
        named, defaults = request.path_params["id"], self.sessions.defaults
        if named == "default" and defaults is not None and self.sessions.default is None:
            defaults.policy_version = str(version)  # the default itself lives in another worker
            return JSONResponse({"policy_version": version})
        session = self.sessions.get(named)
        self.sessions.set_policy(session, str(version))
        if defaults is not None and session is self.sessions.default:
            defaults.policy_version = str(version)
        return JSONResponse(session.state())


_SESSION_TYPES: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "journal": (str,),
    "engine": (str,),
    "upstream": (str, list),
    "upstream_key": (str,),
    "model": (str,),
    "capture": (bool,),
    "top_logprobs": (int,),
    "policy_version": (str,),
    "sampling": (dict,),
    "token_in": (str,),
}
_SESSION_FIELDS = set(_SESSION_TYPES)


class SessionFactory:
    """Opens sessions on this proxy's engines, or on one that the session names."""

    def __init__(self, sessions: Sessions, settings: Settings) -> None:
        self.sessions = sessions
        self.settings = settings
        self.port = 0
        self.pools: dict[tuple[tuple[str, ...], str | None, str], Replicas] = {}

    def replicas(self, urls: tuple[str, ...], key: str | None, engine: str) -> Replicas:
        """The replicas at `urls`; sessions that name the same share connections and what was learned of the engine."""
        if not urls:
            raise SettingsError("no upstream: start the proxy with --upstream, or name one for the session")
        found = self.pools.get((urls, key, engine))
        if found is None:
            found = Replicas(list(urls), key=key, engine_name=engine, timeouts=self.settings.timeouts)
            self.pools[(urls, key, engine)] = found
        return found

    def open_session(
        self,
        name: str,
        *,
        journal: Path | None = None,
        engine: str | None = None,
        upstream: str | list[str] | None = None,
        upstream_key: str | None = None,
        model: str | None = None,
        capture: bool | None = None,
        top_logprobs: int | None = None,
        policy_version: str | None = None,
        sampling: dict[str, object] | None = None,
        token_in: str | None = None,
        key: str | None = None,
        session_id: str | None = None,
    ) -> Session:
        """Opens a session; what is not given is as the proxy's settings say. Raises `SessionError`, `SettingsError`."""
        ours = self.settings
        urls = ours.upstream if upstream is None else [upstream] if isinstance(upstream, str) else upstream
        if not all(isinstance(url, str) for url in urls):
            raise SettingsError("`upstream` must be an address, or a list of addresses")
        check_engine(engine or ours.engine)
        check_top_logprobs(top_logprobs)
        check_key(upstream_key)
        captured = ours.capture if capture is None else capture
        check_token_in(mode := ours.token_in if token_in is None else token_in, captured or token_in is None)
        if upstream is not None and upstream_key is None:
            secret = None  # our own engine's key is for our own engine
        else:
            secret = upstream_key if upstream_key is not None else ours.upstream_key
        replicas = self.replicas(tuple(urls), secret, engine or ours.engine)
        return self.sessions.open(
            name,
            journal=journal,
            replicas=replicas,
            key=key,
            model=model if model is not None else ours.model,
            capture=captured,
            top_logprobs=ours.top_logprobs if top_logprobs is None else top_logprobs,
            policy_version=ours.policy_version if policy_version is None else policy_version,
            sampling=ours.sampling if sampling is None else sampling,
            token_in=mode if captured else "off",
            session_id=session_id,
        )

    def defaults(self) -> Defaults:
        """What sessions are like that are made by their names alone."""
        ours = self.settings
        return Defaults(
            replicas=self.replicas(tuple(ours.upstream), ours.upstream_key, ours.engine),
            model=ours.model,
            capture=ours.capture,
            top_logprobs=ours.top_logprobs,
            policy_version=ours.policy_version,
            sampling=ours.sampling,
            token_in=ours.token_in if ours.capture else "off",
        )

    async def close(self) -> None:
        for pool in self.pools.values():
            await pool.close()


def problem(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status_code=status)


async def _object(request: Request) -> dict[str, Any]:
    try:
        value = orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        raise SettingsError(f"the body is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise SettingsError("the body is not a JSON object")
    return value
