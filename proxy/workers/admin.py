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

from proxy.workers.opened_sessions import OpenedSession, OpenedSessions
from proxy.workers.process import Worker

#: Closing a session waits for its calls in flight.
ANSWER_SECONDS = 3600.0
#: Seconds that a question waits for its worker to be started again.
RESTART_SECONDS = 60.0


class WorkersAdmin:
    """Answers with what the workers' own admin routes answer, over their Unix sockets."""

    def __init__(self, workers: Sequence[Worker], opened: OpenedSessions) -> None:
        self._workers = workers
        self._opened = opened
        self._clients = [
            httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=str(worker.admin)),
                base_url="http://worker",
                timeout=ANSWER_SECONDS,
            )
            for worker in workers
        ]

    def app(self) -> ASGIApp:
        return Starlette(
            routes=[
                Route("/health", self.health, methods=["GET"]),
                Route("/metrics", self.metrics, methods=["GET"]),
                Route("/sessions", self.list, methods=["GET"]),
                Route("/sessions", self.open, methods=["POST"]),
                Route("/sessions/{id}", self.session, methods=["GET", "DELETE"]),
                Route("/sessions/{id}/policy", self.policy, methods=["POST"]),
            ]
        )

    async def health(self, request: Request) -> Response:
        answers, refused = await self._ask_all(request)
        return refused or JSONResponse({"status": "ok", "workers": len(answers)})

    async def list(self, request: Request) -> Response:
        answers, refused = await self._ask_all(request)
        return refused or JSONResponse({"sessions": [row for answer in answers for row in answer.json()["sessions"]]})

    async def metrics(self, request: Request) -> Response:
        answers, refused = await self._ask_all(request)
        return refused or Response(
            add_metrics([answer.text for answer in answers]), media_type="text/plain; version=0.0.4"
        )

    async def open(self, request: Request) -> Response:
        worker = self._opened.least_loaded()
        self._opened.opening[worker] += 1  # of a hundred that are opened at once, each worker gets its share
        try:
            answer = await self._ask(worker, request)
            if answer.status_code == 201:
                made = answer.json()
                fields = await request.json()
                self._opened.add(OpenedSession(worker, made["session"], made["api_key"], str(fields["name"]), fields))
            return _as_is(answer)
        finally:
            self._opened.opening[worker] -= 1

    async def session(self, request: Request) -> Response:
        answer = await self._ask(self._worker_of(request.path_params["id"]), request)
        if request.method == "DELETE" and answer.status_code == 200:
            state = answer.json()
            self._opened.remove(state["session"], state["name"])
        return _as_is(answer)

    async def policy(self, request: Request) -> Response:
        """Sets a session's version. The default session's is also that of sessions which an address makes later, in
        whichever worker."""
        owner = self._worker_of(request.path_params["id"])
        answer = await self._ask(owner, request)
        if answer.status_code != 200:
            return _as_is(answer)
        state = answer.json()
        self._opened.set_version(state["session"], state["name"], state["policy_version"])
        if state["name"] == "default" and self._opened.find(state["session"]) is None:
            for worker in self._workers:
                if worker.index != owner:
                    await self._ask(worker.index, request, path="/sessions/default/policy")
        return _as_is(answer)

    def _worker_of(self, named: str) -> int:
        """The worker of the session with this id or name."""
        opened = self._opened.find(named) if named != "default" else None
        return self._workers[0].placement.of_name(named) if opened is None else opened.worker

    async def _ask_all(self, request: Request) -> tuple[Sequence[httpx.Response], Response | None]:
        """The answers of all workers, and the first that is a refusal."""
        answers = [await self._ask(index, request) for index in range(len(self._clients))]
        return answers, next((_as_is(answer) for answer in answers if answer.status_code != 200), None)

    async def _ask(self, worker: int, request: Request, path: str | None = None) -> httpx.Response:
        headers = {name: request.headers[name] for name in ("authorization", "host") if name in request.headers}
        try:
            async with asyncio.timeout(RESTART_SECONDS):
                await self._workers[worker].ready.wait()
            return await self._clients[worker].request(
                request.method, path or request.url.path, content=await request.body(), headers=headers
            )
        except (httpx.HTTPError, TimeoutError) as error:
            why = f"worker {worker} does not answer ({type(error).__name__}): it died, or the proxy is stopping"
            return httpx.Response(502, json={"error": {"message": f"{why}; try again"}})


def _as_is(answer: httpx.Response) -> Response:
    return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


def add_metrics(texts: Sequence[str]) -> str:
    """The metrics of several processes as those of one: samples with the same name and labels are added.

    `_created` is a time, of which the earliest counts.
    """
    lines: dict[str, float | None] = {}
    for text in texts:
        for line in text.splitlines():
            if line.startswith("#"):
                lines.setdefault(line, None)
                continue
            name, _, value = line.rpartition(" ")
            earlier = lines.get(name)
            if earlier is None:
                lines[name] = float(value)
            elif name.partition("{")[0].endswith("_created"):
                lines[name] = min(earlier, float(value))
            else:
                lines[name] = earlier + float(value)
    return "".join(f"{name}\n" if value is None else f"{name} {value}\n" for name, value in lines.items())
