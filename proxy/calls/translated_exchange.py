"""A call in a dialect of its own: sent as chat completions, answered in the dialect, recorded in both.

The exchange is the same; what differs is what goes out to the agent, and in what shape it hears of an error.
"""

from __future__ import annotations

from typing import Any

from capture.assemble import stream_of
from capture.record import TokenCapture
from capture.sse import Event
from proxy.calls.exchange import Exchange
from proxy.calls.journal_line import In, journal_line
from proxy.calls.reply_bytes import error_text, loads
from proxy.calls.request_body import Request
from proxy.calls.upstream_call import Route
from proxy.dialects.base import ChatRequest, Dialect, ReplyTranslator
from proxy.dialects.chat import dumps
from proxy.errors import Refusal, UpstreamBroke, UpstreamError
from proxy.http.client_request import ClientRequest, reply_headers
from proxy.http.headers import JSON_HEADERS, SSE_HEADERS, Headers
from proxy.sessions.registry import Session
from proxy.upstream.client import Response

NOT_OBJECT = "the request's body is no JSON object"
NO_CHAT = "the engine's answer is no chat completion"
CUT_OFF = "the engine's answer broke off before its end"


class TranslatedExchange(Exchange):
    """One call on its way, in a dialect."""

    starts_at_once = False

    def __init__(
        self, dialect: Dialect, route: Route, session: Session, number: int, agent: ClientRequest, request: Request
    ) -> None:
        super().__init__(route, session, number, agent, request)
        self.dialect = dialect
        self.facts.path = agent.path
        self.facts.dialect = dialect.wire
        self.facts.call_type = dialect.call_type
        self.translation: ChatRequest | None = None
        self.reply: ReplyTranslator | None = None

    async def _exchange(self) -> None:
        try:
            self._translate()
            await super()._exchange()
        except Refusal as refusal:
            self.facts.outcome = "error"
            self.facts.failure = refusal.message
            self._error_reply(refusal.status, refusal.message)

    def _translate(self) -> None:
        if not self.request.is_object:
            raise Refusal(400, NOT_OBJECT)
        try:
            self.translation = self.dialect.translate(self.request.body, self.session.earlier)
        except RecursionError:
            raise Refusal(400, "the request is nested too deeply") from None
        self.reply = self.dialect.reply(self.translation)
        self.request = self.request.sent_as(self.translation.chat, self.session)

    # what the engine answered

    def _event(self, event: Event) -> bytes:
        reader, reply, data = self.reader, self.reply, event.data
        assert reader is not None and reply is not None
        if not data:
            return b""  # a comment of the engine's
        if data.strip() == b"[DONE]":
            self._holding = self._done = True
            return b""
        first = not reader.started
        chunk = reader.chunk(data)
        if reader.finished or reader.error is not None:
            self._holding = True
        if chunk is None:
            return b""
        if first:
            self._acquaint()
        return reply.feed(chunk)

    def _acquaint(self) -> None:
        """Tells the reply what only the engine's file and the record know."""
        reader, reply = self.reader, self.reply
        assert reader is not None and reply is not None
        prompt = reader.sampled.prompt_ids()
        reply.prompt_tokens = None if prompt is None else len(prompt)
        reply.repeats_prefill = reader.engine.repeats_prefill
        reply.matched_stop = reader.engine.matched_stop(reader)

    def _stream_over(self) -> None:
        assert self.reader is not None and self.reply is not None
        if self.reader.error is not None:
            self._engine_error(self.reader.error)
        elif not self.reader.finished:
            raise UpstreamBroke(CUT_OFF)
        else:
            self.reply.matched_stop = self.reader.engine.matched_stop(self.reader)
            self._held.append(self.reply.finish())

    async def _whole(self, response: Response) -> None:
        """The engine answered whole; so does the agent get it, or as the events it would have seen."""
        data = self._scrubbed(await response.read())
        self.facts.first_byte()
        await self._side_questions()
        given = self._read(data)
        reader, reply = self.reader, self.reply
        assert reader is not None and reply is not None
        if reader.error is not None:
            self._engine_error(reader.error)
            return
        chat = loads(given) if self.request.streams else reader.assembled()
        if not isinstance(chat, dict) or not chat.get("choices"):
            reader.started = False  # nothing of it was an answer
            raise UpstreamBroke(NO_CHAT)
        self._acquaint()
        if not self.request.streams:
            self._reply = 200, self._headers(response), dumps(reply.body(chat))
            return
        self._holding = True
        self._held += [reply.feed(chunk) for chunk in stream_of(chat, include_usage=True)]
        self._held.append(reply.finish())

    _restream = _whole

    # errors

    async def _error(self, response: Response) -> None:
        data = self._scrub(await response.read())
        self._note_error(response.status, data)
        said = loads(data)
        message = error_text(said) or _bare(data, response.status)
        self._error_reply(response.status, message, said, response)

    def _engine_error(self, error: dict[str, Any]) -> None:
        """An error inside an answer that began with 200: an event where the agent has seen some of it."""
        status, message = _status_of(error), error_text(error) or CUT_OFF
        self.facts.failure = message
        if self.agent.started:
            self.facts.outcome = "truncated"
            self._fail(status, message)
        else:
            self.facts.outcome = "error"
            self._error_reply(status, message, error)

    def _tell(self, error: UpstreamError, refusal: Refusal, began: bool) -> None:
        if began and self.agent.started:
            self._fail(refusal.status, refusal.message)
        else:
            self.facts.outcome = "error"
            self._error_reply(refusal.status, refusal.message)

    def _error_reply(self, status: int, message: str, said: Any = None, response: Response | None = None) -> None:
        """The dialect's error: as an answer of its own, or as an event where pings have begun the reply."""
        self.facts.status, body = self.dialect.error(status, message, said)
        self.facts.error_body = loads(body)
        if self.agent.started:
            self._fail(status, message)
        else:
            self._reply = self.facts.status, [*JSON_HEADERS] if response is None else self._headers(response), body

    def _fail(self, status: int, message: str) -> None:
        self._holding = True
        assert self.reply is not None
        self._held.append(self.reply.error_event(status, message))

    def _headers(self, response: Response) -> Headers:
        """The engine's own headers (`retry-after`, ids) on an answer that is ours."""
        kept = [one for one in reply_headers(response.headers, self._scrub) if one[0] != b"content-type"]
        return [*JSON_HEADERS, *kept]

    def _keep_alive(self) -> bytes:
        return b"" if self.reply is None else self.reply.ping()

    # the end

    def _line(self) -> tuple[TokenCapture | None, bytes]:
        capture = self._captured()
        chat = body = None
        if self.reader is not None and self.reply is not None and self.facts.outcome != "error":
            chat = self.reader.assembled()
            body = self.reply.body(chat)
        if self.reply is not None and body is not None and self.facts.outcome == "ok":
            self.session.earlier.keep(self.reply.cache_entries())
        dropped = [] if self.translation is None else self.translation.dropped
        said = In(body, chat, dropped, sent=self.translation is not None)
        line = journal_line(self.facts, self.request, self.agent.headers, self.session, self.reader, capture, said)
        return capture, line

    def _end(self) -> None:
        if not self.agent.started and self._held and self._reply is None and not self.agent.left:
            self.agent.start(200, SSE_HEADERS)
        super()._end()


def _bare(data: bytes, status: int) -> str:
    """What an error says that is no JSON, or says nothing."""
    text = " ".join(data[:200].decode("utf-8", "replace").split())
    return text or f"the engine answered {status} and said nothing"


def _status_of(error: dict[str, Any]) -> int:
    """The status that an error inside a stream names, nested (vLLM) or flat (SGLang); 500 where it names none."""
    inner = error.get("error", error)
    code = inner.get("code") if isinstance(inner, dict) else None
    return code if type(code) is int and 400 <= code < 600 else 500
