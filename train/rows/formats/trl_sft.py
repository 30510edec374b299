"""`trl-sft`: TRL's SFTTrainer, prompt and completion as messages; the completion is one reply, and it alone is trained.

TRL renders the messages again (1.16, `SFTTrainer`), so a row trains the token that a template puts after the stop
besides what was sampled; `trl-sft-ids` does not. `tools` is a JSON string, which TRL parses: as a list of structs Arrow
would give every tool the parameters of the others, null. Arguments are objects, because templates write them with
`tojson` and a string would come out quoted twice.
"""

from __future__ import annotations

from train.rollouts.messages import Message, arguments_of
from train.rows.checks import check_messages, check_tools, tools_of
from train.rows.formats import Exchange, Format, LeftOut, Row, as_text, provenance_of_exchange


def row(example: Exchange) -> Row:
    """`prompt` [message], `completion` [one assistant message], `tools` JSON string, then where it comes from."""
    if any(arguments_of(call) is None for call in example.reply.get("tool_calls", ())):
        raise LeftOut("malformed_tool_arguments")
    made: Row = {
        "prompt": [with_objects(message) for message in example.messages],
        "completion": [with_objects(example.reply)],
        "tools": as_text(example.tools),
    }
    if example.template_kwargs:
        made["chat_template_kwargs"] = example.template_kwargs
    return made | provenance_of_exchange(example)


def with_objects(message: Message) -> Message:
    """The message with every tool call's arguments as an object.

    What the model once wrote and is no object stays as BenchFlow keeps it, under `_malformed_json_arguments`; only in
    the prompt, where it is not trained.
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


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, dict) else None


FORMAT = Format(
    name="trl-sft",
    says="TRL SFTTrainer, messages; the last reply of each row is trained",
    reads="messages",
    trains="last",
    row=row,
    check=check,
)
