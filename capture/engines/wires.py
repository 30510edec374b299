"""The two routes of an engine whose answers are read: chat completions and completions."""

from __future__ import annotations

from typing import Final

CHAT: Final = "openai-chat"
COMPLETIONS: Final = "openai-completions"
