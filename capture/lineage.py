"""Which call a call was meant to continue, where its tokens continue none: so that a break has two sides.

A side call (a title, a sub-agent, a fresh conversation) continues nothing and breaks nothing; then there is no answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from capture.break_text import alike, head, text_of
from capture.breaks import Told

#: A summary shorter than this (characters) proves nothing when its text turns up again.
_SUMMARY: int = 40


def predecessor(call: Told, earlier: Sequence[Told]) -> Told | None:
    """The earlier call that `call` was to continue, None when it begins something of its own.

    In order of strength: its messages go on from that call's messages and reply; its prompt keeps all of that call's
    prompt; it shares messages with it under the same system prompt; it holds the text of an earlier reply (a summary).
    """
    best: tuple[int, int, int] | None = None
    found: Told | None = None
    for before in earlier:
        strength = _strength(before, call)
        if strength:
            rank = (strength, before.prompt.common(call.prompt) if strength < 3 else len(before.prompt), before.call)
            if best is None or rank > best:
                best, found = rank, before
    return found


def _strength(before: Told, call: Told) -> int:
    if before.prompt and before.prompt.startswith(call.prompt):
        return 0  # the same question again, or an earlier one: a call beside that one, not after it
    if before.prompt and call.prompt.startswith(before.prompt):
        return 4
    if before.messages is None or call.messages is None:
        return 0
    (our_system, earlier), (their_system, later) = head(before.messages), head(call.messages)
    if earlier and earlier[0].get("role") == "prompt":
        return 3 if later and text_of(later[0]).startswith(text_of(earlier[0])) else 0
    goes_on = len(later) > len(earlier) and all(alike(a, b) for a, b in zip(earlier, later, strict=False))
    if goes_on and later[len(earlier)].get("role") == "assistant":
        return 3
    if our_system != their_system:
        return 0
    if any(alike(a, b) for a in earlier for b in later if text_of(a).strip() or a.get("tool_calls")):
        return 2
    summary = text_of(before.reply or {}).strip()
    if len(summary) >= _SUMMARY and any(summary in text_of(message) for message in later):
        return 1
    return 0
