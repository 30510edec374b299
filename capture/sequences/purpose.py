"""What a call was for: the agent's own work, or a side call (title, summary, compaction, sub-agent, helper).

Only a label for people and for choosing threads of a kind: which call continues which is decided by tokens, and what
continues a call is of its kind (`train.tokens`).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Final

PURPOSES: Final = ("agent", "helper", "title", "summary", "compaction", "subagent")

#: The words with which known agents open their side calls (opencode 1.18, pi 0.73 and 0.74, Claude Code 2.1), in lower
#: case as all words here; the first that stands there says what the call is for.
_SIDE: Final = {
    "title generator": "title",
    "compaction": "compaction",
    "compacting": "compaction",
    "context checkpoint": "compaction",
    "context summarization": "compaction",
    "context summarisation": "compaction",
    "summarize": "summary",
    "summarise": "summary",
    "summarizing": "summary",
    "summarising": "summary",
    "summarization": "summary",
    "summarisation": "summary",
}
_TITLE: Final = re.compile(r"generate (?:a|the) (?:short |concise |brief )?[\w\s,-]{0,40}title")
#: Compaction that is asked for with the agent's tools at hand, by the system prompt or by the last message
#: (Claude Code 2.1, Codex 0.171).
_COMPACTS: Final = {
    "tasked with summarizing conversations": "compaction",
    "tasked with summarising conversations": "compaction",
    "create a detailed summary of the conversation": "compaction",
    "create a detailed summary of our conversation": "compaction",
    "create a detailed summary of this conversation": "compaction",
    "context checkpoint compaction": "compaction",
}
#: Openings of side calls that have tools, or no other sign (Claude Code 2.1.318, Qwen Code 0.24): sub-agents of Claude
#: Code have the same tools as the agent that sent them.
_NAMED: Final = {
    "you are naming a coding session": "title",
    "acting as the managed memory extraction": "helper",
    "subagent working for a parent agent": "subagent",
    "you are an agent for claude code,": "subagent",
}
_LOOKED_AT: Final = 600


def purpose(body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    """One of `PURPOSES`, from a chat request's body and its recorded headers."""
    if headers.get("x-parent-session-id"):
        return "subagent"
    messages = body.get("messages")
    messages = messages if isinstance(messages, list) else []
    opening = _system_text(messages)[:_LOOKED_AT].lower()
    last = _text(messages[-1], "user")[:_LOOKED_AT].lower() if messages else ""
    named = _first(opening, _COMPACTS) or _first(last, _COMPACTS) or _first(opening, _NAMED)
    if named is not None:
        return named
    if body.get("tools"):
        return "agent"
    if _wants_a_title(body):
        return "title"
    if "title" in opening and _TITLE.search(opening):
        return "title"
    return _first(opening, _SIDE) or "agent"


def _first(text: str, words: Mapping[str, str]) -> str | None:
    for word, named in words.items():
        if word in text:
            return named
    return None


class Purposes:
    """The purposes of one rollout's calls, in the order in which they end.

    The first call that offers tools is the agent's. One with another system prompt, other tools and another opening is
    a sub-agent's; whatever shares one of the three is the agent's still: prompts hold dates, tools come and go, and a
    compaction gives a conversation another opening.
    """

    def __init__(self) -> None:
        self._main: tuple[Hashable, ...] | None = None

    def of(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
        kind = purpose(body, headers)
        if kind != "agent" or not body.get("tools"):
            return kind
        if self._main is None:
            self._main = tuple(_shape(body))
        shares = any(own == main for own, main in zip(_shape(body), self._main, strict=True))
        return "agent" if shares else "subagent"


def _shape(body: Mapping[str, Any]) -> Iterator[Hashable]:
    """What distinguishes the agents of a rollout: system prompt, tools, and the first user message."""
    messages = body.get("messages")
    messages = messages if isinstance(messages, list) else []
    yield hash(_system_text(messages))
    tools = body.get("tools")
    yield frozenset(_tool_name(tool) for tool in tools) if isinstance(tools, list) else frozenset()
    yield hash(next((text for message in messages if (text := _text(message, "user"))), ""))


def _tool_name(tool: Any) -> str:
    inner = tool.get("function", tool) if isinstance(tool, dict) else None
    return str(inner.get("name")) if isinstance(inner, dict) else ""


def _wants_a_title(body: Mapping[str, Any]) -> bool:
    """Whether the answer is to be an object of a title and nothing else (Claude Code 2.1)."""
    wanted = body.get("response_format")
    inner = wanted.get("json_schema") if isinstance(wanted, dict) else None
    schema = inner.get("schema") if isinstance(inner, dict) else None
    fields = schema.get("properties") if isinstance(schema, dict) else None
    return isinstance(fields, dict) and set(fields) == {"title"}


def _system_text(messages: list[Any]) -> str:
    return _text(messages[0], "system", "developer") if messages else ""


def _text(message: Any, *roles: str) -> str:
    """The text of a message of one of these roles."""
    if not isinstance(message, dict) or message.get("role") not in roles:
        return ""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
