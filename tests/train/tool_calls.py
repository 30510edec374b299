"""Rollouts that call tools, laid by hand with SmolLM2's real tokens: what an engine would be given and sample."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from tests.train.build import Line, line, make_job
from tests.train.smollm import encode

WRITE = {
    "type": "function",
    "function": {
        "name": "write",
        "description": "Write a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
            "required": ["path", "content"],
        },
    },
}
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
ASK = [{"role": "user", "content": "Write the number 42 to the file /app/answer.txt."}]
ARGUMENTS = {"path": "/app/answer.txt", "content": "42"}
#: As the model wrote it; the template of `sandbox/tools_template.jinja` writes it in the same way.
CALLED = '<tool_call>\n{"name": "write", "arguments": {"path": "/app/answer.txt", "content": "42"}}\n</tool_call>'


def call_message(
    name: str = "write", arguments: dict[str, Any] | str = ARGUMENTS, id: str = "call_1"
) -> dict[str, Any]:
    """An assistant message as an engine returns it: content null, arguments a string."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {"name": name, "arguments": text}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": id, "type": "function", "function": function}]}


def answered(made: Line, message: dict[str, Any], tools: list[dict[str, Any]]) -> Line:
    made["response"]["body"]["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
    made["request"]["body"]["tools"] = tools
    return made


def tool_rollout(tools: list[dict[str, Any]] | None = None, *, final: str = "Done: 42 is written.") -> list[Line]:
    """Two calls: the first calls the tool `write`, the second says so. The second's prompt continues the first."""
    tools = tools or [WRITE]
    listed = "".join("\n" + json.dumps(tool) for tool in tools)
    head = (
        "<|im_start|>system\n# Tools\n\nYou may call one or more functions.\n<tools>"
        + listed
        + "\n</tools>\n\nFor each "
        "function call, return a json object within <tool_call></tool_call>:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
    )
    prompt = encode(head + f"<|im_start|>user\n{ASK[0]['content']}<|im_end|>\n<|im_start|>assistant\n")
    sampled = encode(CALLED + "<|im_end|>")
    first = answered(line(0, prompt, sampled, messages=copy.deepcopy(ASK)), call_message(), tools)
    result = {"role": "tool", "tool_call_id": "call_1", "content": "ok"}
    between = encode("\n<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    second = line(
        1,
        prompt + sampled + between,
        encode(final + "<|im_end|>"),
        messages=[*copy.deepcopy(ASK), call_message(), result],
    )
    return [first, answered(second, {"role": "assistant", "content": final}, tools)]


def tool_job(folder: Path, **spec: Any) -> Path:
    """A job with one rollout of `tool_rollout`."""
    return make_job(folder, [{"calls": tool_rollout(), **spec}])


def sampled_count(lines: list[Line]) -> int:
    return sum(len(call_line["metadata"]["token_capture"]["completions"][0]["token_ids"]) for call_line in lines)


#: The name that a format's output is given, where it is no JSON Lines file.
SUFFIX = {"verl-sft": "train.parquet", "openenv-episodes": "episodes"}


def other_call() -> list[Line]:
    """A rollout that calls two tools of different arguments."""
    calls = tool_rollout([WRITE, BASH])
    answered(calls[1], call_message("bash", {"command": "cat /app/answer.txt"}, "call_2"), [WRITE, BASH])
    return calls
