"""Turns that were sampled twice with the same ids: which of the two calls the agent continued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from capture.journal.journal import JournalReader
from capture.sequences.reply_match import reply_sent_back
from train.rollouts.chat import Chat, chat_of
from train.rollouts.messages import NotChat

if TYPE_CHECKING:
    from train.tokens.call_summary import CallSummary


class ResampledTurns:
    """A `TellApart` that reads the messages of the calls from the journal, and their logprobs from the summaries."""

    def __init__(self, calls: Mapping[int, CallSummary], journal: JournalReader | None) -> None:
        self._calls = calls
        self._journal = journal

    def __call__(self, call: int, candidates: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
        """The reply that was sent back, by its tool-call ids or text; where the logprobs are equal too either will do,
        and it is the latest call's. None where it cannot be told.
        """
        found = self._by_messages(call, candidates)
        if found is not None:
            return found
        logprobs = [self._logprobs(*candidate) for candidate in candidates]
        if any(values != logprobs[0] for values in logprobs):
            return None
        latest = max(number for number, _ in candidates)
        return next(candidate for candidate in candidates if candidate[0] == latest)

    def _by_messages(self, call: int, candidates: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
        chat = self._chat(call)
        asked = [self._chat(number) for number, _ in candidates]
        if chat is None or any(before is None for before in asked):
            return None
        positions = {len(before.messages) for before in asked if before is not None}
        if len(positions) != 1 or (position := positions.pop()) >= len(chat.messages):
            return None
        replies = [
            before.choices[choice].message if before is not None and choice < len(before.choices) else None
            for before, (_, choice) in zip(asked, candidates, strict=True)
        ]
        index = reply_sent_back(chat.messages[position], replies)
        return None if index is None else candidates[index]

    def _chat(self, number: int) -> Chat | None:
        summary = self._calls[number]
        if self._journal is None:
            return None
        try:
            return chat_of(self._journal.at(summary.line, summary.offset))
        except NotChat:
            return None

    def _logprobs(self, number: int, choice: int) -> list[float] | None:
        capture = self._calls[number].capture
        return None if capture is None else capture.completions[choice].logprobs
