"""A double of vLLM 0.32's HTTP side that follows a script and remembers what it sampled, for `benchmarks.peers`.

Ids, logprobs and usage are sent only where they are asked for, and a stream's event with nothing to show only where ids
are. One token takes `PACE` seconds, and a client that leaves is noticed at the next token.
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

PACE = 0.03
TEXT = ("The", " sea", " is", " deep", ".", "")
COUNT = "Count to sixty."
#: A tool call, token by token; None where a parser shows nothing of it.
CALL = (
    ("<tool_call>", None),
    ("write", ""),
    *((piece, piece) for piece in ('{"path": ', '"answer.txt"', "}")),
    ("", None),
)
TOOL = {"type": "function", "function": {"name": "write", "parameters": {"type": "object", "properties": {}}}}


@dataclass
class Choice:
    """One choice: token ids, one logprob per id, and the text or the tool call's arguments."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    shown: str = ""


@dataclass
class Call:
    """What the engine sampled for one call, or what a target recorded of it. `gone`: the engine's client left early."""

    prompt: list[int]
    choices: list[Choice]
    finished: float = 0.0
    gone: bool = False


class Step(NamedTuple):
    """One sampled token. `shown` is what the parser shows of it: text, arguments, or nothing (None)."""

    token: str
    id: int
    logprob: float
    shown: str | None
    finish_reason: str | None = None
    stop_reason: str | None = None


def sample(body: dict[str, Any], index: int) -> Iterator[Step]:
    """The tokens of one choice, up to a stop string or the stop token."""
    counts = COUNT in json.dumps(body.get("messages"))
    texts = [f" {number}" for number in range(60)] if counts else TEXT
    pieces = CALL if body.get("tools") else [(text, text) for text in texts]
    for number, (token, shown) in enumerate(pieces):
        token_id, logprob = 100 * (index + 1) + number, -0.125 * (number + 1) - index
        if token in (body.get("stop") or ()):
            yield Step(token, token_id, logprob, None, "stop", token)
            return
        finish_reason = None if number + 1 < len(pieces) else "tool_calls" if body.get("tools") else "stop"
        yield Step(token, token_id, logprob, shown, finish_reason)


class Engine(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.calls: list[Call] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Engine

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        model = {"id": "policy", "object": "model", "owned_by": "vllm"}
        side = {"/version": {"version": "0.32.0"}, "/health": {}, "/v1/models": {"object": "list", "data": [model]}}
        self.reply(200 if self.path in side else 404, side.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))))
        if self.path not in ("/v1/chat/completions", "/v1/completions"):
            self.reply(404, {"detail": "Not Found"})
        elif body.get("stream_options") and not body.get("stream"):
            self.reply(400, {"error": {"message": "Stream options can only be defined when `stream=True`."}})
        else:
            number = len(self.server.calls)
            call = Call([1, 4093, 198, 5000 + number], [Choice() for _ in range(body.get("n") or 1)])
            self.server.calls.append(call)
            try:
                self.answer(call, body, chat="chat" in self.path)
            except ConnectionError:
                call.gone = True
            call.finished = time.monotonic()

    def answer(self, call: Call, body: dict[str, Any], *, chat: bool) -> None:
        streams, ids = bool(body.get("stream")), bool(body.get("return_token_ids"))
        kind = "text_completion" if not chat else "chat.completion.chunk" if streams else "chat.completion"
        head = {"id": "cmpl-1", "object": kind, "created": 1, "model": "policy"}
        prompt = {"prompt_token_ids": call.prompt} if ids else {}
        if streams:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream; charset=utf-8")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for index in range(len(call.choices)):
                self.event(
                    {**head, "choices": [{"index": index, "delta": {"role": "assistant", "content": ""}}], **prompt}
                )
        taken: list[list[Step]] = [[] for _ in call.choices]
        for row in zip(*(sample(body, index) for index in range(len(call.choices))), strict=True):
            for index, step in enumerate(row):
                taken[index].append(step)
                choice = call.choices[index]
                choice.ids.append(step.id)
                choice.logprobs.append(step.logprob)
                choice.shown += step.shown or ""
                if streams and (step.shown is not None or ids or step.finish_reason):
                    self.event(
                        {
                            **head,
                            "choices": [{"index": index, **reported(body, [step], call, chat), **delta(body, step)}],
                        }
                    )
            self.wait()
        sizes = {"prompt_tokens": len(call.prompt), "completion_tokens": sum(len(steps) for steps in taken)}
        usage = {**sizes, "total_tokens": sum(sizes.values())}
        if not streams:
            choices = [
                {"index": index, **reported(body, steps, call, chat), **shown_whole(body, steps, chat)}
                for index, steps in enumerate(taken)
            ]
            self.reply(200, {**head, "choices": choices, "usage": usage, **(prompt if chat else {})})
            return
        if (body.get("stream_options") or {}).get("include_usage"):
            self.event({**head, "choices": [], "usage": usage})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def wait(self) -> None:
        """A token's time. Raises `ConnectionError` where the client has left, as vLLM notices it."""
        time.sleep(PACE)
        readable, _, _ = select.select([self.connection], [], [], 0)
        if readable and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionError

    def event(self, value: Any) -> None:
        self.chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def reply(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def reported(body: dict[str, Any], steps: list[Step], call: Call, chat: bool) -> dict[str, Any]:
    """What a chunk or a whole choice says of its tokens, where it was asked for."""
    logprobs: Any = None
    tokens, values = [step.token for step in steps], [step.logprob for step in steps]
    if chat and body.get("logprobs"):
        logprobs = {"content": [{"token": step.token, "logprob": step.logprob, "top_logprobs": []} for step in steps]}
    elif not chat and body.get("logprobs") is not None and body["logprobs"] is not False:
        tops = [{step.token: step.logprob} for step in steps]
        logprobs = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": [0] * len(steps)}
    last = steps[-1]
    found: dict[str, Any] = {"logprobs": logprobs, "finish_reason": last.finish_reason, "stop_reason": last.stop_reason}
    if body.get("return_token_ids"):
        found["token_ids"] = [step.id for step in steps]
        found |= {} if chat else {"prompt_token_ids": call.prompt}
    return found


def delta(body: dict[str, Any], step: Step) -> dict[str, Any]:
    if step.shown is None or not body.get("tools"):
        return {"delta": {"content": step.shown} if step.shown else {}}
    named = {"id": "call-1", "type": "function", "function": {"name": "write", "arguments": ""}}
    call = {"function": {"arguments": step.shown}} if step.shown else named
    return {"delta": {"tool_calls": [{"index": 0, **call}]}}


def shown_whole(body: dict[str, Any], steps: list[Step], chat: bool) -> dict[str, Any]:
    text = "".join(step.shown or "" for step in steps)
    if not chat:
        return {"text": text}
    function = {"name": "write", "arguments": text}
    calls = {"tool_calls": [{"id": "call-1", "type": "function", "function": function}]} if body.get("tools") else {}
    return {"message": {"role": "assistant", "content": None if calls else text, **calls}}
