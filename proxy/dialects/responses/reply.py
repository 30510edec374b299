"""One answer as a response: chat chunks in, the events of the Responses dialect out; or a completed body at once.

`response.created` opens with the first chunk; text, reasoning and calls become items that are opened, fed and closed;
`response.completed`, `.incomplete` or `.failed` ends. A completed body goes the same way as one chunk, so that an
answer is the same streamed or not.
"""

from __future__ import annotations

import secrets
import time
from typing import Any, Final

from capture.chat.tool_calls import ToolCall, ToolCalls
from capture.json import objects
from proxy.dialects.base import ChatRequest, ReplyTranslator
from proxy.dialects.call_ids import CallIds
from proxy.dialects.chat import Json, arguments_name, as_chunk, count, dumps, reasoning_of, tool_calls
from proxy.dialects.responses.errors import failure
from proxy.dialects.responses.history import item_id
from proxy.dialects.responses.reply_items import (
    CALL_ITEMS,
    CallItem,
    Events,
    Item,
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

    def __init__(self, request: ChatRequest) -> None:
        self.context: Context = request.context
        self.answer = secrets.token_hex(16)
        self.events = Events()
        self.items: list[Item] = []
        self._model = request.chat.get("model")
        self._created = int(time.time())
        self._echo: bytes | None = None
        self._text: MessageItem | ReasoningItem | None = None
        self._calls = ToolCalls()
        self._call_items: dict[ToolCall, CallItem] = {}
        self._ids = CallIds("call", request.chat["messages"])
        self._usage: Any = None
        self._finish: Any = None
        self._error: Json | None = None
        self._closing: bytes | None = None

    # a stream

    def feed(self, chunk: dict[str, Any]) -> bytes:
        out = [] if self._echo is not None else [self._open(chunk)]
        self._usage = chunk.get("usage") or self._usage
        for choice in objects(chunk.get("choices")):
            if not choice.get("index"):  # one answer: a response has no second choice
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
        fields = {"code": self._error["code"], "message": self._error["message"], "param": None}
        nested = {"type": "server_error" if status >= 500 else "invalid_request_error", **fields}
        return opening + self.events.event("error", {**fields, "error": nested}) + self._lifecycle("response.failed")

    def ping(self) -> bytes:
        """An event, not a comment: Codex counts the seconds between events."""
        return self._open({}) if self._echo is None else self._lifecycle("response.in_progress")

    # a completed body

    def body(self, chat: dict[str, Any]) -> dict[str, Any]:
        if self._echo is None:
            self.feed(as_chunk(chat))
        self._usage = chat.get("usage") or self._usage
        if chat.get("error") is not None and self._error is None:
            error = chat["error"]
            self._error = failure(500, str(error.get("message") if isinstance(error, dict) else error))
        if self._finish is not None:
            self._close()
        body = {**self._head(), **self.context.echo}
        if body["status"] == "in_progress":
            body["status"] = "incomplete"  # it broke off
        return body

    def call_ids(self) -> list[str]:
        return [self._call_items[call].call_id for call in self._calls.calls if call in self._call_items]

    def cache_entries(self) -> dict[str, str | bytes]:
        """The conversation so far, for `previous_response_id`, unless `store` is false; and the arguments that the
        agent got in another form, as they were sampled."""
        calls = self._call_items.items()
        entries: dict[str, str | bytes] = {
            arguments_name(item.call_id): call.arguments for call, item in calls if item.tool.kind != "function"
        }
        if self.context.store:
            entries[f"resp_{self.answer}"] = dumps([*self.context.items, *(item.json() for item in self.items)])
        return entries

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
            for call in self._calls.calls:
                self._begin(call, out)
            if all(isinstance(item, ReasoningItem) for item in self.items):
                # An answer without text: without an item it would be missing from the history that comes back.
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
        if thought := reasoning_of(delta):
            item = self._text
            if not isinstance(item, ReasoningItem):
                item = self._reasoning(out)
            out.append(item.feed(thought))
        content = delta.get("content")
        if content and isinstance(content, str):
            entries = _logprobs(logprobs) if self.context.logprobs else None
            text = self._text
            if not isinstance(text, MessageItem) or text.refusal:
                text = self._message(out, refusal=False)
            out.append(text.feed(content, entries))
        refusal = delta.get("refusal")
        if refusal and isinstance(refusal, str):
            text = self._text
            if not isinstance(text, MessageItem) or not text.refusal:
                text = self._message(out, refusal=True)
            out.append(text.feed(refusal))
        for call, piece in self._calls.add(tool_calls(delta)):
            self._continue(call, piece, out)

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
        """A new item ends the text before it; calls stay open, for engines may continue with any of them."""
        if self._text is not None:
            out.append(self._text.close("completed"))
            self._text = None
        self.items.append(item)
        out.append(item.opened())

    # tool calls

    def _continue(self, call: ToolCall, piece: str, out: list[bytes]) -> None:
        item = self._call_items.get(call)
        if item is not None:
            out.append(item.feed(piece) if piece else b"")
        elif call.name and (call.pieces or call.value is not None):
            for earlier in self._calls.calls[: self._calls.calls.index(call) + 1]:
                if earlier.name:
                    self._begin(earlier, out)

    def _begin(self, call: ToolCall, out: list[bytes]) -> None:
        """Opens a call's item, with what has come of it."""
        if call in self._call_items:
            return
        tool = self.context.tools.get(call.name or "") or Tool(call.name or "")
        kind = CALL_ITEMS[tool.kind]
        call_id = self._ids.of(len(self._call_items), call.id)
        item = self._call_items[call] = kind(self.events, *self._next(kind.kind), call_id, tool)
        self._opened(item, out)
        if call.pieces or call.value is not None:
            out.append(item.feed(call.arguments))


def usage_of(usage: Any) -> Json | None:
    """Chat's counts under their names here."""
    if not isinstance(usage, dict):
        return None
    prompt, sampled = count(usage.get("prompt_tokens")), count(usage.get("completion_tokens"))
    read, written = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    cached = count(read.get("cached_tokens")) if isinstance(read, dict) else 0
    thought = count(written.get("reasoning_tokens")) if isinstance(written, dict) else 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": count(usage.get("total_tokens")) or prompt + sampled,
    }


def _logprobs(given: Any) -> list[Json]:
    entries = objects(given.get("content") if isinstance(given, dict) else None)
    return [
        {**_token(entry), "top_logprobs": [_token(top) for top in objects(entry.get("top_logprobs"))]}
        for entry in entries
    ]


def _token(entry: Json) -> Json:
    token, given = str(entry.get("token") or ""), entry.get("bytes")
    written = given if isinstance(given, list) else list(token.encode("utf-8", "replace"))
    return {"token": token, "bytes": written, "logprob": entry.get("logprob")}
