"""What is wrong with a message row, in the words of BenchFlow 0.9's `bench train validate`."""

from __future__ import annotations

import json
from typing import Any

Object = dict[str, Any]

#: Keys of a row or a message that would leak the answer, or what only the task's author may know, to the model.
BANNED_ROW = frozenset(
    "gold gold_solution verify_source tools_py initial_db db_json target_constants private_reasoning reasoning_content "
    "thinking_blocks".split()
)
BANNED_MESSAGE = frozenset(
    "reasoning_content thinking_blocks private_reasoning provider_specific_fields function_call".split()
)
ROLES = frozenset({"system", "user", "assistant", "tool"})


def check_banned(row: Object) -> list[str]:
    """Keys that must not be in any row."""
    found = sorted(BANNED_ROW & row.keys())
    return [f"banned leakage keys present: {', '.join(found)}"] if found else []


def tools_of(row: Object, key: str) -> tuple[list[Object], list[str]]:
    """The row's tools, parsed where they are a JSON string; and what is wrong with the column."""
    value = row.get(key)
    if value is None:
        return [], []
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return [], [f"{key} is not valid JSON"]
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        return [], [f"{key} must be a list of objects"]
    return value, []


def check_tools(tools: list[Object], key: str) -> list[str]:
    return [f"{key}[{at}] missing function name" for at, tool in enumerate(tools) if not _name(tool)]


def check_messages(messages: list[Any], tools: list[Object], key: str) -> list[str]:
    """Roles, contents, and that tool calls match tools and answers. `key` is the column of the tools."""
    problems: list[str] = []
    names = {_name(tool) for tool in tools}
    asked: set[str] = set()
    assistants = 0
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        if not isinstance(message, dict):
            problems.append(f"{where} must be object")
            continue
        banned = sorted(name for name in BANNED_MESSAGE & message.keys() if message[name] is not None)
        if banned:
            problems.append(f"{where} has banned keys: {', '.join(banned)}")
        role = message.get("role")
        if role not in ROLES:
            problems.append(f"{where} role {role!r} invalid")
        if role == "system" and at:
            problems.append(f"{where}: system message must be at index 0")
        calls = message.get("tool_calls")
        content = message.get("content")
        if content is None and not calls:
            problems.append(f"{where} needs content or tool_calls")
        elif content is None:
            problems.append(f'{where} has null content; templates concatenate it, write ""')
        if calls is not None and role != "assistant":
            problems.append(f"{where}: only assistant messages may contain tool_calls")
        if role == "assistant":
            assistants += 1
            problems += _check_calls(calls, where, names, key, asked)
        elif role == "tool":
            answered = message.get("tool_call_id")
            if not answered:
                problems.append(f"{where}: tool message requires tool_call_id")
            elif answered not in asked:
                problems.append(f"{where}: tool message references unknown tool_call_id {answered!r}")
    if not assistants:
        problems.append("no assistant message")
    return problems


def _check_calls(calls: object, where: str, names: set[str], key: str, asked: set[str]) -> list[str]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        return [f"{where}: tool_calls must be a list"]
    problems: list[str] = []
    if calls and not names:
        problems.append(f"{where}: assistant tool_calls require non-empty {key}")
    for at, call in enumerate(calls):
        each = f"{where}.tool_calls[{at}]"
        if not isinstance(call, dict):
            problems.append(f"{each} must be object")
            continue
        if not isinstance(call.get("id"), str) or not call["id"]:
            problems.append(f"{each}.id must be a non-empty string")
        else:
            asked.add(call["id"])
        if call.get("type") != "function":
            problems.append(f"{each}.type must be 'function'")
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        if names and function.get("name") not in names:
            problems.append(f"{each}.function.name {function.get('name')!r} not found in {key}")
        problems += _check_arguments(function.get("arguments"), f"{each}.function.arguments")
    return problems


def _check_arguments(arguments: object, where: str) -> list[str]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return [f"{where} is not valid JSON"]
    return [] if isinstance(arguments, dict) else [f"{where} must be a JSON object"]


def _name(tool: Object) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    return name if isinstance(name, str) else ""
