"""`prime-sft`: Prime-RL's SFT trainer, one conversation per row; every reply in it is trained.

Prime-RL renders the messages itself and has no columns for token ids. It trains each assistant message of a row, so a
branch of a conversation is one row: a row per exchange would train the earlier replies again and again. Arguments are
JSON strings, which it parses, so each must be an object.
"""

from __future__ import annotations

from typing import Any

from train.rollouts.messages import Message, arguments_of
from train.rows.checks import check_messages, check_tools, tools_of
from train.rows.formats.base import (
    ConversationExample,
    Format,
    MalformedArguments,
    Row,
    conversation_provenance,
    tools_text,
)


def row(example: ConversationExample) -> Row:
    """`messages`, `tool_defs` (a JSON string), `task_name`, `score`, then the origin; null columns are left out."""
    made = {
        "messages": messages_of(example),
        "tool_defs": tools_text(example),
        "task_name": example.origin.task,
        "score": example.origin.reward,
    } | conversation_provenance(example)
    return {name: value for name, value in made.items() if value is not None}


def messages_of(example: ConversationExample) -> list[Message]:
    """The messages and the reply. Raises `MalformedArguments`."""
    messages = [*example.messages, example.reply]
    for message in messages:
        if any(arguments_of(call) is None for call in message.get("tool_calls", ())):
            raise MalformedArguments
    return messages


def check(row: Row) -> list[str]:
    """What is wrong with a row, in BenchFlow's words."""
    key = _tools_column(row)
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        return ["messages must be a non-empty message list"]
    tools, problems = tools_of(row, key)
    return problems + check_tools(tools, key) + check_messages(messages, tools, key)


def conversation(row: Row) -> tuple[list[Message], list[Any]]:
    """Prime-RL and SkyRL parse arguments before they render."""
    return [_parse_arguments(message) for message in row["messages"]], tools_of(row, _tools_column(row))[0]


def _tools_column(row: Row) -> str:
    return "tools" if "tools" in row and "tool_defs" not in row else "tool_defs"


def _parse_arguments(message: Message) -> Message:
    parsed = {name: value for name, value in message.items() if value is not None}
    if calls := message.get("tool_calls"):
        parsed["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": arguments_of(call)}} for call in calls
        ]
    return parsed


FORMAT = Format(
    name="prime-sft",
    summary="Prime-RL sft, one row per branch; every reply is trained",
    reads="messages",
    trains="all",
    row=row,
    check=check,
    conversation=conversation,
)
