"""The dialects that are served. Adding one takes a folder beside this file and a line here."""

from __future__ import annotations

from typing import Final

from proxy.dialects.anthropic.dialect import AnthropicDialect
from proxy.dialects.base import Dialect
from proxy.dialects.gemini.dialect import GeminiDialect
from proxy.dialects.responses.dialect import ResponsesDialect

DIALECTS: Final[tuple[Dialect, ...]] = (AnthropicDialect(), ResponsesDialect(), GeminiDialect())
