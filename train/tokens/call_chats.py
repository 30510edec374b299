"""The chat of each call of a rollout, in a size that grows with the conversation and not with its square."""

from __future__ import annotations

from typing import Any, Final

from capture.journal.call import Call
from train.rollouts.chat import chat_of
from train.rollouts.messages import Message, NotChat

#: Conversations that are remembered at once: the agent's own, and those of its sub-agents.
_REMEMBERED: Final = 16


class CallChats:
    """Collects what was sent and what came back, call by call, in OpenAI's shape.

    A request that begins with all messages of an earlier call names that call (`continues`, a line of the journal) and
    has only the messages after those.
    """

    def __init__(self) -> None:
        self._by_line: dict[int, dict[str, Any]] = {}
        self._recent: list[tuple[int, list[Message], list[dict[str, Any]]]] = []

    def add(self, call: Call) -> None:
        """Takes the next call, in file order; one without messages has no chat."""
        try:
            chat = chat_of(call)
        except NotChat:
            return
        row: dict[str, Any] = {"continues": None, "messages": chat.messages, "tools": chat.tools}
        earlier = self._continued(chat.messages, chat.tools)
        if earlier is not None:
            line, earlier_messages, _ = earlier
            row = {"continues": line, "messages": chat.messages[len(earlier_messages) :]}
            self._recent.remove(earlier)
        row["choices"] = [{"message": choice.message, "finish_reason": choice.finish_reason} for choice in chat.choices]
        self._by_line[call.line] = row
        self._recent = [(call.line, chat.messages, chat.tools), *self._recent[: _REMEMBERED - 1]]

    def at(self, line: int) -> dict[str, Any] | None:
        """The chat of the call at a line of the journal; None where it had no messages."""
        return self._by_line.get(line)

    def _continued(
        self, messages: list[Message], tools: list[dict[str, Any]]
    ) -> tuple[int, list[Message], list[dict[str, Any]]] | None:
        fits = [recent for recent in self._recent if recent[2] == tools and messages[: len(recent[1])] == recent[1]]
        return max(fits, key=lambda recent: len(recent[1]), default=None)
