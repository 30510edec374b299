"""What agents ask besides model calls, from the session's engine: which models there are, how long a prompt is.

Neither is a call of the model, and neither is recorded.
"""

from __future__ import annotations

from urllib.parse import quote

import orjson

from proxy.calls.call import REDIRECTED
from proxy.calls.handlers import Endpoint
from proxy.calls.request_body import Request
from proxy.dialects.base import Dialect
from proxy.errors import Refusal, UpstreamError
from proxy.http.client_request import ClientRequest, reply_headers
from proxy.http.headers import JSON_HEADERS
from proxy.sessions.registry import Session, Sessions
from proxy.settings import Settings
from proxy.upstream.replicas import Replica


class Models(Endpoint):
    """`GET /v1/models`, from the session's engine."""

    async def answer(self, agent: ClientRequest, session: Session) -> None:
        replica = _up(session)
        headers = replica.auth([*agent.upstream_headers(), (b"accept-encoding", b"identity")])
        try:
            response = await replica.client.send("GET", _models_path(agent.path), headers, b"")
            try:
                data = await response.read()
            finally:
                response.close()
        except UpstreamError as error:
            raise Refusal(502, str(error)) from error
        if 300 <= response.status < 400:
            raise Refusal(502, REDIRECTED)
        agent.answer(response.status, reply_headers(response.headers, replica.scrub), replica.scrub(data))


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


def _models_path(path: str) -> str:
    """The path as it goes on: what stands in a model's name is escaped, and leads nowhere but to models."""
    if any(part in (".", "..") for part in path.split("/")):
        raise Refusal(404, f"{path} is not served here")
    return quote(path, safe="/:@!$&'()*+,;=~")
