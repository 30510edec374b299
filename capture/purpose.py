"""What a call was for: the agent's own work, or a side call (title, summary, compaction, sub-agent, helper).

Only a label for people and for choosing threads of a kind: which call continues which is decided by tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

PURPOSES: Final = ("agent", "helper", "title", "summary", "compaction", "subagent")

#: The words with which known agents open their side calls (opencode 1.18, pi 0.73 and 0.74, Claude Code 2.1).
_SIDE: Final = (
    ("title", re.compile(r"title generator|generate (?:a|the) (?:short |concise |brief )?[\w\s,-]{0,40}title", re.I)),
    ("compaction", re.compile(r"compact(?:ion|ing)|context (?:checkpoint|summari[sz]ation)", re.I)),
    ("summary", re.compile(r"summari[sz](?:e|ing|ation)", re.I)),
)
_LOOKED_AT: Final = 600


def purpose(body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    """One of `PURPOSES`, from a request's body and its recorded headers."""
    if headers.get("x-parent-session-id"):
        return "subagent"
    if body.get("tools"):
        return "agent"
    opening = _system_text(body)[:_LOOKED_AT]
    return next((name for name, words in _SIDE if words.search(opening)), "agent")


def _system_text(body: Mapping[str, Any]) -> str:
    messages = body.get("messages")
    first = messages[0] if isinstance(messages, list) and messages else None
    if not isinstance(first, dict) or first.get("role") not in ("system", "developer"):
        return ""
    content = first.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
