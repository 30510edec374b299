"""A chat answer as an Anthropic message: its blocks, why it stopped, and its counts, streamed or as one body."""

from __future__ import annotations

from typing import Any

from capture.chat.tool_calls import ToolCall, ToolCalls
from capture.json import objects
from proxy.dialects.anthropic.blocks import Block, Kind, event, input_of
from proxy.dialects.anthropic.errors import error_object
from proxy.dialects.base import ChatRequest, ReplyTranslator
from proxy.dialects.call_ids import CallIds
from proxy.dialects.chat import arguments_name, as_chunk, count, reasoning_of, tool_calls

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


class AnthropicReply(ReplyTranslator):
    """One answer. A completed body goes the same way as one chunk, so that an answer is the same streamed or not."""

    def __init__(self, request: ChatRequest) -> None:
        self.model: str = request.chat["model"]
        self.stops: list[str] = request.chat.get("stop") or []
        self.blocks: list[Block] = []
        self._ids = CallIds("toolu", request.chat["messages"])
        self._head: dict[str, Any] | None = None
        self._prefill_left: str = request.context
        self._at = 0  # the block whose turn it is
        self._text: Block | None = None  # an open block of text to which text is added
        self._calls = ToolCalls()
        self._call_blocks: dict[ToolCall, Block] = {}
        self._finish: Any = None
        self._matched: Any = None
        self._usage: dict[str, Any] = {}

    # a stream

    def feed(self, chunk: dict[str, Any]) -> bytes:
        if self._text is not None and (text := only_text(chunk)):  # nearly all there is
            return self._text.feed(text)
        out = b"" if self._head is not None else self._start(chunk)
        usage = chunk.get("usage")
        if usage and isinstance(usage, dict):
            self._usage = usage
        for choice in objects(chunk.get("choices")):
            if choice.get("index"):
                continue  # one answer: a message has no second choice
            if choice.get("finish_reason"):
                self._finish = choice["finish_reason"]
                self._matched = matched(choice)
            delta = choice.get("delta")
            if isinstance(delta, dict):
                out += self._delta(delta)
        return out

    def finish(self) -> bytes:
        out = self._advance(finished=True)
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        last = {"type": "message_delta", "delta": delta, "usage": usage_of(self._usage)}
        return out + event("message_delta", last) + STOP

    def error_event(self, status: int, message: str) -> bytes:
        return event("error", error_object(status, message))

    def ping(self) -> bytes:
        return PING

    # a completed body

    def body(self, chat: dict[str, Any]) -> dict[str, Any]:
        if self._head is None:
            self.feed(as_chunk(chat))
            self._advance(finished=True)
        usage = chat.get("usage")
        self._usage = usage if usage and isinstance(usage, dict) else self._usage
        reason, sequence = self._stop()
        return {
            **(self._head or {}),
            "content": [block.json() for block in self.blocks if block.opened],
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage_of(self._usage),
        }

    def call_ids(self) -> list[str]:
        return [self._call_blocks[call].call_id for call in self._calls.calls]

    def cache_entries(self) -> dict[str, str | bytes]:
        """The arguments of calls as the model wrote them: this dialect gives them to the agent parsed."""
        calls = {block.call_id: block.call.arguments for block in self.blocks if block.call and block.opened}
        return {arguments_name(call_id): arguments for call_id, arguments in calls.items() if arguments}

    # what a chunk says

    def _start(self, chunk: dict[str, Any]) -> bytes:
        answer, model = chunk.get("id"), chunk.get("model")
        name = str(answer or "").removeprefix("chatcmpl-").removeprefix("msg_")
        self._head = {
            "id": f"msg_{name or '0'}",
            "type": "message",
            "role": "assistant",
            "model": model if isinstance(model, str) and model else self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of({"prompt_tokens": self.prompt_tokens or 0}),
        }
        return event("message_start", {"type": "message_start", "message": self._head})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        out = b""
        if thought := reasoning_of(delta):
            out += self._add_text("thinking", thought)
        text = delta.get("content") or delta.get("refusal")
        if text and isinstance(text, str):
            text = self._without_prefill(text)
            out += self._add_text("text", text) if text else b""
        for call, piece in self._calls.add(tool_calls(delta)):
            out += self._add_call(call, piece)
        return out

    def _without_prefill(self, text: str) -> str:
        """What of a piece of text is not the prefill again, where the engine repeats it."""
        left = self._prefill_left if self.repeats_prefill else ""
        self._prefill_left = ""
        if left.startswith(text):
            self._prefill_left = left[len(text) :]
        return text[len(left) :] if text.startswith(left) else "" if left.startswith(text) else text

    def _add_text(self, kind: Kind, text: str) -> bytes:
        block = self.blocks[-1] if self.blocks else None
        if block is None or block.kind != kind:
            block = Block(kind, len(self.blocks))
            self.blocks.append(block)
        return self._fill(block, text)

    def _add_call(self, call: ToolCall, piece: str) -> bytes:
        block = self._call_blocks.get(call)
        if block is None:
            block = self._call_blocks[call] = Block("tool_use", len(self.blocks), call)
            self.blocks.append(block)
        return self._fill(block, piece)

    def _fill(self, block: Block, piece: str) -> bytes:
        return block.feed(piece) + self._advance()

    def _advance(self, *, finished: bool = False) -> bytes:
        """Opens the block whose turn it is, and closes it as soon as nothing can follow in it and another waits."""
        out = b""
        while self._at < len(self.blocks):
            block = self.blocks[self._at]
            if not block.opened and (block.is_ready or finished):
                out += block.open(self._ids)
            is_last = self._at == len(self.blocks) - 1
            if not block.opened or not (finished or (not is_last and block.is_whole)):
                break
            out += block.close()
            self._at += 1
        last = self.blocks[-1] if self.blocks else None
        self._text = last if last is not None and last.kind == "text" and last.opened else None
        return out

    def _stop(self) -> tuple[str | None, str | None]:
        """`stop_reason` and `stop_sequence`.

        In chat a forced call ends with `stop`; here any call ends with `tool_use`, except one that a stop string cut,
        which must not run.
        """
        last = self._calls.calls[-1] if self._calls.calls else None
        if not self._finish:
            return None, None
        if self._finish == "length":
            return "max_tokens", None
        if self._finish == "content_filter":
            return "refusal", None
        if last is not None and input_of(last.arguments) is not None:
            return "tool_use", None
        if isinstance(self._matched, str) and self._matched in self.stops:
            return "stop_sequence", self._matched
        if self._matched is None and self.matched_stop is not None:
            return "stop_sequence", self.matched_stop or None
        return ("tool_use" if last is not None or self._finish == "tool_calls" else "end_turn"), None


def only_text(chunk: dict[str, Any]) -> str | None:
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


def matched(choice: dict[str, Any]) -> Any:
    """What ended a choice: `stop_reason` (vLLM) or `matched_stop` (SGLang), a stop string or a token id."""
    found = choice.get("stop_reason")
    return choice.get("matched_stop") if found is None else found


def usage_of(usage: dict[str, Any]) -> dict[str, Any]:
    """Anthropic's counts: `input_tokens` are those that no cache had."""
    details = usage.get("prompt_tokens_details")
    cached = count(details.get("cached_tokens")) if isinstance(details, dict) else 0
    return {
        "input_tokens": max(0, count(usage.get("prompt_tokens")) - cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": count(usage.get("completion_tokens")),
    }
