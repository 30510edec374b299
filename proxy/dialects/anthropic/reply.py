"""A chat answer as an Anthropic message: content blocks in the order they come, each opened, filled and closed."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import orjson

from proxy.dialects.anthropic.errors import error_object
from proxy.dialects.base import ReplyTranslator
from proxy.dialects.chat import dumps, first_choice

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":'


class AnthropicReply(ReplyTranslator):
    """One answer. `stops` are the stop sequences of the request, `prefill` the text it goes on from."""

    def __init__(self, model: str, stops: list[str], prefill: str) -> None:
        self.model = model
        self.stops = stops
        self.prefill = prefill
        self._to_skip = prefill
        self._started = False
        self._index = -1
        self._kind: str | None = None
        self._text_head = b""
        self._tools: dict[int, int] = {}  # the engine's index of a tool call -> the block's
        self._arguments: list[str] = []
        self._thought: list[str] = []
        self._finish: str | None = None
        self._matched: Any = None
        self._usage: dict[str, Any] = {}

    # a stream

    def feed(self, chunk: dict[str, Any]) -> bytes:
        if self._kind == "text" and (more := more_text(chunk)):  # nearly all there is
            return self._text_head + _json(more) + b"}}\n\n"
        out = b"" if self._started else self._start(chunk)
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict) or choice.get("index"):
                continue  # one answer: a message has no second choice
            if choice.get("finish_reason") is not None:
                self._finish = choice["finish_reason"]
                self._matched = matched(choice)
            delta = choice.get("delta")
            if isinstance(delta, dict):
                out += self._delta(delta)
        return out

    def _delta(self, delta: dict[str, Any]) -> bytes:
        out = b""
        thought = delta.get("reasoning") or delta.get("reasoning_content")
        if thought and isinstance(thought, str):
            if self._kind != "thinking":
                out += self._open("thinking", b'{"type":"thinking","thinking":"","signature":""}')
            self._thought.append(thought)
            out += self._fill(b'{"type":"thinking_delta","thinking":', thought)
        text = delta.get("content") or delta.get("refusal")
        if text and self._to_skip and self.repeats_prefill:
            text = self._skip(text)
        if text and isinstance(text, str):
            if self._kind != "text":
                out += self._open("text", b'{"type":"text","text":""}')
            out += self._fill(b'{"type":"text_delta","text":', text)
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict):
                out += self._call(call)
        return out

    def _skip(self, text: str) -> str:
        """What of a piece of text is not the prefill again."""
        left, self._to_skip = self._to_skip, ""
        if text.startswith(left):
            return text[len(left) :]
        if left.startswith(text):
            self._to_skip = left[len(text) :]
            return ""
        return text

    def _call(self, call: dict[str, Any]) -> bytes:
        """Opens a tool call, or goes on with one: by the engine's index, for the last one where there is none."""
        out = b""
        at = call.get("index")
        at = at if type(at) is int else max(self._tools, default=0)
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        if at not in self._tools:
            head = {"type": "tool_use", "id": call_id(call, at), "name": str(function.get("name") or ""), "input": {}}
            out += self._open("tool_use", dumps(head))
            self._tools[at] = self._index
            self._arguments = []
        arguments = function.get("arguments")
        if arguments and not isinstance(arguments, str):
            arguments = dumps(arguments).decode()
        if arguments:
            self._arguments.append(arguments)
            out += self._fill(b'{"type":"input_json_delta","partial_json":', arguments, self._tools[at])
        return out

    def _start(self, chunk: dict[str, Any]) -> bytes:
        self._started = True
        message: dict[str, Any] = {
            "id": message_id(chunk),
            "type": "message",
            "role": "assistant",
            "model": model_of(chunk, self.model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of({"prompt_tokens": self.prompt_tokens or 0}),
        }
        return b'event: message_start\ndata: {"type":"message_start","message":' + dumps(message) + b"}\n\n"

    def _open(self, kind: str, block: bytes) -> bytes:
        out = self._close()
        self._kind = kind
        self._index += 1
        if kind == "text":
            self._text_head = _DELTA % self._index + b'{"type":"text_delta","text":'
        return out + (
            b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}\n\n'
            % (self._index, block)
        )

    def _fill(self, head: bytes, text: str, index: int | None = None) -> bytes:
        return _DELTA % (self._index if index is None else index) + head + _json(text) + b"}}\n\n"

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        out = b""
        if self._kind == "thinking":
            out = self._fill(b'{"type":"signature_delta","signature":', signature("".join(self._thought)))
            self._thought = []
        self._kind = None
        return out + b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n' % self._index

    def finish(self) -> bytes:
        out = self._close()
        arguments = "".join(self._arguments) if self._tools else None
        reason, sequence = self._stop(self._finish, self._matched, arguments)
        last = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": usage_of(self._usage),
        }
        return out + b"event: message_delta\ndata: " + dumps(last) + b"\n\n" + STOP

    def error_event(self, status: int, message: str) -> bytes:
        return b"event: error\ndata: " + dumps(error_object(status, message)) + b"\n\n"

    def ping(self) -> bytes:
        return PING

    # whole

    def body(self, chat: dict[str, Any]) -> dict[str, Any]:
        choice, message = first_choice(chat)
        if self.repeats_prefill and self.prefill and str(message.get("content")).startswith(self.prefill):
            message = {**message, "content": message["content"][len(self.prefill) :]}
        content = blocks(message)
        calls = written(message)
        reason, sequence = self._stop(choice.get("finish_reason"), matched(choice), calls[-1][1] if calls else None)
        return {
            "id": message_id(chat),
            "type": "message",
            "role": "assistant",
            "model": model_of(chat, self.model),
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage_of(chat.get("usage")),
        }

    def _stop(self, finish: Any, matched: Any, arguments: str | None) -> tuple[str | None, str | None]:
        """`stop_reason` and `stop_sequence`.

        In chat a forced call ends with `stop`; here any call ends with `tool_use`, but one that a stop string cut,
        which must not run. `arguments` are those of the last call, None where there is none.
        """
        if finish is None:
            return None, None
        if finish == "length":
            return "max_tokens", None
        if finish == "content_filter":
            return "refusal", None
        if arguments is not None and input_of(arguments) is not None:
            return "tool_use", None
        if isinstance(matched, str) and matched in self.stops:
            return "stop_sequence", matched
        if matched is None and self.matched_stop is not None:
            return "stop_sequence", self.matched_stop or None
        return ("tool_use" if arguments is not None or finish == "tool_calls" else "end_turn"), None


