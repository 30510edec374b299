"""Side routes that the session's engine answers: which models there are, how long a prompt is.

Neither is a call of the model, and neither is recorded.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from proxy.calls.call import REDIRECTED
from proxy.calls.forwarded_headers import allowed_names, forwarded
from proxy.calls.handlers import Endpoint
from proxy.calls.reply_bytes import loads, one_line
from proxy.calls.request_body import Request
from proxy.dialects.base import Dialect
from proxy.errors import Refusal, UpstreamError
from proxy.http.client_request import ClientRequest, reply_headers
from proxy.http.headers import JSON_HEADERS, Headers
from proxy.sessions.registry import Session, Sessions
from proxy.settings import Settings
from proxy.upstream.replicas import Replica

MODELS = "/v1/models"
#: What a client may call the model. Not a path that leaves the route: `..`, `..;`, a backslash, `%252e`.
_MODEL_NAME: Final = re.compile(r"(?:(?!\.{1,2}(?:/|$))[^/\\;%\x00-\x1f\x7f]+(?:/(?!$)|$))+")


class Models(Endpoint):
    """`GET /v1/models` from the session's engine, and `GET /v1/models/NAME`, one entry of it."""

    def __init__(self, sessions: Sessions, settings: Settings) -> None:
        super().__init__(sessions)
        self._allowed = allowed_names(settings.forward_header)

    async def answer(self, agent: ClientRequest, session: Session) -> None:
        await session.replicas.gate.opened()
        await self._answer(agent, _up(session), session.options.model)

    async def answer_unopened(self, agent: ClientRequest) -> None:
        assert self.sessions.defaults is not None  # else the address opens no sessions
        await self.sessions.defaults.replicas.gate.opened()
        replica = self.sessions.defaults.replicas.any_up()
        await self._answer(agent, replica, self.sessions.defaults.options.model)

    async def _answer(self, agent: ClientRequest, replica: Replica, served: str | None) -> None:
        name = agent.path.removeprefix(MODELS).removeprefix("/")
        try:
            status, headers, data = await self._list(agent, replica)
        except UpstreamError as error:
            raise Refusal(502, str(error)) from error
        if 300 <= status < 400:
            raise Refusal(502, REDIRECTED)
        if name and status == 200:
            # With `--model` every name is that model. A path is not a name: the engine must list it (llama.cpp may).
            data = orjson.dumps(_model(loads(data), served if served and _MODEL_NAME.fullmatch(name) else name))
        agent.answer(status, headers, data)

    async def _list(self, agent: ClientRequest, replica: Replica) -> tuple[int, Headers, bytes]:
        headers = [*forwarded(agent.headers, self._allowed), (b"accept-encoding", b"identity")]
        response = await replica.client.send("GET", MODELS, replica.auth(headers), b"")
        try:
            data = replica.scrub(await response.read())
        finally:
            response.close()
        return response.status, reply_headers(response.headers, replica.scrub), data


def _model(models: Any, name: str) -> dict[str, Any]:
    """The entry of one model in the engine's list. Raises `Refusal` (404)."""
    rows = models.get("data") if isinstance(models, dict) else None
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and row.get("id") == name:
            return row
    raise Refusal(404, f"the engine serves no model {one_line(name)!r}; GET {MODELS} lists those it serves")


class CountTokens(Endpoint):
    """`POST /v1/messages/count_tokens`, by the engine's own template and tokenizer."""

    def __init__(self, dialect: Dialect, sessions: Sessions, settings: Settings) -> None:
        super().__init__(sessions)
        self.dialect: Dialect = dialect
        self.settings = settings

    async def answer(self, agent: ClientRequest, session: Session) -> None:
        request = Request.of(await agent.body(self.settings.max_body_mb << 20), session.options)
        if not request.is_object:
            raise Refusal(400, "the request's body is no JSON object")
        request = request.sent_as(self.dialect.count(request.body, session.earlier), session.options)
        await session.replicas.gate.opened()
        count = await self._count(_up(session), request)
        agent.answer(200, JSON_HEADERS, orjson.dumps({"input_tokens": count}))

    async def _count(self, replica: Replica, request: Request) -> int:
        try:
            questions = (await replica.identify()).count_prompt(request.upstream)
            count = None if questions is None else await replica.ask(questions)
        except UpstreamError as error:
            raise Refusal(502, str(error)) from error
        except RecursionError:
            raise Refusal(400, "the request is nested too deeply") from None
        if count is None:
            # 404: a client does not ask again, and estimates.
            raise Refusal(404, "this engine has no route that counts the tokens of this request")
        return count


def _up(session: Session) -> Replica:
    replica = session.route()
    if replica is None:
        raise Refusal(502, "the engine cannot be reached; is it up?")
    return replica
