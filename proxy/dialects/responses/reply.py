"""One answer as a response: chat chunks in, the events of the Responses dialect out; or a whole chat body in one piece.

`response.created` opens with the first chunk; text, reasoning and calls become items that are opened, fed and closed;
`response.completed`, `.incomplete` or `.failed` ends. A whole body goes the same way as one chunk, so that an answer is
the same streamed or not.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import Any, Final

from proxy.dialects.base import ChatRequest, ReplyTranslator
from proxy.dialects.chat import dumps, objects
from proxy.dialects.responses.errors import failure
from proxy.dialects.responses.history import item_id
from proxy.dialects.responses.reply_items import (
    CallItem,
    CustomCallItem,
    Events,
    Item,
    Json,
    MessageItem,
    ReasoningItem,
)
from proxy.dialects.responses.request import Context
from proxy.dialects.responses.tools import Tool

#: Finish reasons by which an answer is not whole, and why.
_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
_BROKEN: Final = ("abort", "error")


class ResponsesReply(ReplyTranslator):
    """`answer` is the hex of the response's id, which the ids of its items carry."""

    def __init__(self, translated: ChatRequest) -> None:
        self.context: Context = translated.context
        self.answer = secrets.token_hex(16)
        self.events = Events()
        self.items: list[Item] = []
        self._model = translated.chat.get("model")
        self._created = int(time.time())
        self._echo: bytes | None = None
        self._text: MessageItem | ReasoningItem | None = None
        self._calls: list[_Call] = []
        self._usage: Any = None
        self._finish: Any = None
        self._error: Json | None = None
        self._closing: bytes | None = None

    # a stream

    def feed(self, chunk: dict[str, Any]) -> bytes:
        out = [] if self._echo is not None else [self._open(chunk)]
        if chunk.get("usage") is not None:
            self._usage = chunk["usage"]
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and not choice.get("index"):  # one answer: a response has no second choice
                delta = choice.get("delta")
                if isinstance(delta, dict):
                    self._delta(delta, choice.get("logprobs"), out)
                finish = choice.get("finish_reason")
                self._finish = str(finish) if finish else self._finish
        return out[0] if len(out) == 1 else b"".join(out)

    def finish(self) -> bytes:
        closing = self._close()
        kind = f"response.{self._status()}"
        return closing + self._lifecycle(kind if kind != "response.in_progress" else "response.incomplete")

    def error_event(self, status: int, message: str) -> bytes:
        """`error`, at which OpenAI's client raises, and `response.failed`, which Codex reads."""
        opening = b"" if self._echo is not None else self._open({})
        self._error = failure(status, message)
        told = {"code": self._error["code"], "message": self._error["message"], "param": None}
        nested = {"type": "server_error" if status >= 500 else "invalid_request_error", **told}
        return opening + self.events.event("error", {**told, "error": nested}) + self._lifecycle("response.failed")

    def ping(self) -> bytes:
        """An event, not a comment: Codex counts the seconds between events."""
        return self._open({}) if self._echo is None else self._lifecycle("response.in_progress")

    # a whole answer

    def body(self, chat: dict[str, Any]) -> dict[str, Any]:
        if self._echo is None:
            self.feed({**chat, "choices": [_as_chunk(one) for one in objects(chat.get("choices"))[:1]]})
        if chat.get("usage") is not None:
            self._usage = chat["usage"]
        if chat.get("error") is not None and self._error is None:
            told = chat["error"]
            self._error = failure(500, str(told.get("message") if isinstance(told, dict) else told))
        if self._finish is not None:
            self._close()
        whole = {**self._head(), **self.context.echo}
        if whole["status"] == "in_progress":
            whole["status"] = "incomplete"  # it broke off
        return whole

    # how it begins and ends

    def _open(self, chunk: Json) -> bytes:
        created = chunk.get("created")
        self._created = created if type(created) is int else self._created
        self._model = chunk.get("model") or self._model
        self._echo = dumps(self.context.echo)[1:]
        return self._lifecycle("response.created") + self._lifecycle("response.in_progress")

    def _close(self) -> bytes:
        """What closes the open items; made once."""
        if self._closing is None:
            out: list[bytes] = []
            for call in self._calls:
                self._begin(call, out)
            if all(isinstance(item, ReasoningItem) for item in self.items):
                # An answer that ends with nothing said: without an item it would be missing in what comes back.
                self._message(out, refusal=False)
            cut = self._status() != "completed"
            for item in self.items:
                if item.status == "in_progress":
                    last = item is self.items[-1]
                    out.append(item.close("incomplete" if cut and last else "completed"))
            self._text = None
            self._closing = b"".join(out)
        return self._closing

    def _status(self) -> str:
        if self._error is not None or self._finish in _BROKEN:
            return "failed"
        if self._finish in _INCOMPLETE:
            return "incomplete"
        return "completed" if self._finish is not None else "in_progress"

    def _lifecycle(self, kind: str) -> bytes:
        return self.events.raw(kind, b'"response":%b,%b}' % (dumps(self._head())[:-1], self._echo or b"}"))

    def _head(self) -> Json:
        """The response without the fields that it repeats from its request."""
        status = self._status()
        if status == "failed" and self._error is None:
            self._error = failure(500, f"the engine ended the answer with {self._finish!r}")
        reason = _INCOMPLETE.get(self._finish)
        return {
            "id": f"resp_{self.answer}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": self._error,
            "incomplete_details": {"reason": reason} if reason else None,
            "model": self._model,
            "output": [item.json() for item in self.items],
            "usage": usage_of(self._usage),
        }

    # what a chunk says

    def _delta(self, delta: Json, logprobs: Any, out: list[bytes]) -> None:
        thought = delta.get("reasoning") or delta.get("reasoning_content")
        if thought and isinstance(thought, str):
            item = self._text
            if not isinstance(item, ReasoningItem):
                item = self._reasoning(out)
            out.append(item.feed(thought))
        content = delta.get("content")
        if content and isinstance(content, str):
            told = _logprobs(logprobs) if self.context.logprobs else None
            text = self._text
            if not isinstance(text, MessageItem) or text.refusal:
                text = self._message(out, refusal=False)
            out.append(text.feed(content, told))
        refusal = delta.get("refusal")
        if refusal and isinstance(refusal, str):
            text = self._text
            if not isinstance(text, MessageItem) or not text.refusal:
                text = self._message(out, refusal=True)
            out.append(text.feed(refusal))
        for fragment in objects(delta.get("tool_calls")):
            self._call(fragment, out)
        if isinstance(delta.get("function_call"), dict):
            self._call({"index": 0, "function": delta["function_call"]}, out)

    def _message(self, out: list[bytes], *, refusal: bool) -> MessageItem:
        tells = self.context.logprobs
        item = MessageItem(self.events, *self._next(MessageItem.kind), refusal=refusal, logprobs=tells)
        self._opened(item, out)
        self._text = item
        return item

    def _reasoning(self, out: list[bytes]) -> ReasoningItem:
        summary, encrypted = self.context.summary, self.context.encrypted
        item = ReasoningItem(self.events, *self._next(ReasoningItem.kind), summary=summary, encrypted=encrypted)
        self._opened(item, out)
        self._text = item
        return item

    def _next(self, kind: str) -> tuple[str, int]:
        return item_id(kind, self.answer, len(self.items)), len(self.items)

    def _opened(self, item: Item, out: list[bytes]) -> None:
        """A new item ends the text before it; calls stay open, for engines may go on with any of them."""
        if self._text is not None:
            out.append(self._text.close("completed"))
            self._text = None
        self.items.append(item)
        out.append(item.opened())

    # tool calls

    def _call(self, fragment: Json, out: list[bytes]) -> None:
        call = self._call_of(fragment)
        given = fragment.get("function")
        function: Json = given if isinstance(given, dict) else {}
        call.id = fragment.get("id") or call.id
        if isinstance(function.get("name"), str):
            call.name = call.name or function["name"]
        arguments = function.get("arguments")
        if arguments is not None and not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        if call.item is None and call.name:
            self._begin(call, out)
        if arguments:
            if call.item is None:
                call.early += arguments
            else:
                out.append(call.item.feed(arguments))

    def _call_of(self, fragment: Json) -> _Call:
        """The call that a fragment opens or goes on with: the assembler's rule, so that both say the same."""
        index, call_id = fragment.get("index"), fragment.get("id")
        index = index if type(index) is int else None
        for call in reversed(self._calls):
            if call.index == index if index is not None else (not call_id or call.id == call_id):
                named = isinstance(fragment.get("function"), dict) and fragment["function"].get("name")
                if index is not None and call_id and call.id not in (None, call_id) and named:
                    break  # another call under the same index
                return call
        call = _Call(len(self._calls) if index is None else index)
        self._calls.append(call)
        return call

    def _begin(self, call: _Call, out: list[bytes]) -> None:
        if call.item is not None:
            return
        tool = self.context.tools.get(call.name) or Tool(call.name)
        kind = CustomCallItem if tool.custom else CallItem
        call.item = kind(self.events, *self._next(kind.kind), self._call_id(call), tool)
        self._opened(call.item, out)
        if call.early:
            out.append(call.item.feed(call.early))

    def _call_id(self, call: _Call) -> str:
        """The engine's id; one of ours where it gave none, or one that another call of this answer has."""
        taken = {other.item.call_id for other in self._calls if other.item is not None}
        given = str(call.id) if call.id else ""
        return given if given and given not in taken else f"call_{self.answer}_{len(taken)}"


