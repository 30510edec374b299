"""The ids of tool calls as an agent gets them: unique within its conversation, whatever the engine gives.

Engines may give no id, "" or the same one in every answer. Claude Code 2.1 takes a second `tool_use` of a known id for
a duplicate, drops both turns from its history, and asks the same again.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from proxy.dialects.chat import Json, tool_calls


class CallIds:
    """The ids of one answer's calls; `messages` is the conversation that it answers, as chat."""

    def __init__(self, prefix: str, messages: Iterable[Json] = ()) -> None:
        self._prefix = f"{prefix}_{secrets.token_hex(12)}"
        self._taken = {call.get("id") for message in messages for call in tool_calls(message)}
        self._given: dict[int, str] = {}

    def of(self, place: int, engine_id: Any) -> str:
        """The id of the call at this place: the engine's own, else one made here. The same however often it is asked
        for."""
        found = self._given.get(place)
        if found is None:
            own = engine_id if isinstance(engine_id, str) else ""
            found = own if own and own not in self._taken else f"{self._prefix}_{place}"
            self._given[place] = found
            self._taken.add(found)
        return found
