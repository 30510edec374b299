"""Which call a call was meant to continue, where its tokens continue none: the other side of a break.

A side call (a title, a sub-agent, a fresh conversation) continues nothing and breaks nothing, so it has no predecessor.
"""

from __future__ import annotations

from collections.abc import Sequence

from capture.breaks.breaks import CallView
from capture.chat.messages import MEANING, canonical_hash, split_system, text_of

#: A summary shorter than this (characters) proves nothing when its text turns up again.
_SUMMARY: int = 40


def predecessor(call: CallView, earlier: Sequence[CallView]) -> CallView | None:
    """The earlier call that `call` was to continue, None where it starts something of its own.

    In order of strength: its prompt keeps all of that call's prompt; its messages continue that call's messages and
    reply; it shares messages with it under the same system prompt, the more the better; it holds the text of an earlier
    reply (a summary). Among equals the one whose tokens it shares most, then the latest.
    """
    best: tuple[int, int, int, int] | None = None
    found: CallView | None = None
    for before in earlier:
        strength, shared = _strength(before, call)
        if strength:
            rank = (strength, shared, before.prompt.common(call.prompt), before.call)
            if best is None or rank > best:
                best, found = rank, before
    return found


def _strength(before: CallView, call: CallView) -> tuple[int, int]:
    """How surely `call` continues `before`, 0 for not at all; and how many messages they share."""
    if before.prompt and before.prompt.startswith(call.prompt):
        return 0, 0  # the same question again, or an earlier one: a call beside that one, not after it
    if before.prompt and call.prompt.startswith(before.prompt):
        return 4, 0
    if before.messages is None or call.messages is None:
        return 0, 0
    if before.messages and before.messages[0].get("role") == "prompt":
        return (3 if call.messages and text_of(call.messages[0]).startswith(text_of(before.messages[0])) else 0), 0
    shared = len(before.recognizable & frozenset(call.hashes))
    length = len(before.hashes)
    if len(call.hashes) > length and call.hashes[:length] == before.hashes:
        following = split_system(call.messages)[1][length]
        if following.get("role") == "assistant":
            return (
                3 if before.reply is None or canonical_hash(before.reply, MEANING) == call.hashes[length] else 2
            ), shared
    if before.system != call.system:
        return 0, 0
    if shared:
        return 2, shared
    summary = text_of(before.reply or {}).strip()
    if len(summary) >= _SUMMARY and any(summary in text_of(message) for message in call.messages):
        return 1, 0
    return 0, 0