class _Call:
    """A call that the engine is writing; `item` once its name is known."""

    __slots__ = ("early", "id", "index", "item", "name")

    def __init__(self, index: int) -> None:
        self.index = index
        self.id: Any = None
        self.name = ""
        self.early = ""
        self.item: CallItem | None = None


def usage_of(usage: Any) -> Json | None:
    """Chat's counts under their names here."""
    if not isinstance(usage, dict):
        return None
    prompt, sampled = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    read, written = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    cached = _count(read.get("cached_tokens")) if isinstance(read, dict) else 0
    thought = _count(written.get("reasoning_tokens")) if isinstance(written, dict) else 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": _count(usage.get("total_tokens")) or prompt + sampled,
    }


def _count(value: Any) -> int:
    return value if type(value) is int else 0


def _logprobs(given: Any) -> list[Json]:
    entries = objects(given.get("content") if isinstance(given, dict) else None)
    return [
        {**_token(one), "top_logprobs": [_token(top) for top in objects(one.get("top_logprobs"))]} for one in entries
    ]


def _token(entry: Json) -> Json:
    token, given = str(entry.get("token") or ""), entry.get("bytes")
    told = given if isinstance(given, list) else list(token.encode("utf-8", "replace"))
    return {"token": token, "bytes": told, "logprob": entry.get("logprob")}


def _as_chunk(choice: Json) -> Json:
    """A completed choice as the chunk that says all of it."""
    message = choice.get("message")
    delta: Json = dict(message) if isinstance(message, dict) else {}
    delta["tool_calls"] = [{**call, "index": at} for at, call in enumerate(objects(delta.get("tool_calls")))]
    return {**choice, "index": 0, "delta": delta}
