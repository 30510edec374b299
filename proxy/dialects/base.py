"""A dialect: an API that agents speak besides chat completions, translated to chat completions and back.

Pure: no sockets, no files, no clock. `proxy/calls/` sends, records and writes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol


@dataclass(slots=True)
class ChatRequest:
    """An agent's request, translated. `chat` is the chat completions body, before what is added for capture.

    `dropped` are the paths of request fields that were left out because they do not change what is sampled. `streams`
    says whether the agent wants events; `chat` then has `stream` and `stream_options.include_usage`. `context` is the
    dialect's own: what its `ReplyTranslator` needs of the request.
    """

    chat: dict[str, Any]
    dropped: list[str] = field(default_factory=list)
    streams: bool = False
    context: Any = None


class EarlierAnswers(Protocol):
    """What a session remembers of its earlier answers, by the names of `ReplyTranslator.cache_entries`.

    Its memory is bounded, so any entry may be gone.
    """

    def get(self, name: str, /) -> str | bytes | None: ...


class Dialect(ABC):
    """One dialect, without state. Registered in `proxy/dialects/registry.py`."""

    #: `metadata.dialect` of a journal line.
    wire: ClassVar[str]
    #: `metadata.call_type`, BenchFlow's word for it.
    call_type: ClassVar[str]
    #: The routes that agents POST to. One that ends with a slash stands for all paths below it.
    paths: ClassVar[tuple[str, ...]]
    #: A route that counts the tokens of a prompt (see `count`), where the API has one.
    count_path: ClassVar[str | None] = None
    #: A request header by which clients of this dialect are known on routes that are not served.
    client_header: ClassVar[bytes | None] = None
    #: What to say about other methods and paths of the API than those served.
    not_served: ClassVar[str] = ""

    def for_call(self, path: str, query: bytes) -> Dialect:
        """The dialect of one call, for APIs whose address says more than the route. May raise `Refusal`."""
        return self

    @abstractmethod
    def translate(self, body: dict[str, Any], earlier: EarlierAnswers) -> ChatRequest:
        """`body` (which is not changed) as chat. Raises `Refusal` (400) with a sentence that names the field."""

    def count(self, body: dict[str, Any], earlier: EarlierAnswers) -> dict[str, Any]:
        """The chat body whose prompt `count_path` asks about. Raises `Refusal` as `translate` does."""
        return self.translate(body, earlier).chat

    @abstractmethod
    def reply(self, request: ChatRequest) -> ReplyTranslator:
        """The translator of the answer to this request."""

    @abstractmethod
    def error(self, status: int, message: str, engine_error: Any = None) -> tuple[int, bytes]:
        """An error's status and body. `engine_error` is the engine's own parsed body, if any: nested under `error`
        (vLLM, llama.cpp) or flat (SGLang)."""


class ReplyTranslator(ABC):
    """Translates one answer. Use it once: `feed` and `finish` for a stream, or `body` alone; `body` also tells, after
    a stream, what that stream said. Bytes are whole events."""

    #: Number of prompt tokens, where known before the first chunk.
    prompt_tokens: int | None = None
    #: Whether the engine repeats the text of an assistant turn that it was asked to continue.
    repeats_prefill: bool = False
    #: The stop string that ended the answer, where only the engine's module can tell; "" for one of several.
    matched_stop: str | None = None

    @abstractmethod
    def feed(self, chunk: dict[str, Any]) -> bytes:
        """The events for one parsed chat chunk, maybe none; the first chunk opens the stream.

        The chunk may still hold what was added for capture (ids, logprobs): read named fields only, change nothing.
        """

    @abstractmethod
    def finish(self) -> bytes:
        """The closing events of a complete answer. They are held back until the journal line is written."""

    @abstractmethod
    def error_event(self, status: int, message: str) -> bytes:
        """The event for an error, in mid-stream or as the first one."""

    @abstractmethod
    def ping(self) -> bytes:
        """The event that keeps a quiet stream open."""

    @abstractmethod
    def body(self, chat: dict[str, Any]) -> dict[str, Any]:
        """A completed chat body as the dialect's, with the ids that the stream had; also of an answer that broke
        off."""

    def call_ids(self) -> list[str]:
        """The ids of the answer's tool calls as the agent got them, in the order of the chat body. Called after
        `body`."""
        return []

    def cache_entries(self) -> Mapping[str, str | bytes]:
        """What later calls of the session may need (`EarlierAnswers`), by name. Called after `body`, where the answer
        is complete."""
        return {}
