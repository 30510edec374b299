"""The calls of a session that a later call may continue: hashes of their messages, and their ids; bounded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from capture.chat.messages import canonical_hash
from capture.engines.base import Engine
from capture.record import Ids, TokenCapture
from capture.token_in.parent import Conversation, PastCall, PastReply
from proxy.runtime.lru import EACH, BoundedLRU, MemoryBudget

#: Bytes of calls per session; the least recently used are dropped first. 100,000 prompt ids take about 0.6 MB, and
#: twice that where it was bridged.
MEMORY = 32 << 20
#: Replies of dropped calls, of which only a hash is remembered.
KNOWN = 100_000


class CallHistory:
    def __init__(self, budget: MemoryBudget | None = None, memory: int = MEMORY) -> None:
        self._known: BoundedLRU[int, None] = BoundedLRU(KNOWN, KNOWN * EACH, budget)
        self._calls: BoundedLRU[int, PastCall] = BoundedLRU(KNOWN, memory, budget, self._on_evict)

    def __iter__(self) -> Iterator[PastCall]:
        return iter(self._calls)

    @property
    def known(self) -> Iterator[int]:
        """Hashes of replies whose calls were dropped."""
        return self._known.keys()

    def add(self, past: PastCall) -> None:
        self._calls.put(past.call, past, past.size)

    def used(self, past: PastCall) -> None:
        """A call continues it, so it is dropped after others."""
        self._calls.get(past.call)

    def clear(self) -> None:
        self._calls.clear()
        self._known.clear()

    def end(self) -> None:
        """The session has ended: frees its memory."""
        self._calls.close()
        self._known.close()

    def _on_evict(self, past: PastCall) -> None:
        for reply in past.replies:
            self._known.put(reply.message_hash, None, 0)


def past_call(
    call: int,
    conversation: Conversation,
    rendered: Ids | None,
    engine: Engine,
    body: dict[str, Any],
    capture: TokenCapture | None,
    answer: dict[str, Any],
) -> PastCall:
    """An answered call that can be continued. `answer` is the completed chat body; `rendered` what the template makes
    of the messages, where the prompt differs from it.
    """
    choices = answer.get("choices")
    replies = tuple(_reply(engine, body, choice, capture) for choice in choices or () if isinstance(choice, dict))
    used = None if capture is None else capture.prompt_token_ids
    missing = capture is None or used is None or "prompt_token_ids" in capture.unavailable
    prompt = b"" if used is None else used.text
    written = prompt if rendered is None or rendered.text == prompt else rendered.text
    return PastCall(call, conversation, prompt, written, replies, "parent_incomplete" if missing else None)


def _reply(engine: Engine, body: dict[str, Any], choice: dict[str, Any], capture: TokenCapture | None) -> PastReply:
    message = choice.get("message") or {}
    turn = canonical_hash(message)
    index = choice.get("index")
    completions = capture.completions if capture else []
    ids = next((completion.token_ids for completion in completions if completion.index == index), None)
    if capture is None or not ids or "completion_token_ids" in capture.unavailable:
        return PastReply(turn, b"", unusable="parent_incomplete")
    sampled = ids.text
    ended = engine.reply_end(choice, body)
    if ended == "stop_token":
        return PastReply(turn, sampled, stop=int(sampled.rpartition(b",")[2]))
    if ended != "cut":
        return PastReply(turn, sampled, unusable="stop_string" if ended == "stop_string" else "parent_incomplete")
    if message.get("tool_calls"):
        return PastReply(turn, sampled, unusable="cut_tool_call")
    return PastReply(turn, sampled, unusable=None if message.get("content") else "cut_in_reasoning")
