"""`trl-sft`: TRL's SFTTrainer, prompt and completion as messages; the completion is one reply, and it alone is trained.

TRL renders the messages again (1.16, `SFTTrainer`), so a row also trains the token that a template puts after the stop;
`trl-sft-ids` does not. `tools` is a JSON string, which TRL parses: as a list of structs, Arrow would give every tool
the parameters of the others, null. Arguments are objects, because templates write them with `tojson` and a string would
be quoted twice.
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
    """`prompt` [message], `completion` [one assistant message], `tools` (a JSON string, or null), then the origin.

    `tools` is there even where it is null: `select_columns(["prompt", "completion", "tools"])` needs the column.
    """
    if any(arguments_of(call) is None for call in example.reply.get("tool_calls", ())):
        raise MalformedArguments
    made: Row = {
        "prompt": [with_objects(message) for message in example.messages],
        "completion": [with_objects(example.reply)],
        "tools": tools_text(example),
    }
    if example.template_kwargs:
        made["chat_template_kwargs"] = example.template_kwargs
    return made | conversation_provenance(example)


def with_objects(message: Message) -> Message:
    """The message with every tool call's arguments as an object.

    Malformed arguments in the prompt stay as BenchFlow keeps them, under `_malformed_json_arguments`: they are not
    trained there.
    """
    calls = message.get("tool_calls")
    if not calls:
        return message
    made = []
    for call in calls:
        arguments = arguments_of(call)
        if arguments is None:
            arguments = {"_malformed_json_arguments": call["function"]["arguments"]}
        made.append(call | {"function": call["function"] | {"arguments": arguments}})
    return message | {"tool_calls": made}


def check(row: Row) -> list[str]:
    """What is wrong with a row, in BenchFlow's words."""
    if "tool_defs" in row:
        return ["TRL rows must use tools, not tool_defs"]
    prompt, completion = row.get("prompt"), row.get("completion")
    if not isinstance(prompt, list) or not prompt:
        return ["prompt must be a non-empty message list"]
    if not isinstance(completion, list) or [_role(message) for message in completion] != ["assistant"]:
        return ["completion must contain exactly one assistant message"]
    tools, problems = tools_of(row, "tools")
    return problems + check_tools(tools, "tools") + check_messages([*prompt, *completion], tools, "tools")


def conversation(row: Row) -> tuple[list[Message], list[Any]]:
    return [*row["prompt"], *row["completion"]], tools_of(row, "tools")[0]


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, dict) else None


FORMAT = Format(
    name="trl-sft",
    summary="TRL SFTTrainer, messages; the last reply of each row is trained",
    reads="messages",
    trains="last",
    row=row,
    check=check,
    conversation=conversation,
)
