"""A call in a dialect of its own: sent as chat completions, answered in the dialect, recorded in both."""

from __future__ import annotations

from typing import Any

from capture.chat.assemble import stream_of
from capture.engines.reader import Reader
from capture.sse import Event
from proxy.calls.reply_bytes import error_text, loads
from proxy.calls.reply_writer import WholeReply
from proxy.calls.request_body import Request
from proxy.calls.translator import Translated, Translator
from proxy.dialects.base import ChatRequest, Dialect, ReplyTranslator
from proxy.dialects.chat import dumps
from proxy.errors import Refusal, UpstreamBroke, UpstreamFault
from proxy.http.headers import JSON_HEADERS, Headers
from proxy.sessions.answer_cache import AnswerCache
from proxy.settings import SessionOptions

NOT_OBJECT = "the request's body is no JSON object"
NO_CHAT = "the engine's answer is no chat completion"
CUT_OFF = "the engine's answer broke off before its end"


class DialectTranslator(Translator):
    """One call in `dialect`."""

    starts_at_once = False
    cuts = False

    def __init__(self, dialect: Dialect, earlier: AnswerCache) -> None:
        self._dialect = dialect
        self._earlier = earlier
        self._request: ChatRequest | None = None
        self._reply: ReplyTranslator | None = None

    def request(self, request: Request, options: SessionOptions) -> Request:
        if not request.is_object:
            raise Refusal(400, NOT_OBJECT)
        try:
            self._request = self._dialect.translate(request.body, self._earlier)
        except RecursionError:
            raise Refusal(400, "the request is nested too deeply") from None
        self._reply = self._dialect.reply(self._request)
        return request.sent_as(self._request.chat, options)

    @property
    def reply(self) -> ReplyTranslator:
        assert self._reply is not None  # the request was translated before it was sent
        return self._reply

    def event(self, reader: Reader, event: Event) -> bytes:
        assert event.data is not None
        first = not reader.started
        chunk = reader.chunk(event.data, event.event)
        if chunk is None:
            return b""
        if first:
            self._introduce(reader)
        return self.reply.feed(chunk)

    def _introduce(self, reader: Reader) -> None:
        """Tells the reply what only the engine's module and the record know."""
        prompt, reply = reader.sampled.prompt_ids(), self.reply
        reply.prompt_tokens = None if prompt is None else len(prompt)
        reply.repeats_prefill = reader.engine.repeats_prefill
        reply.matched_stop = reader.engine.matched_stop(reader)

    def comment(self, event: Event) -> bytes:
        return b""

    def done(self, reader: Reader, event: Event) -> bytes:
        return b""

    def finish(self, reader: Reader) -> bytes:
        if reader.error is not None:
            raise _fault(reader.error)
        if not reader.finished:
            raise UpstreamBroke(CUT_OFF)
        self.reply.matched_stop = reader.engine.matched_stop(reader)
        return self.reply.finish()

    def whole(self, reader: Reader, data: bytes, headers: Headers, *, streams: bool) -> WholeReply | bytes:
        given = reader.body(data)
        if reader.error is not None:
            raise _fault(reader.error)
        chat = loads(given) if streams else reader.assembled()
        if not isinstance(chat, dict) or not chat.get("choices"):
            reader.started = False  # nothing of it was an answer
            raise UpstreamBroke(NO_CHAT)
        self._introduce(reader)
        if not streams:
            return WholeReply(200, _json(headers), dumps(self.reply.body(chat)))
        events = [self.reply.feed(chunk) for chunk in stream_of(chat, include_usage=True)]
        return b"".join((*events, self.reply.finish()))

    def engine_error(self, status: int, data: bytes, headers: Headers) -> WholeReply:
        body = loads(data)
        message = error_text(body) or _plain(data, status)
        return self._error(status, message, body, _json(headers))

    def error(self, refusal: Refusal, engine_error: Any = None, *, flat: bool = False) -> WholeReply:
        return self._error(refusal.status, refusal.message, engine_error, list(JSON_HEADERS))

    def _error(self, status: int, message: str, engine_error: Any, headers: Headers) -> WholeReply:
        own_status, body = self._dialect.error(status, message, engine_error)
        event = b"" if self._reply is None else self._reply.error_event(status, message)
        return WholeReply(own_status, headers, body, event)

    def ping(self) -> bytes:
        return self.reply.ping()

    def translated(self, reader: Reader | None, outcome: str) -> Translated:
        if self._request is None:
            return Translated(None, None, [], sent=False)
        chat = body = None
        if reader is not None and outcome != "error":
            chat = reader.assembled()
            body = self.reply.body(chat)
            if outcome == "ok":
                self._earlier.keep(self.reply.cache_entries())
        call_ids = () if body is None else self.reply.call_ids()
        return Translated(body, chat, self._request.dropped, sent=True, call_ids=call_ids)


def _json(headers: Headers) -> Headers:
    """The engine's own headers (`retry-after`, ids) on an answer that is ours."""
    return [*JSON_HEADERS, *(header for header in headers if header[0] != b"content-type")]


def _plain(data: bytes, status: int) -> str:
    """What an error says that is no JSON, or says nothing."""
    text = " ".join(data[:200].decode("utf-8", "replace").split())
    return text or f"the engine answered {status} and said nothing"


def _fault(error: dict[str, Any]) -> UpstreamFault:
    """An error inside an answer, nested (vLLM) or flat (SGLang); its status is the one it names, else 500."""
    inner = error.get("error", error)
    code = inner.get("code") if isinstance(inner, dict) else None
    status = code if type(code) is int and 400 <= code < 600 else 500
    return UpstreamFault(status, error_text(error) or CUT_OFF, error)
