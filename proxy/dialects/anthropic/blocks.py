"""Content blocks of a message as they grow. Anthropic's stream has one block open at a time, in the order of `index`.

Chat deltas know no such order: engines may alternate between calls, or continue with a call after a piece of text. A
block that is not at its turn collects what comes, and goes out whole when the block before it is closed.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, Literal

import msgspec

from capture.chat.surrogates import SurrogateJoiner
from capture.chat.tool_calls import ToolCall
from proxy.dialects.call_ids import CallIds
from proxy.dialects.chat import dumps

Kind = Literal["text", "thinking", "tool_use"]

_DELTA: Final = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":'
_FIELDS: Final[dict[Kind, bytes]] = {
    "text": b'{"type":"text_delta","text":',
    "thinking": b'{"type":"thinking_delta","thinking":',
    "tool_use": b'{"type":"input_json_delta","partial_json":',
}


class Block:
    """One block. `pieces` is its text so far: for a call its arguments."""

    def __init__(self, kind: Kind, index: int, call: ToolCall | None = None) -> None:
        self.kind = kind
        self.index = index
        self.call = call
        self.call_id = ""
        self.pieces: list[str] = []
        self.opened = False
        self.closed = False
        self.head = _DELTA % index + _FIELDS[kind]
        self._joiner = SurrogateJoiner()

    @property
    def is_ready(self) -> bool:
        """Whether it can be opened: a call says its name and id there, which are known when its arguments begin."""
        return self.call is None or bool(self.call.name and self.call.pieces) or self.call.value is not None

    @property
    def is_whole(self) -> bool:
        """Whether nothing can follow in it, now that another block has begun."""
        return self.call is None or self.call.is_whole()

    def open(self, ids: CallIds) -> bytes:
        self.opened = True
        start: dict[str, Any] = {"type": self.kind}
        if self.call is not None:
            self.call_id = ids.of(self.index, self.call.id)
            start |= {"id": self.call_id, "name": self.call.name or "", "input": {}}
        else:
            start |= {"text": ""} if self.kind == "text" else {"thinking": "", "signature": ""}
        opening = {"type": "content_block_start", "index": self.index, "content_block": start}
        return event("content_block_start", opening) + self._delta("".join(self.pieces))

    def feed(self, piece: str) -> bytes:
        """The event for one more piece; none while the block is not open."""
        piece = self._joiner.feed(piece)
        if not piece or self.closed:
            return b""
        self.pieces.append(piece)
        return self._delta(piece) if self.opened else b""

    def close(self) -> bytes:
        out = self.feed(self._joiner.flush())
        self.closed = True
        if self.kind == "thinking":
            signed = {"type": "signature_delta", "signature": signature("".join(self.pieces))}
            out += event("content_block_delta", {"type": "content_block_delta", "index": self.index, "delta": signed})
        return out + event("content_block_stop", {"type": "content_block_stop", "index": self.index})

    def _delta(self, text: str) -> bytes:
        return self.head + dumps(text) + b"}}\n\n" if text else b""

    def json(self) -> dict[str, Any]:
        """The block of a completed message."""
        text = "".join(self.pieces)
        if self.call is not None:
            given = input_of(text)
            return {"type": "tool_use", "id": self.call_id, "name": self.call.name or "", "input": given or {}}
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": text, "signature": signature(text)}
        return {"type": "text", "text": text}


def event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), dumps(data))


def input_of(arguments: str) -> dict[str, Any] | None:
    """A tool call's arguments as the object that `input` must be; None where they are none (cut off, or malformed).

    The agent then gets an empty one; `metadata.chat_response` of the record holds them as they were sampled.
    """
    try:
        value = msgspec.json.decode(arguments or "{}")  # keeps integers beyond 64 bits
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def signature(thought: str) -> str:
    """Clients drop a thinking block without one. Ours says what it belongs to, and nothing else."""
    return hashlib.sha256(thought.encode("utf-8", "replace")).hexdigest()
