"""Output items of a response as they grow: opened, fed and closed, with the events for each step."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from capture.chat.surrogates import SurrogateJoiner
from proxy.dialects.chat import Json, dumps
from proxy.dialects.responses.history import carried
from proxy.dialects.responses.tools import FreeText, Tool, parsed


class Events:
    """Numbers the events of one response."""

    def __init__(self) -> None:
        self.number = 0

    def event(self, kind: str, fields: Json) -> bytes:
        return self.raw(kind, dumps(fields)[1:])

    def raw(self, kind: str, fields: bytes) -> bytes:
        """`fields` is the rest of a JSON object, its closing brace included."""
        name = kind.encode()
        data = b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b\n\n' % (name, name, self.number, fields)
        self.number += 1
        return data

    def delta(self, head: bytes, text: str) -> bytes:
        """One piece of text: the event of the hot path. `head` is made once an item, by `delta_head`."""
        data = b'%b%d,"delta":%b}\n\n' % (head, self.number, dumps(text))
        self.number += 1
        return data


def delta_head(kind: str, fields: Json) -> bytes:
    name = kind.encode()
    return b'event: %b\ndata: {"type":"%b",%b,"sequence_number":' % (name, name, dumps(fields)[1:-1])


class Item:
    """One output item. `place` is its output_index; `text` joins what it was fed."""

    kind: ClassVar[str]

    def __init__(self, events: Events, item_id: str, place: int) -> None:
        self.events = events
        self.id = item_id
        self.place = place
        self.at: Final[Json] = {"item_id": item_id, "output_index": place}
        self.status = "in_progress"
        self.pieces: list[str] = []
        self._joiner = SurrogateJoiner()

    @property
    def text(self) -> str:
        if len(self.pieces) > 1:
            self.pieces = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""

    def json(self) -> Json:
        raise NotImplementedError

    def opened(self) -> bytes:
        return self.events.event("response.output_item.added", {"output_index": self.place, "item": self.started()})

    def started(self) -> Json:
        return self.json()

    def feed(self, text: str) -> bytes:
        """The event for one more piece of text."""
        text = self._joiner.feed(text)
        if text:
            self.pieces.append(text)
        return self.delta(text) if text else b""

    def delta(self, text: str) -> bytes:
        raise NotImplementedError

    def close(self, status: str) -> bytes:
        left = self.feed(self._joiner.flush())
        self.status = status
        ended = left + self.ends()
        done = {"output_index": self.place, "item": self.json()}
        return ended + self.events.event("response.output_item.done", done)

    def ends(self) -> bytes:
        return b""


class MessageItem(Item):
    """The assistant's text, or its refusal; one content part, opened with the item."""

    kind = "msg"

    def __init__(self, events: Events, item_id: str, place: int, *, refusal: bool, logprobs: bool) -> None:
        super().__init__(events, item_id, place)
        self.refusal = refusal
        self.logprobs: list[Any] = []
        self._tells = logprobs
        self._new_logprobs: list[Any] = []
        self.at["content_index"] = 0
        self._name = "response.refusal" if refusal else "response.output_text"
        self._head = delta_head(f"{self._name}.delta", self.at if refusal else {**self.at, "logprobs": []})

    def opened(self) -> bytes:
        part = {**self.at, "part": self._part()}
        return super().opened() + self.events.event("response.content_part.added", part)

    def feed(self, text: str, logprobs: Any = None) -> bytes:
        self._new_logprobs = logprobs or [] if self._tells else []
        self.logprobs += self._new_logprobs
        return super().feed(text)

    def delta(self, text: str) -> bytes:
        if not self._new_logprobs:
            return self.events.delta(self._head, text)
        return self.events.event(f"{self._name}.delta", {**self.at, "delta": text, "logprobs": self._new_logprobs})

    def ends(self) -> bytes:
        content: Json = {"refusal": self.text} if self.refusal else {"text": self.text, "logprobs": self.logprobs}
        done = self.events.event(f"{self._name}.done", {**self.at, **content})
        return done + self.events.event("response.content_part.done", {**self.at, "part": self._part()})

    def _part(self) -> Json:
        if self.refusal:
            return {"type": "refusal", "refusal": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def started(self) -> Json:
        return {**self.json(), "content": []}

    def json(self) -> Json:
        content = [self._part()]
        return {"id": self.id, "type": "message", "status": self.status, "role": "assistant", "content": content}


class ReasoningItem(Item):
    """The engine's reasoning: as its text, or as the summary that the agent asked for.

    No engine summarizes, and an agent that asks for a summary shows nothing else.
    """

    kind = "rs"

    def __init__(self, events: Events, item_id: str, place: int, *, summary: bool, encrypted: bool) -> None:
        super().__init__(events, item_id, place)
        self.summary = summary
        self.encrypted = encrypted
        self.at["summary_index" if summary else "content_index"] = 0
        self._name = "response.reasoning_summary_text" if summary else "response.reasoning_text"
        self._part_name = "response.reasoning_summary_part" if summary else "response.content_part"
        self._head = delta_head(f"{self._name}.delta", self.at)

    def opened(self) -> bytes:
        return super().opened() + self.events.event(f"{self._part_name}.added", {**self.at, "part": self._part()})

    def delta(self, text: str) -> bytes:
        return self.events.delta(self._head, text)

    def ends(self) -> bytes:
        done = self.events.event(f"{self._name}.done", {**self.at, "text": self.text})
        return done + self.events.event(f"{self._part_name}.done", {**self.at, "part": self._part()})

    def _part(self) -> Json:
        return {"type": "summary_text" if self.summary else "reasoning_text", "text": self.text}

    def started(self) -> Json:
        return {"id": self.id, "type": "reasoning", "status": "in_progress", "summary": []}

    def json(self) -> Json:
        made: Json = {"id": self.id, "type": "reasoning", "status": self.status, "summary": []}
        made["summary" if self.summary else "content"] = [self._part()]
        if self.encrypted:
            made["encrypted_content"] = carried(self.text)
        return made


class CallItem(Item):
    """A call of a function. `pieces` are the arguments as the engine streams them."""

    kind = "fc"

    def __init__(self, events: Events, item_id: str, place: int, call_id: str, tool: Tool) -> None:
        super().__init__(events, item_id, place)
        self.call_id = call_id
        self.tool = tool
        self._head = delta_head("response.function_call_arguments.delta", self.at)

    def delta(self, text: str) -> bytes:
        return self.events.delta(self._head, text)

    def ends(self) -> bytes:
        done = {**self.at, "name": self.tool.name, "arguments": self.text}
        return self.events.event("response.function_call_arguments.done", done)

    def json(self) -> Json:
        made = {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self.call_id,
            "name": self.tool.name,
            "arguments": self.text,
        }
        return {**made, "namespace": self.tool.namespace} if self.tool.namespace else made


class CustomCallItem(CallItem):
    """A call of a custom tool: what the engine streams are arguments, what the agent gets is the text in them."""

    kind = "ctc"

    def __init__(self, events: Events, item_id: str, place: int, call_id: str, tool: Tool) -> None:
        super().__init__(events, item_id, place, call_id, tool)
        self.input: list[str] = []
        self._reading = FreeText()
        self._head = delta_head("response.custom_tool_call_input.delta", self.at)

    def delta(self, text: str) -> bytes:
        return self._input_delta(self._reading.feed(text))

    def _input_delta(self, text: str) -> bytes:
        if not text:
            return b""
        self.input.append(text)
        return self.events.delta(self._head, text)

    def ends(self) -> bytes:
        rest = self._input_delta(self._reading.rest())
        done = {**self.at, "input": "".join(self.input)}
        return rest + self.events.event("response.custom_tool_call_input.done", done)

    def json(self) -> Json:
        made = {
            "id": self.id,
            "type": "custom_tool_call",
            "status": self.status,
            "call_id": self.call_id,
            "name": self.tool.name,
            "input": "".join(self.input),
        }
        return {**made, "namespace": self.tool.namespace} if self.tool.namespace else made


class ToolSearchItem(CallItem):
    """A call of the agent's own tool search: no deltas, and its arguments parsed (Codex 0.171 reads an object)."""

    kind = "tsc"

    def delta(self, text: str) -> bytes:
        return b""

    def ends(self) -> bytes:
        return b""

    def json(self) -> Json:
        return {
            "id": self.id,
            "type": "tool_search_call",
            "status": self.status,
            "call_id": self.call_id,
            "execution": "client",
            "arguments": parsed(self.text),
        }


CALL_ITEMS: Final[dict[str, type[CallItem]]] = {
    "function": CallItem,
    "custom": CustomCallItem,
    "tool_search": ToolSearchItem,
}
