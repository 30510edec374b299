"""The admin routes: sessions and metrics, on their own listener."""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from proxy.admin.metrics import Metrics
from proxy.admin.records import records
from proxy.errors import NoSuchSession, ProxyError, SessionError, SettingsError
from proxy.sessions.factory import SessionFactory
from proxy.sessions.policy import Policy
from proxy.sessions.registry import Sessions
from proxy.settings import Settings
from proxy.upstream.gate import seconds_to_wait


async def health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


class Admin:
    """Sessions and metrics, for the operator of the proxy."""

    def __init__(self, sessions: Sessions, settings: Settings, metrics: Metrics, factory: SessionFactory) -> None:
        self.sessions = sessions
        self.settings = settings
        self.metrics = metrics
        self.factory = factory

    def app(self) -> ASGIApp:
        return Starlette(
            routes=[
                Route("/health", health, methods=["GET"]),
                Route("/metrics", self._guarded(self.show_metrics), methods=["GET"]),
                Route("/sessions", self._guarded(self.list), methods=["GET"]),
                Route("/sessions", self._guarded(self.open), methods=["POST"]),
                Route("/sessions/{id}", self._guarded(self.show), methods=["GET"]),
                Route("/sessions/{id}", self._guarded(self.close), methods=["DELETE"]),
                Route("/sessions/{id}/policy", self._guarded(self.session_policy), methods=["POST"]),
                Route("/sessions/{id}/records", self._guarded(self.records), methods=["GET"]),
                Route("/policy", self._guarded(self.policy), methods=["POST"]),
                Route("/pause", self._guarded(self.pause), methods=["POST"]),
                Route("/resume", self._guarded(self.resume), methods=["POST"]),
            ],
            exception_handlers=ROUTE_ERRORS,
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
            except NoSuchSession as error:
                return problem(404, str(error))
            except SessionError as error:
                return problem(409, str(error))
            except ProxyError as error:
                return problem(502, str(error))

        return guarded

    async def show_metrics(self, request: Request) -> Response:
        self.metrics.sessions.set(len(list(self.sessions)))
        self.metrics.tasks.set(len(asyncio.all_tasks()))
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4")

    async def list(self, request: Request) -> Response:
        return JSONResponse({"sessions": [session.state() for session in self.sessions]})

    async def open(self, request: Request) -> Response:
        fields = await json_object(request)
        name, journal = fields.pop("name", None), fields.pop("journal", None)
        if name is None or journal is None:
            raise SettingsError(
                "a session needs a `name` and a `journal`, the path of its llm_trajectory.jsonl: "
                '{"name": "a", "journal": "a.jsonl"}'
            )
        if not isinstance(name, str):
            raise SettingsError("`name` is of the wrong type")
        if not isinstance(journal, str):
            raise SettingsError("`journal` is of the wrong type")
        if "\0" in journal:
            raise SettingsError("`journal` is no path")
        self.settings.session_options(fields)  # what is no option of a session is refused by its name
        session = self.factory.open_session(name, journal=Path(journal), **fields)
        host = request.url.hostname or "127.0.0.1"
        root = f"http://{host}:{self.factory.port}"
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

    async def session_policy(self, request: Request) -> Response:
        policy = Policy.of(await json_object(request))
        named, defaults = request.path_params["id"], self.sessions.defaults
        if named == "default" and defaults is not None and self.sessions.default is None:
            self.sessions.set_default_policy(policy)  # the default itself lives in another worker
            return JSONResponse(policy.fields())
        session = self.sessions.get(named)
        self.sessions.set_policy(session, policy)
        if defaults is not None and session is self.sessions.default:
            self.sessions.set_default_policy(policy)
        return JSONResponse(session.state())

    async def records(self, request: Request) -> Response:
        skip = request.query_params.get("from", "0")
        if not re.fullmatch(r"[0-9]{1,15}", skip):
            raise SettingsError("`from` is the number of records to leave out, such as ?from=12")
        lines = await records(self.sessions.journal(request.path_params["id"]), int(skip))
        return StreamingResponse(lines, media_type="application/x-ndjson")

    async def policy(self, request: Request) -> Response:
        policy = Policy.of(await json_object(request))
        self.factory.set_all_policies(policy)
        return JSONResponse(policy.fields())

    async def pause(self, request: Request) -> Response:
        wait = seconds_to_wait(await json_object(request), self.settings.grace)
        return JSONResponse({"in_flight": await self.factory.pause(wait)})

    async def resume(self, request: Request) -> Response:
        fields = await json_object(request)
        self.factory.resume(Policy.of(fields) if fields else None)
        return JSONResponse({"paused": False})


def problem(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status_code=status)


async def no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"there is no {request.method} {request.url.path} here; docs/sessions.md lists the routes"
    refused = problem(error.status_code, what)
    refused.headers.update(error.headers or {})
    return refused


ROUTE_ERRORS: dict[Any, Any] = {HTTPException: no_route}


async def json_object(request: Request) -> dict[str, Any]:
    """A request's body; empty where there is none. Raises `SettingsError`."""
    try:
        value = orjson.loads(await request.body() or b"{}")
    except orjson.JSONDecodeError as error:
        raise SettingsError(f"the body is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise SettingsError("the body is not a JSON object")
    return value
