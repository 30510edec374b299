"""A dialect: an agent's request becomes a chat completions request, the engine's chat answer the dialect's own.

Pure: no sockets, no files, no clock. The exchange (`proxy/calls/translated_exchange.py`) sends, records and writes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol


@dataclass(slots=True)
class Translated:
    """A request as chat. `chat` goes to the engine, but for what is asked of it for the record.

    `dropped` are the paths of request fields that were left out because they do not change what is sampled. `streams`
    says whether the agent wants events; `chat` then has `stream` and `stream_options.include_usage`. `context` is the
    dialect's own: kinds of tools by name, options that the answer repeats, ids.
    """

    chat: dict[str, Any]
    dropped: list[str] = field(default_factory=list)
    streams: bool = False
    context: Any = None


class Earlier(Protocol):
    """What a session keeps of its earlier answers, by a name that the dialect chose; bounded, so None is possible."""

    def get(self, name: str, /) -> str | bytes | None: ...


class Dialect(ABC):
    """One dialect; holds nothing but constants."""

    #: `metadata.dialect` of a journal line.
    wire: ClassVar[str]
    #: `metadata.call_type`, BenchFlow's word for it.
    call_type: ClassVar[str]
    #: The route, as agents call it.
    path: ClassVar[str]

    @abstractmethod
    def translate(self, body: dict[str, Any], earlier: Earlier) -> Translated:
        """`body` (which is not changed) as chat. Raises `Refusal` (400) with a sentence that names the field."""

    @abstractmethod
    def reply(self, translated: Translated) -> Reply:
        """What takes the answer to this request back to the agent."""

    @abstractmethod
    def error(self, status: int, message: str, engine_error: Any = None) -> tuple[int, bytes]:
        """An error's status and body in this dialect. `engine_error` is the engine's own parsed body, where it has one:
        nested under `error` (vLLM, llama.cpp) or flat (SGLang)."""

    def keep(self, translated: Translated, chat: dict[str, Any], body: dict[str, Any]) -> Mapping[str, str | bytes]:
        """What later calls of the session may need (`Earlier`), by name. Called after an answer that came whole:
        `chat` is the completed chat body, `body` the dialect's."""
        return {}


class Reply(ABC):
    """One answer on its way back to the agent. Bytes are whole events."""

    #: How many tokens the prompt has, where that is known before the first chunk.
    prompt_tokens: int | None = None
    #: Whether the engine's answer begins with the words of the assistant that it was to go on from.
    repeats_prefill: bool = False
    #: The stop string that ended the answer, where only the engine's file can tell; "" for one of several.
    matched_stop: str | None = None

    @abstractmethod
    def chunk(self, chunk: dict[str, Any]) -> bytes:
        """One parsed chat chunk in, events out, maybe none; the first opens the stream.

        What the record asked for (ids, logprobs) may still be in it: take named fields only, and change nothing.
        """

    @abstractmethod
    def end(self) -> bytes:
        """The closing events of an answer that is complete: held back until the journal line is written."""

    @abstractmethod
    def fail(self, status: int, message: str) -> bytes:
        """The error event, in mid-stream or as the first one."""

    @abstractmethod
    def ping(self) -> bytes:
        """What keeps a quiet stream open."""

    @abstractmethod
    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        """A completed chat body as the dialect's, with the ids that the stream has; also of one that broke off."""
