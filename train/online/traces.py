"""A record as verifiers' traces have it: a path of message nodes per sequence, each with the ids that it adds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from train.online.chat import chats_of, choices_of
from train.online.rows import Row
from train.rollouts.messages import NotChat, text_of


def nodes_of(record: Mapping[str, Any], row: Row, first: int = 0) -> list[dict[str, Any]]:
    """The path of message nodes of one sequence: what each call added to the prompt, then what it sampled.

    Their `token_ids` are, end to end, the sequence's; `logprobs` has one value per True of `mask`. `first` is the index
    of the first node in the trace.
    """
    nodes: list[dict[str, Any]] = []
    ids, start = [*row.prompt_ids, *row.completion_ids], 0

    def add(end: int, message: Mapping[str, Any], **fields: Any) -> None:
        nonlocal start
        sampled = bool(fields.get("sampled"))
        parent = first + len(nodes) - 1 if nodes else None
        nodes.append(
            {
                "parent": parent,
                "message": message,
                "token_ids": ids[start:end],
                "mask": [sampled] * (end - start),
                **fields,
            }
        )
        start = end

    for span in row.spans:
        begin = len(row.prompt_ids) + span.offset
        if begin > start:
            add(begin, {"role": "user", "content": _new_text(record, span.call)})
        logprobs = row.logprobs[span.offset : span.offset + span.length]
        add(begin + span.length, _reply(record, span.call), sampled=True, logprobs=logprobs)
    if start < len(ids):
        add(len(ids), {"role": "user", "content": ""})
    return nodes


def _new_text(record: Mapping[str, Any], call: int) -> str:
    """The text of the messages that the call added, roles left out; empty where the record has no messages."""
    chat = chats_of(record).get(call)
    parts: list[str] = []
    for message in () if chat is None else chat["messages"]:
        if message.get("role") == "assistant":
            parts.clear()
            continue
        with suppress(NotChat):
            parts.append(text_of(message.get("content")))
    return "\n\n".join(part for part in parts if part)


def _reply(record: Mapping[str, Any], call: int) -> dict[str, Any]:
    """The reply as verifiers' assistant message, whose tool calls are flat."""
    message: Mapping[str, Any] = next((choice["message"] for choice in choices_of(record, call)), {})
    content = message.get("content")
    reply: dict[str, Any] = {"role": "assistant", "content": content if isinstance(content, str) else None}
    tools = [tool["function"] | {"id": tool.get("id") or ""} for tool in message.get("tool_calls") or []]
    if tools:
        reply["tool_calls"] = [{key: str(tool.get(key) or "") for key in ("id", "name", "arguments")} for tool in tools]
    return reply


def calls_of(record: Mapping[str, Any], row: Row, nodes: list[dict[str, Any]], first: int) -> list[dict[str, Any]]:
    """verifiers' `ModelCall` of each sampled node, with the tokens that the call read and sampled."""
    calls, read = [], 0
    spans = iter(row.spans)
    for number, node in enumerate(nodes):
        if node.get("sampled"):
            span = next(spans)
            reason = next((choice.get("finish_reason") for choice in choices_of(record, span.call)), None)
            calls.append(
                {
                    "node": first + number,
                    "model": record["model"],
                    "finish_reason": reason if reason in ("stop", "length", "tool_calls") else None,
                    "usage": {"prompt_tokens": read, "completion_tokens": span.length},
                }
            )
        read += len(node["token_ids"])
    return calls
