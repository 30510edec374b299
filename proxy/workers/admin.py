"""The admin routes over several workers: each question goes to the worker that has the session, or to all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import httpx
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from proxy.admin.api import ROUTE_ERRORS, json_object, problem
from proxy.errors import SettingsError
from proxy.sessions.policy import Policy
from proxy.upstream.gate import seconds_to_wait
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
                Route("/sessions/{id}/policy", self.session_policy, methods=["POST"]),
                Route("/sessions/{id}/records", self.records, methods=["GET"]),
                Route("/policy", self.policy, methods=["POST"]),
                Route("/pause", self.pause, methods=["POST"]),
                Route("/resume", self.resume, methods=["POST"]),
            ],
            exception_handlers=ROUTE_ERRORS,
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

    async def session_policy(self, request: Request) -> Response:
        """Sets a session's policy. The default session's is also that of sessions which an address makes later, in
        whichever worker."""
        owner = self._worker_of(request.path_params["id"])
        answer = await self._ask(owner, request)
        if answer.status_code != 200:
            return _as_is(answer)
        state = answer.json()
        self._opened.set_policy(state["session"], state["name"], Policy.of(await json_object(request)))
        if state["name"] == "default" and self._opened.find(state["session"]) is None:
            for worker in self._workers:
                if worker.index != owner:
                    await self._ask(worker.index, request, path="/sessions/default/policy")
        return _as_is(answer)

    async def records(self, request: Request) -> Response:
        """From the worker of the session, as it comes; a session that has ended may be known to any."""
        named = request.path_params["id"]
        owner = self._worker_of(named)
        for worker in sorted(range(len(self._clients)), key=lambda index: index != owner):
            answer = await self._ask(worker, request, stream=True)
            if answer.status_code == 200:
                return StreamingResponse(
                    answer.aiter_raw(), media_type="application/x-ndjson", background=BackgroundTask(answer.aclose)
                )
            await answer.aread()
            if answer.status_code != 404:
                break
        return _as_is(answer)

    async def policy(self, request: Request) -> Response:
        answers, refused = await self._ask_all(request)
        if refused is None:
            self._keep_policy(Policy.of(await json_object(request)))
        return refused or _as_is(answers[0])

    async def pause(self, request: Request) -> Response:
        """Every worker is paused before the calls in flight are waited for, also one that dies meanwhile."""
        try:
            seconds_to_wait(await json_object(request), self._workers[0].settings.grace)
        except SettingsError as error:
            return problem(400, str(error))
        _, refused = await self._ask_all(request, content=b'{"wait": 0}')
        if refused is not None:
            return refused
        for worker in self._workers:
            worker.paused = True
        answers, refused = await self._ask_all(request)
        return refused or JSONResponse({"in_flight": sum(answer.json()["in_flight"] for answer in answers)})

    async def resume(self, request: Request) -> Response:
        answers, refused = await self._ask_all(request)
        if refused is not None:
            return refused
        for worker in self._workers:
            worker.paused = False
        if fields := await json_object(request):
            self._keep_policy(Policy.of(fields))
        return _as_is(answers[0])

    def _keep_policy(self, policy: Policy) -> None:
        """For the workers' next processes."""
        self._opened.set_all_policies(policy)
        for worker in self._workers:
            worker.settings = replace(worker.settings, **policy.fields())

    def _worker_of(self, named: str) -> int:
        """The worker of the session with this id or name."""
        opened = self._opened.find(named) if named != "default" else None
        return self._workers[0].placement.of_name(named) if opened is None else opened.worker

    async def _ask_all(
        self, request: Request, content: bytes | None = None
    ) -> tuple[Sequence[httpx.Response], Response | None]:
        """The answers of all workers, and the first that is a refusal."""
        content = await request.body() if content is None else content  # once, before several wait for it
        asked = (self._ask(index, request, content=content) for index in range(len(self._clients)))
        answers = await asyncio.gather(*asked)
        return answers, next((_as_is(answer) for answer in answers if answer.status_code != 200), None)

    async def _ask(
        self,
        worker: int,
        request: Request,
        path: str | None = None,
        *,
        content: bytes | None = None,
        stream: bool = False,
    ) -> httpx.Response:
        """A worker's answer to this request, or to another `path` or `content`; its body is read unless `stream`."""
        headers = {name: request.headers[name] for name in ("authorization", "host") if name in request.headers}
        try:
            async with asyncio.timeout(RESTART_SECONDS):
                await self._workers[worker].ready.wait()
            client, body = self._clients[worker], await request.body() if content is None else content
            query = request.url.query
            target = path or (f"{request.url.path}?{query}" if query else request.url.path)
            asked = client.build_request(request.method, target, content=body, headers=headers)
            return await client.send(asked, stream=stream)
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
