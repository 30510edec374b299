"""Which fields of a request make the engine sample under a grammar: its logprobs are then not those of the policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

FIELDS: Final = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf",
    "json_schema", "grammar",
)  # fmt: skip


def grammars(sent: Mapping[str, Any]) -> list[str]:
    """The grammars that a request asks for, in words."""
    found = [f"a grammar ({name})" for name in FIELDS if sent.get(name)]
    wanted = sent.get("response_format")
    if isinstance(wanted, Mapping) and wanted.get("type") not in (None, "text"):
        found.append(f"a grammar (response_format {wanted['type']})")
    choice = sent.get("tool_choice")
    if isinstance(choice, Mapping) or choice in ("required", "any"):
        found.append("a tool grammar (tool_choice)")
    return found


def offers_tools(sent: Mapping[str, Any]) -> bool:
    """Whether the model may call a tool, which an engine may sample under a grammar of its own."""
    return bool(sent.get("tools")) and sent.get("tool_choice") != "none"