def more_text(chunk: dict[str, Any]) -> str | None:
    """The text of a chunk that holds nothing else."""
    choices = chunk.get("choices")
    choice = choices[0] if type(choices) is list and len(choices) == 1 else None
    if type(choice) is not dict or choice.get("finish_reason") is not None or choice.get("index"):
        return None
    delta = choice.get("delta")
    if type(delta) is not dict or len(delta) != 1 or chunk.get("usage") is not None:
        return None
    text = delta.get("content")
    return text if type(text) is str else None


def blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    """An assistant message of chat as content blocks: thinking, text, tool calls."""
    made: list[dict[str, Any]] = []
    thought = message.get("reasoning") or message.get("reasoning_content")
    if thought and isinstance(thought, str):
        made.append({"type": "thinking", "thinking": thought, "signature": signature(thought)})
    text = message.get("content") or message.get("refusal")
    if text and isinstance(text, str):
        made.append({"type": "text", "text": text})
    for at, call in _calls(message):
        name = str(call["function"].get("name") or "")
        given = input_of(_arguments(call)) or {}
        made.append({"type": "tool_use", "id": call_id(call, at), "name": name, "input": given})
    return made


def written(message: dict[str, Any]) -> list[tuple[str, str]]:
    """Id and arguments of each tool call, the arguments as the model wrote them."""
    return [(call_id(call, at), _arguments(call)) for at, call in _calls(message)]


def input_of(arguments: str) -> dict[str, Any] | None:
    """A tool call's arguments as the object that `input` must be; None where they are none (cut off, or made wrong).

    The agent then gets an empty one; `metadata.chat_response` of the record holds them as they were sampled.
    """
    try:
        value = msgspec.json.decode(arguments or "{}")  # keeps integers beyond 64 bits
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _calls(message: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    calls = message.get("tool_calls")
    return [
        (at, call)
        for at, call in enumerate(calls if isinstance(calls, list) else ())
        if isinstance(call, dict) and isinstance(call.get("function"), dict)
    ]


def _arguments(call: dict[str, Any]) -> str:
    told = call["function"].get("arguments")
    return told if isinstance(told, str) else "" if told is None else dumps(told).decode()


def matched(choice: dict[str, Any]) -> Any:
    """What ended a choice: `stop_reason` (vLLM) or `matched_stop` (SGLang), a stop string or a token id."""
    found = choice.get("stop_reason")
    return choice.get("matched_stop") if found is None else found


def usage_of(usage: Any) -> dict[str, Any]:
    """Anthropic's counts: `input_tokens` are those that no cache had."""
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else 0
    return {
        "input_tokens": max(0, _count(usage.get("prompt_tokens")) - cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": _count(usage.get("completion_tokens")),
    }


def message_id(body: dict[str, Any]) -> str:
    told = str(body.get("id") or "")
    return "msg_" + (told.removeprefix("chatcmpl-").removeprefix("msg_") or "0")


def model_of(body: dict[str, Any], asked: str) -> str:
    told = body.get("model")
    return told if isinstance(told, str) and told else asked


def call_id(call: dict[str, Any], at: int) -> str:
    """The engine's own id of a tool call, so that it comes back as it was; one by its place where there is none."""
    told = call.get("id")
    return told if isinstance(told, str) and told else f"toolu_{at}"


def signature(thought: str) -> str:
    """Clients drop a thinking block without one. Ours says what it belongs to, and nothing else."""
    return hashlib.sha256(thought.encode("utf-8", "replace")).hexdigest()


def _count(value: Any) -> int:
    return value if type(value) is int else 0


def _json(text: str) -> bytes:
    try:
        return orjson.dumps(text)
    except TypeError:  # half of a surrogate pair
        return orjson.dumps(text.encode("utf-8", "replace").decode())
