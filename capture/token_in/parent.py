"""Which earlier call a chat request goes on from, told by its messages: the one whose ids its prompt may keep.

Messages decide, since tokens are what is to be chosen. They are the same where `capture.messages` says so, with nothing
relaxed. Whatever differs otherwise is another conversation, and a reason says so; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import orjson

from capture.messages import Message, canonical_hash, role_of
from capture.record import Ids

#: What of a request shapes its prompt besides messages and tools; None and a missing field are the same.
RENDERED: Final = (
    "model", "chat_template", "chat_template_kwargs", "add_special_tokens", "documents", "reasoning_effort",
    "media_io_kwargs", "mm_processor_kwargs", "add_generation_prompt", "continue_final_message",
)  # fmt: skip


# Thousands of these are held for hours and none is part of a circle: with gc=False the collector, which stops all calls
# while it runs, does not look at them. So ids are held as their text.


class Conversation(msgspec.Struct, frozen=True, gc=False):
    """A chat request's messages as numbers that can be compared. Equal `turns`: the same message by meaning; equal
    `exact`: the same JSON. `options` stands for tools and whatever else shapes a prompt.
    """

    roles: tuple[str, ...]
    turns: tuple[int, ...]
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
        """How many messages stand up to and with the last reply; 0 where there is none."""
        return next((at + 1 for at in range(len(self.roles) - 1, -1, -1) if self.roles[at] == "assistant"), 0)

    @property
    def head(self) -> int:
        """How many system messages stand at the beginning."""
        return next((at for at, role in enumerate(self.roles) if role != "system"), len(self.roles))


class Reply(msgspec.Struct, frozen=True, gc=False):
    """One choice of a call: `turn` of its message, and what was sampled.

    `stop` is the stop token's id where sampling ended by one, which then is the last of `sampled`; None where the reply
    was cut. `unusable` is the code of a reason why nothing can follow it, or None.
    """

    turn: int
    sampled_text: bytes
    stop: int | None = None
    unusable: str | None = None

    @property
    def sampled(self) -> Ids:
        return Ids(self.sampled_text)


class Held(msgspec.Struct, frozen=True, gc=False):
    """A call that may be continued. `prompt` is what the engine was given; `rendered` what its template makes of the
    messages, which is the same unless the call was bridged. `unusable` as in `Reply`.
    """

    call: int
    conversation: Conversation
    prompt_text: bytes
    rendered_text: bytes
    replies: tuple[Reply, ...]
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
        return ids + 128 * len(self.conversation.turns)


@dataclass(frozen=True, slots=True)
class Parent:
    """`reply` of call `held` is the last reply in a conversation, and all before it is what that call was asked."""

    held: Held
    reply: Reply


def parent(now: Conversation, held: Iterable[Held], known: Iterable[int] = ()) -> Parent | str:
    """The call that `now` goes on from, or the code of a reason (see `capture.bridge.REASONS`).

    `known` holds the turns of replies that were given and are not held any more.
    """
    count, calls = now.replies, list(held)
    if not count:
        return "begins"
    if count == len(now.turns):
        return "ends_with_reply"
    last = now.turns[count - 1]
    found = [
        Parent(call, reply)
        for call in calls
        if call.conversation.turns == now.turns[: count - 1]
        for reply in call.replies
        if reply.turn == last
    ]
    same = [candidate for candidate in found if candidate.held.conversation.options == now.options]
    if found and not same:
        return (
            "tools_changed"
            if all(candidate.held.conversation.tools != now.tools for candidate in found)
            else "options_changed"
        )
    if len(same) > 1:
        return "ambiguous_parent"
    if same:
        return same[0].held.unusable or same[0].reply.unusable or same[0]
    return _unfound(now, calls, set(known))


def _unfound(now: Conversation, calls: Sequence[Held], known: set[int]) -> str:
    """Why there is no such call: what was said before was changed, or it is a conversation of its own."""
    last = now.replies - 1
    turns = {at: turn for at, turn in enumerate(now.turns) if now.roles[at] == "assistant"}
    replies = {reply.turn for call in calls for reply in call.replies}
    head = now.head
    for call in calls:
        before = call.conversation
        if before.turns[before.head :] == now.turns[head:last] and any(r.turn == now.turns[last] for r in call.replies):
            return "system_changed"
    for call in calls:
        before = call.conversation
        size = len(before.turns)
        if before.turns == now.turns[:size] and now.roles[size : size + 1] == ("assistant",):
            return "history_edited"  # the reply itself, or what was said after it
    if not replies.isdisjoint(turns.values()):
        return "history_edited"
    if not known.isdisjoint(turns.values()):
        return "parent_forgotten"
    return "begins"


def _options(body: Message) -> int:
    rendered = {name: body[name] for name in RENDERED if body.get(name) is not None}
    return hash((_hash(body.get("tools") or None), _hash(rendered), _choice(body.get("tool_choice"))))


def _choice(value: Any) -> int:
    """How the choice of tools may shape a prompt: all of them stand there, or none, or the one that is named."""
    return hash("auto") if value in (None, "auto", "required") else _hash(value)


def _hash(value: Any) -> int:
    return hash(orjson.dumps(value, option=orjson.OPT_SORT_KEYS))
