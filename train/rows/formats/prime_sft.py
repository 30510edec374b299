"""`prime-sft`: Prime-RL's SFT trainer, one conversation a row; every reply in it is trained.

Prime-RL renders the messages itself and has no columns for token ids. It trains each assistant message of a row, so a
branch of a conversation is one row; a row for each exchange would train the earlier replies again and again. Arguments
are JSON strings, which it parses: each must be an object.
"""

from __future__ import annotations

from train.rollouts.messages import Message, arguments_of
from train.rows.checks import check_messages, check_tools, tools_of
from train.rows.formats import Exchange, Format, LeftOut, Row, as_text, provenance_of_exchange


def row(example: Exchange) -> Row:
    """`messages`, `tool_defs` JSON string, `task_name`, `score`, then its origin; columns of null are left out."""
    made = {
        "messages": conversation(example),
        "tool_defs": as_text(example.tools),
        "task_name": example.origin.task,
        "score": example.origin.reward,
    } | provenance_of_exchange(example)
    return {name: value for name, value in made.items() if value is not None}


def conversation(example: Exchange) -> list[Message]:
    """The messages and the reply. Raises `LeftOut` where a tool call's arguments are no object: loaders parse them."""
    messages = [*example.messages, example.reply]
    for message in messages:
        if any(arguments_of(call) is None for call in message.get("tool_calls", ())):
            raise LeftOut("malformed_tool_arguments")
    return messages


def check(row: Row) -> list[str]:
    """What is wrong with a row, in BenchFlow's words."""
    key = "tools" if "tools" in row and "tool_defs" not in row else "tool_defs"
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        return ["messages must be a non-empty message list"]
    tools, problems = tools_of(row, key)
    return problems + check_tools(tools, key) + check_messages(messages, tools, key)


FORMAT = Format(
    name="prime-sft",
    says="Prime-RL sft, one row a branch; every reply is trained",
    reads="messages",
    trains="all",
    row=row,
    check=check,
)
