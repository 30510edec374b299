"""A break: where and why a call does not continue the one before it, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from capture.breaks.message_compare import says
from capture.chat.messages import MEANING, canonical_hash, split_system
from capture.record import Ids

#: cause -> (name for people, what to change)
CAUSES: Final[dict[str, tuple[str, str]]] = {
    "reply_retokenized": (
        "the reply was re-tokenized",
        "the agent sends the reply back as text, which tokenizes differently from what was sampled (often at the end "
        "of "
        "a reply that max_tokens cut); raise max_tokens, or train on the segments: each is exact",
    ),
    "arguments_reserialized": (
        "the tool call's arguments were re-serialized",
        "the agent or the chat template wrote the arguments' JSON in another form (spaces, order of keys, escapes); "
        "have the agent send the string back unchanged, and the template insert it as it is when it is a string",
    ),
    "reasoning_stripped": (
        "the chat template, or the agent, left out earlier reasoning",
        "keep reasoning in the history (a template option such as clear_thinking=false, an agent that sends "
        "reasoning_content back), or train on the segments",
    ),
    "history_edited": (
        "the history was edited or compacted",
        "the agent changed, cut (a space at a reply's end is enough) or summarized what was said before; have it send "
        "replies back as they came, turn its compaction off (a larger context window in its settings), or train on the "
        "segments: each is exact",
    ),
    "cut_reply": (
        "the reply was cut, and has no stop token",
        "the reply ended by max_tokens, a stop string or a lost connection, and came back without what was cut or with "
        "an end that was never sampled; raise max_tokens, or let replies end by their stop token",
    ),
    "template_after_stop": (
        "the template ends a turn with other tokens than the model",
        "the chat template writes something else where the model's stop token stands; use the model's own template, "
        "with the stop token it was trained on",
    ),
    "system_or_tools_changed": (
        "the system prompt or the tools changed",
        "the agent sent another system prompt or other tools (a date in the prompt, tools that come and go); keep both "
        "fixed for a rollout",
    ),
    "image_placeholders": (
        "an image has another number of placeholder tokens",
        "the image was expanded again, or twice; send the same image bytes each time, and compare expanded ids",
    ),
    "engine_dropped_ids": (
        "the engine did not return every sampled id",
        "upgrade the engine (vLLM before 0.13 drops ids of streamed tool calls, llama.cpp those of tokens that hold a "
        "part of a character); with vLLM and SGLang, start the proxy with --buffered",
    ),
    "unknown": (
        "unknown",
        "compare both windows with --tokenizer DIR; if a template writes something that changes from call to call (a "
        "date), fix it",
    ),
}


@dataclass(frozen=True)
class CallView:
    """One side of a break: a call's ids and what its log line says about them. Only `prompt` has to be known.

    `messages` and `tools` are the request's (in chat form), `reply` is the assistant message of the answer. `tokens`
    has the engine's own text per sampled id, `counted` is how many ids the engine says it sampled, `codes` say why the
    call's capture is not complete.
    """

    call: int
    prompt: Ids
    sampled: Ids = field(default_factory=lambda: Ids(b""))
    messages: Sequence[dict[str, Any]] | None = None
    tools: Any = None
    reply: dict[str, Any] | None = None
    finish_reason: str | None = None
    outcome: str = "ok"
    tokens: Sequence[str] | None = None
    counted: int | None = None
    codes: tuple[str, ...] = ()

    @cached_property
    def system(self) -> list[str]:
        """The texts of the system messages at the start."""
        return split_system(self.messages or ())[0]

    @cached_property
    def hashes(self) -> list[int]:
        """`canonical_hash` of each message after them."""
        return [canonical_hash(message, MEANING) for message in split_system(self.messages or ())[1]]

    @cached_property
    def recognizable(self) -> frozenset[int]:
        """`canonical_hash` of the messages, the reply included, that say anything the conversation can be known by."""
        messages = [*split_system(self.messages or ())[1], *([self.reply] if self.reply is not None else [])]
        return frozenset(canonical_hash(message, MEANING) for message in messages if says(message))


@dataclass(frozen=True)
class TokenDecoder:
    """A tokenizer's two questions: the text of ids (special tokens written out), and whether an id is a special
    token.
    """

    text: Callable[[Sequence[int]], str]
    special: Callable[[int], bool]


@dataclass(frozen=True)
class Break:
    """Call `call` does not continue call `before`, from index `index` of its own prompt on.

    `region` is `prompt` when an earlier prompt was changed, `sampled` when the last reply was; `offset` counts ids
    from the start of the region. `expected` and `found` are the next ids on either side (at most 8), `kept` the last
    common ones (at most 8). `texts` has their three texts, `(kept, expected, found)`, where a tokenizer was given.
    `sure` is `certain`, `likely` or `possible`.
    """

    call: int
    before: int
    index: int
    region: str
    offset: int
    kept: list[int]
    expected: list[int]
    found: list[int]
    cause: str
    sure: str
    texts: tuple[str, str, str] | None = None

    @property
    def name(self) -> str:
        return CAUSES[self.cause][0]

    @property
    def remedy(self) -> str:
        return CAUSES[self.cause][1]

    @property
    def start_reason(self) -> str:
        """BenchFlow's word for the segment that begins here: `rerender`, or `compaction` for an older change."""
        return "rerender" if self.region == "sampled" else "compaction"

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "call": self.call,
            "before": self.before,
            "index": self.index,
            "region": self.region,
            "offset": self.offset,
            "kept_ids": self.kept,
            "expected_ids": self.expected,
            "found_ids": self.found,
            "cause": self.cause,
            "cause_name": self.name,
            "sure": self.sure,
            "remedy": self.remedy,
        }
        if self.texts is not None:
            row["kept_text"], row["expected_text"], row["found_text"] = self.texts
        return row
