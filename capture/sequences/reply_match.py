"""Which of several equal replies an agent continued with: the one that it sent back."""

from __future__ import annotations

from collections.abc import Sequence

from capture.chat.messages import Message, Relax, canonical_hash


def reply_sent_back(message: Message, replies: Sequence[Message | None]) -> int | None:
    """The index of the one reply that `message` is, by its tool-call ids and its text; None where none is, or several
    are. White space decides only where nothing else does.
    """
    for relax in (Relax.NOTHING, Relax.SPACES):
        wanted = canonical_hash(message, relax)
        same = [
            index for index, reply in enumerate(replies) if reply is not None and canonical_hash(reply, relax) == wanted
        ]
        if len(same) == 1:
            return same[0]
    return None
