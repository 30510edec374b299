"""The admin routes over several workers: each question goes to the worker that has the session, or to all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from proxy.workers.process import BACK_SECONDS, Worker
from proxy.workers.session_index import Directory, Opened

#: Closing a session waits for its calls in flight.
PATIENCE = 3600.0


class FrontAdmin:
    def __init__(self, workers: Sequence[Worker], directory: Directory) -> None:
        self.directory = directory
        self._workers = workers
        self._clients = [
            httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=str(one.admin)), base_url="http://worker", timeout=PATIENCE
            )
            for one in workers
        ]

    def app(self) -> ASGIApp:
        return Starlette(
            routes=[
                Route("/health", self.health, methods=["GET"]),
                Route("/metrics", self.metrics, methods=["GET"]),
                Route("/sessions", self.list, methods=["GET"]),
                Route("/sessions", self.open, methods=["POST"]),
                Route("/sessions/{id}", self.one, methods=["GET", "DELETE"]),
                Route("/sessions/{id}/policy", self.policy, methods=["POST"]),
            ]
        )

    async def health(self, request: Request) -> Response:
        return await self._first_refusal(request) or JSONResponse({"status": "ok", "workers": len(self._clients)})

    async def list(self, request: Request) -> Response:
        answers = [await self._ask(index, request) for index in range(len(self._clients))]
        refused = next((one for one in answers if one.status_code != 200), None)
        if refused is not None:
            return _as_is(refused)
        return JSONResponse({"sessions": [row for one in answers for row in one.json()["sessions"]]})

    async def metrics(self, request: Request) -> Response:
        answers = [await self._ask(index, request) for index in range(len(self._clients))]
        refused = next((one for one in answers if one.status_code != 200), None)
        if refused is not None:
            return _as_is(refused)
        return Response(added_up([one.text for one in answers]), media_type="text/plain; version=0.0.4")

    async def open(self, request: Request) -> Response:
        index = self.directory.least()
        self.directory.opening[index] += 1  # a hundred that are opened at once are not all the same worker's
        try:
            answer = await self._ask(index, request)
            if answer.status_code == 201:
                made = answer.json()
                fields = await request.json()
                self.directory.opened(Opened(index, made["session"], made["api_key"], str(fields["name"]), fields))
            return _as_is(answer)
        finally:
            self.directory.opening[index] -= 1

    async def one(self, request: Request) -> Response:
        answer = await self._ask(self.directory.of_name(request.path_params["id"]), request)
        if request.method == "DELETE" and answer.status_code == 200:
            told = answer.json()
            self.directory.closed(told["session"], told["name"])
        return _as_is(answer)

    async def policy(self, request: Request) -> Response:
        """The default's version is also that of sessions which are made by their names, in whatever worker."""
        owner = self.directory.of_name(request.path_params["id"])
        answer = await self._ask(owner, request)
        if answer.status_code != 200:
            return _as_is(answer)
        told = answer.json()
        self.directory.set_version(told["session"], told["name"], told["policy_version"])
        if told["name"] == "default" and not self.directory.is_opened(told["session"]):
            for index in range(len(self._clients)):
                if index != owner:
                    await self._ask(index, request, path="/sessions/default/policy")
        return _as_is(answer)

    async def _first_refusal(self, request: Request) -> Response | None:
        for index in range(len(self._clients)):
            answer = await self._ask(index, request)
            if answer.status_code != 200:
                return _as_is(answer)
        return None

    async def _ask(self, index: int, request: Request, path: str | None = None) -> httpx.Response:
        headers = {name: request.headers[name] for name in ("authorization", "host") if name in request.headers}
        try:
            async with asyncio.timeout(BACK_SECONDS):
                await self._workers[index].up.wait()
            return await self._clients[index].request(
                request.method, path or request.url.path, content=await request.body(), headers=headers
            )
        except (httpx.HTTPError, TimeoutError) as error:
            what = (
                f"worker {index} does not answer ({type(error).__name__}): it died, or the proxy is stopping; ask again"
            )
            return httpx.Response(502, json={"error": {"message": what}})


def _as_is(answer: httpx.Response) -> Response:
    return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


def added_up(texts: Sequence[str]) -> str:
    """Metrics of several processes as those of one: what has the same name and labels is added.

    `_created` is a time: the first counts.
    """
    lines: dict[str, float | None] = {}
    for text in texts:
        for line in text.splitlines():
            if line.startswith("#"):
                lines.setdefault(line, None)
                continue
            name, _, value = line.rpartition(" ")
            held = lines.get(name)
            if held is None:
                lines[name] = float(value)
            elif name.partition("{")[0].endswith("_created"):
                lines[name] = min(held, float(value))
            else:
                lines[name] = held + float(value)
    return "".join(f"{name}\n" if value is None else f"{name} {value}\n" for name, value in lines.items())
