"""The routes of `bench serve`."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import orjson
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from capture import json
from proxy import Policy, SettingsError, seconds_to_wait
from sandbox.embedded_engine import EmbeddedEngine
from sandbox.service.group_request import RequestRefused, bad
from sandbox.service.group_service import GroupService
from sandbox.service.groups import STATES, RolloutGroup
from sandbox.service.weights import WAIT, Weights

#: A stream without lines sends an empty one after this many seconds, so that a dead connection is noticed.
KEEP_ALIVE = 10.0
#: Bytes of a request's body.
LARGEST_BODY = 1 << 20

T = TypeVar("T")


class ServiceApp:
    """Routes over one service; every route but /health needs the key."""

    def __init__(
        self, service: GroupService, key: str, engine: EmbeddedEngine | None = None, keep_alive: float = KEEP_ALIVE
    ) -> None:
        self.service, self.key, self.keep_alive = service, key, keep_alive
        self.weights = Weights(service, engine)
        self._registry = CollectorRegistry()
        for name, what, value in (
            ("bench_serve_running", "Rollouts that run.", lambda: service.running),
            ("bench_serve_queued", "Rollouts that wait.", lambda: service.queued),
        ):
            Gauge(name, what, registry=self._registry).set_function(value)
        groups = Gauge("bench_serve_groups", "Groups, by state.", ["state"], registry=self._registry)
        for state in STATES:
            groups.labels(state).set_function(partial(service.count, state))

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self.health, methods=["GET"]),
                Route("/tasks", self._guarded(self.tasks), methods=["GET"]),
                Route("/status", self._guarded(self.status), methods=["GET"]),
                Route("/metrics", self._guarded(self.metrics), methods=["GET"]),
                Route("/groups", self._guarded(self.list), methods=["GET"]),
                Route("/groups", self._guarded(self.accept), methods=["POST"]),
                Route("/groups/{key}", self._guarded(self.join), methods=["GET"]),
                Route("/groups/{key}", self._guarded(self.cancel), methods=["DELETE"]),
                Route("/policy", self._guarded(self.policy), methods=["POST"]),
                Route("/pause", self._guarded(self.pause), methods=["POST"]),
                Route("/resume", self._guarded(self.resume), methods=["POST"]),
                Route("/weights", self._guarded(self.load), methods=["POST"]),
            ],
            exception_handlers={HTTPException: no_route, ClientDisconnect: nobody_reads},
        )

    def _guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            try:
                if not hmac.compare_digest(given.encode(), self.key.encode()):
                    raise RequestRefused(401, "wrong_key", "the service needs its key: Authorization: Bearer KEY")
                return await handler(request)
            except RequestRefused as refused:
                return problem(refused)
            except SettingsError as error:
                return problem(bad(str(error)))

        return guarded

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def tasks(self, request: Request) -> Response:
        rows = [
            {"name": task.name, "digest": task.digest, "prompt": task.prompt} for task in self.service.tasks.values()
        ]
        return JSONResponse({"tasks": rows})

    async def status(self, request: Request) -> Response:
        return JSONResponse({**await asyncio.to_thread(self.service.status), "paused": self.weights.paused})

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4")

    async def list(self, request: Request) -> Response:
        return JSONResponse({"groups": [group.summary() for group in list(self.service.groups.values())]})

    async def accept(self, request: Request) -> Response:
        body = await json_body(request)
        return self._stream(await asyncio.to_thread(self.service.accept, body), 0)

    async def join(self, request: Request) -> Response:
        group = self.service.group(request.path_params["key"])
        start = request.query_params.get("from", "0")
        if not start.isascii() or not start.isdigit() or len(start) > 9:
            raise bad(f"`from` must be the number of lines to skip, not {start!r}")
        return self._stream(group, int(start))

    async def cancel(self, request: Request) -> Response:
        return JSONResponse(self.service.cancel(request.path_params["key"]).summary())

    async def policy(self, request: Request) -> Response:
        policy = Policy.of(await json_object(request))
        await asyncio.to_thread(self.service.set_policy, policy)
        return JSONResponse(policy.fields())

    async def pause(self, request: Request) -> Response:
        wait = seconds_to_wait(await json_object(request), WAIT)
        return JSONResponse({"in_flight": await in_own_thread(self.weights.pause, wait)})

    async def resume(self, request: Request) -> Response:
        body = await json_object(request)
        await asyncio.to_thread(self.weights.resume, Policy.of(body) if body else None)
        return JSONResponse({"paused": False})

    async def load(self, request: Request) -> Response:
        body = await json_object(request)
        policy, wait = Policy.of(body), seconds_to_wait(body, WAIT)
        await in_own_thread(self.weights.load, body.get("path"), policy, wait)
        return JSONResponse(policy.fields())

    def _stream(self, group: RolloutGroup, start: int) -> Response:
        return StreamingResponse(self._lines(group, start), media_type="application/x-ndjson")

    async def _lines(self, group: RolloutGroup, start: int) -> AsyncIterator[bytes]:
        """The group's lines from number `start` on, and those to come, up to its verdict. A service that is stopped
        ends the stream without one.
        """
        sent = start
        with self.service.waiters.event() as changed:
            while True:
                changed.clear()
                verdict = group.verdict
                while sent < len(group.finished):
                    line = await asyncio.to_thread(self.service.line, group, sent)
                    sent += 1
                    if line is not None:
                        yield line
                if verdict is not None:
                    if sent == len(group.finished):
                        yield json.dumps(verdict) + b"\n"
                    return
                if self.service.draining and self.service.is_idle():
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), self.keep_alive)
                    continue
                yield b"\n"


async def in_own_thread(work: Callable[..., T], *arguments: Any) -> T:
    """For work that may take minutes: in the threads that all requests share, a few of it would hold up the others."""
    executor = ThreadPoolExecutor(1)
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, work, *arguments)
    finally:
        executor.shutdown(wait=False)


async def no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"there is no {request.method} {request.url.path} here; docs/serve.md lists the routes"
    refused = problem(RequestRefused(error.status_code, "no_route", what))
    refused.headers.update(error.headers or {})
    return refused


async def nobody_reads(request: Request, error: Exception) -> Response:
    """The client left in the middle of its request's body."""
    return Response(status_code=400)


def problem(refused: RequestRefused) -> Response:
    error = {"message": str(refused), "type": "RequestRefused", "code": refused.code}
    headers = {} if refused.retry_after is None else {"retry-after": str(refused.retry_after)}
    if refused.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse({"error": error}, status_code=refused.status, headers=headers)


async def json_object(request: Request) -> dict[str, Any]:
    """Raises `RequestRefused`."""
    body = await json_body(request)
    if not isinstance(body, dict):
        raise bad("the request is not a JSON object")
    return body


async def json_body(request: Request) -> object:
    """An empty object where there is no body."""
    data = b""
    async for piece in request.stream():
        data += piece
        if len(data) > LARGEST_BODY:
            raise RequestRefused(413, "too_large", "the request's body is larger than 1 MiB")
    try:
        return orjson.loads(data) if data else {}
    except orjson.JSONDecodeError as error:
        raise bad(f"the request is not JSON ({error})") from None
