"""Which earlier call a chat request continues, judged by its messages: the one whose ids its prompt may reuse.

Messages decide, since tokens are what is to be chosen. They are the same where `capture.messages` says so, with nothing
relaxed. Whatever differs otherwise is another conversation, and a reason says so; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import orjson

from capture.chat.messages import Message, canonical_hash, role_of
from capture.record import Ids

#: Fields of a request that shape its prompt besides messages and tools. None is the same as a missing field.
RENDERED: Final = (
    "model", "chat_template", "chat_template_kwargs", "add_special_tokens", "documents", "reasoning_effort",
    "media_io_kwargs", "mm_processor_kwargs", "add_generation_prompt", "continue_final_message",
)  # fmt: skip


# Thousands of these live for hours and none is part of a reference cycle. With gc=False the garbage collector, which
# stops all calls while it runs, skips them. For that they hold ids as text, not as `Ids`.


class Conversation(msgspec.Struct, frozen=True, gc=False):
    """A chat request as numbers that can be compared, one entry per message in the tuples.

    `hashes` is `canonical_hash` (the same message to a model), `exact` a hash of the message's JSON. `options` covers
    the tools and whatever else shapes a prompt.
    """

    roles: tuple[str, ...]
    hashes: tuple[int, ...]
    exact: tuple[int, ...]
    options: int
    tools: int

    @classmethod
    def of(cls, body: Message) -> Conversation | None:
        """None for a request whose messages are no list of objects."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            return None
        try:
            return cls(
                tuple(role_of(message) for message in messages),
                tuple(canonical_hash(message) for message in messages),
                tuple(hash(orjson.dumps(message)) for message in messages),
                _options(body),
                _hash(body.get("tools") or None),
            )
        except TypeError:  # what orjson does not write: halves of surrogate pairs, great depth
            return None

    @property
    def replies(self) -> int:
        """How many messages there are up to and including the last reply; 0 where there is none."""
        return next((at + 1 for at in range(len(self.roles) - 1, -1, -1) if self.roles[at] == "assistant"), 0)

    @property
    def head(self) -> int:
        """How many system messages there are at the start."""
        return next((at for at, role in enumerate(self.roles) if role != "system"), len(self.roles))


class PastReply(msgspec.Struct, frozen=True, gc=False):
    """One choice of a call: `canonical_hash` of its message, and the ids that were sampled.

    `stop` is the stop token's id where sampling ended with one, which is then the last of `sampled`; None where the
    reply was cut. `unusable` is a code of `bridge.REASONS` that says why no prompt can continue it, or None.
    """

    message_hash: int
    sampled_text: bytes
    stop: int | None = None
    unusable: str | None = None

    @property
    def sampled(self) -> Ids:
        return Ids(self.sampled_text)


class PastCall(msgspec.Struct, frozen=True, gc=False):
    """A call that a later one may continue. `prompt` is what the engine was given, `rendered` what its template makes
    of the messages: the same, unless the call was bridged. `unusable` as in `PastReply`.
    """

    call: int
    conversation: Conversation
    prompt_text: bytes
    rendered_text: bytes
    replies: tuple[PastReply, ...]
    unusable: str | None = None

    @property
    def prompt(self) -> Ids:
        return Ids(self.prompt_text)

    @property
    def rendered(self) -> Ids:
        return Ids(self.rendered_text)

    @property
    def size(self) -> int:
        """About how many bytes it keeps alive."""
        ids = len(self.prompt_text) + sum(len(reply.sampled_text) for reply in self.replies)
        if self.rendered_text is not self.prompt_text:
            ids += len(self.rendered_text)
        return ids + 128 * len(self.conversation.hashes)


@dataclass(frozen=True, slots=True)
class Parent:
    """`reply` of the call `past` is the last reply of a conversation; what comes before is that call's messages."""

    past: PastCall
    reply: PastReply


def parent(now: Conversation, past: Iterable[PastCall], known: Iterable[int] = ()) -> Parent | str:
    """The call that `now` continues, or a code of `capture.token_in.bridge.REASONS` where there is none.

    `known` has the message hashes of replies whose calls were dropped from memory.
    """
    count, calls = now.replies, list(past)
    if not count:
        return "begins"
    if count == len(now.hashes):
        return "ends_with_reply"
    last = now.hashes[count - 1]
    found = [
        Parent(call, reply)
        for call in calls
        if call.conversation.hashes == now.hashes[: count - 1]
        for reply in call.replies
        if reply.message_hash == last
    ]
    same = [candidate for candidate in found if candidate.past.conversation.options == now.options]
    if found and not same:
        return (
            "tools_changed"
            if all(candidate.past.conversation.tools != now.tools for candidate in found)
            else "options_changed"
        )
    if len(same) > 1:
        return "ambiguous_parent"
    if same:
        return same[0].past.unusable or same[0].reply.unusable or same[0]
    return _unfound(now, calls, set(known))


def _unfound(now: Conversation, calls: Sequence[PastCall], known: set[int]) -> str:
    """Why there is no such call: earlier messages were changed, or it is a conversation of its own."""
    last = now.replies - 1
    answers = {at: message_hash for at, message_hash in enumerate(now.hashes) if now.roles[at] == "assistant"}
    replies = {reply.message_hash for call in calls for reply in call.replies}
    head = now.head
    for call in calls:
        before = call.conversation
        same_reply = any(reply.message_hash == now.hashes[last] for reply in call.replies)
        if same_reply and before.hashes[before.head :] == now.hashes[head:last]:
            return "system_changed"
    for call in calls:
        before = call.conversation
        size = len(before.hashes)
        if before.hashes == now.hashes[:size] and now.roles[size : size + 1] == ("assistant",):
            return "history_edited"  # the reply itself, or a message after it
    if not replies.isdisjoint(answers.values()):
        return "history_edited"
    if not known.isdisjoint(answers.values()):
        return "parent_forgotten"
    return "begins"


def _options(body: Message) -> int:
    rendered = {name: body[name] for name in RENDERED if body.get(name) is not None}
    return hash((_hash(body.get("tools") or None), _hash(rendered), _choice(body.get("tool_choice"))))


def _choice(value: Any) -> int:
    """How the choice of tools may shape a prompt: it has all tools, none, or the one that is named."""
    return hash("auto") if value in (None, "auto", "required") else _hash(value)


def _hash(value: Any) -> int:
    return hash(orjson.dumps(value, option=orjson.OPT_SORT_KEYS))
