"""A call as chat: messages, tools and replies, whatever dialect the agent spoke; and as trainers want them, plain."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from capture.journal.journal import Call

Message = dict[str, Any]

_ROLES: Final = {"developer": "system", "model": "assistant", "function": "tool"}
_REASONING: Final = frozenset({"reasoning", "reasoning_content", "thinking_blocks", "thinking"})

_LONG_NUMBER = re.compile(r"\d{19}")


@dataclass(frozen=True, slots=True)
class Reply:
    """One choice: the assistant message as it came back (OpenAI shape), and why it ended."""

    message: Message
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """What was sent and what came back, in the shape of chat completions. `replies` has one entry a choice."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    replies: list[Reply]
    #: What the agent set for the chat template (`enable_thinking`, ...): a trainer must render with the same.
    template_kwargs: dict[str, Any] | None = None


class NotChat(Exception):
    """A call, or a message of it, that has no form as plain chat; the text is the name of the reason."""


def chat_of(call: Call) -> Chat:
    """The call as chat. Raises `NotChat` (`no_messages`) for a call that was none, a text completion for one.

    For a translated call the proxy wrote down what it sent (`metadata.chat_request`); where another writer did not,
    Anthropic messages and OpenAI responses are read as they stand.
    """
    sent = call.metadata.get("chat_request")
    body = sent if isinstance(sent, dict) else call.request_body
    answer = answer_of(call)
    path = str(call.request.get("path") or "")
    if isinstance(sent, dict) or _is_chat(body, path):
        messages, tools = _dicts(body.get("messages")), _dicts(body.get("tools"))
    elif path.endswith("/messages"):
        messages, tools = _anthropic_messages(body), [_anthropic_tool(tool) for tool in _dicts(body.get("tools"))]
    elif "input" in body:
        messages, tools = _response_input(body), [_response_tool(tool) for tool in _dicts(body.get("tools"))]
    else:
        raise NotChat("no_messages")
    if not messages:
        raise NotChat("no_messages")
    kwargs = body.get("chat_template_kwargs")
    return Chat(messages, tools, replies_of(answer), kwargs if isinstance(kwargs, dict) and kwargs else None)


def answer_of(call: Call) -> dict[str, Any]:
    """The call's answer as chat where the proxy translated it, else as the agent got it."""
    chat = call.metadata.get("chat_response")
    return chat if isinstance(chat, dict) else call.response_body


def replies_of(answer: dict[str, Any]) -> list[Reply]:
    """The choices of a response body in any of the three dialects; empty where the body is none of them."""
    choices = answer.get("choices")
    if isinstance(choices, list):
        return [
            Reply(choice["message"], _word(choice.get("finish_reason")))
            for choice in _dicts(choices)
            if isinstance(choice.get("message"), dict)
        ]
    if isinstance(answer.get("content"), list):
        return [Reply(_anthropic_assistant(answer["content"]), _word(answer.get("stop_reason")))]
    if isinstance(answer.get("output"), list):
        found = _from_items(answer["output"])
        return [Reply(found[-1] if found else {"role": "assistant", "content": ""}, _word(answer.get("status")))]
    return []


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) else None


@dataclass(frozen=True, slots=True)
class Plain:
    """Messages as a trainer's template takes them. `reasoning` says whether some was left out: rows hold none."""

    messages: list[Message]
    reasoning: bool


class Growing:
    """`plain` for the calls of one rollout: of a conversation that goes on only its new messages are made plain."""

    def __init__(self) -> None:
        self._given: list[Message] = []
        self._made: list[Message] = []

    def plain(self, messages: list[Message]) -> list[Message]:
        """The messages of `plain`; they are shared with the calls before, so nobody may change them."""
        known = len(self._given)
        held = self._made if known and messages[:known] == self._given else []
        self._made = held + plain(messages[len(held) :], first=not held).messages
        self._given = messages
        return self._made


def plain(messages: Iterable[Message], *, first: bool = True) -> Plain:
    """Roles, text and tool calls only: `content` is always a string, nulls and the engine's own fields are gone.

    `developer` is `system`, a `system` message after the first place is a `user` message (templates refuse it there),
    parts are joined by a newline: BenchFlow's rules. Tool calls keep their arguments as the string they came in. Raises
    `NotChat` (`not_text`) where a message holds an image or a sound. `first`: nothing came before them.
    """
    kept: list[Message] = []
    reasoning = False
    for message in messages:
        role = str(message.get("role"))
        role = _ROLES.get(role, role)
        if role == "system" and (kept or not first):
            role = "user"
        made: Message = {"role": role, "content": text_of(message.get("content"))}
        if role == "assistant":
            reasoning = reasoning or any(message[name] for name in _REASONING & message.keys())
            calls = [_tool_call(at, call) for at, call in enumerate(_dicts(message.get("tool_calls")))]
            if calls:
                made["tool_calls"] = calls
        elif role == "tool":
            made["tool_call_id"] = str(message.get("tool_call_id") or message.get("name") or "")
        kept.append(made)
    return Plain(kept, reasoning)


def text_of(content: object) -> str:
    """A message's text; null is "". Raises `NotChat` (`not_text`) for parts that are no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise NotChat("not_text")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, dict) and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
        elif isinstance(part, dict) and part.get("type") in ("thinking", "redacted_thinking", "reasoning"):
            continue
        else:
            raise NotChat("not_text")
    return "\n".join(texts)


def arguments_of(call: Message) -> dict[str, Any] | None:
    """A tool call's arguments as an object; None when they are no JSON object that a row can hold.

    Cut off, made wrong, NaN, half of a surrogate pair, or a number beyond 64 bits: a row would say something else.
    """
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = orjson.loads(arguments) if arguments.strip() else {}
        except orjson.JSONDecodeError:
            return None
        if _LONG_NUMBER.search(arguments) and parsed != json.loads(arguments):
            return None
        return parsed if isinstance(parsed, dict) else None
    return arguments if isinstance(arguments, dict) else None


def _tool_call(position: int, call: dict[str, Any]) -> Message:
    inner = call.get("function")
    function: dict[str, Any] = inner if isinstance(inner, dict) else call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": str(call.get("id") or f"call_{position}"),
        "type": "function",
        "function": {"name": str(function.get("name") or ""), "arguments": arguments},
    }


def _is_chat(body: dict[str, Any], path: str) -> bool:
    return isinstance(body.get("messages"), list) and not path.endswith("/messages")


def _dicts(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _anthropic_messages(body: dict[str, Any]) -> list[Message]:
    system = body.get("system")
    made: list[Message] = [{"role": "system", "content": text_of(system)}] if system else []
    for message in _dicts(body.get("messages")):
        content = message.get("content")
        if message.get("role") == "assistant" and isinstance(content, list):
            made.append(_anthropic_assistant(content))
            continue
        rest: Sequence[Any] | object = content
        if isinstance(content, list):
            rest = []
            for part in content:
                if isinstance(part, dict) and part.get("type") == "tool_result":
                    made.append({
                        "role": "tool",
                        "tool_call_id": part.get("tool_use_id"),
                        "content": part.get("content"),
                    })  # fmt: skip
                else:
                    rest.append(part)
            if not rest:
                continue
        made.append({"role": message.get("role"), "content": rest})
    return made


def _anthropic_assistant(blocks: list[Any]) -> Message:
    texts, calls, thoughts = [], [], []
    for block in _dicts(blocks):
        if block.get("type") == "tool_use":
            calls.append({
                "id": block.get("id"),
                "function": {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})},
            })  # fmt: skip
        elif block.get("type") in ("thinking", "redacted_thinking"):
            thoughts.append(str(block.get("thinking") or "…"))
        else:
            texts.append(block)
    made: Message = {"role": "assistant", "content": texts}
    if calls:
        made["tool_calls"] = calls
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    return made


def _anthropic_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _response_input(body: dict[str, Any]) -> list[Message]:
    given = body.get("input")
    instructions = body.get("instructions")
    made: list[Message] = [{"role": "system", "content": instructions}] if isinstance(instructions, str) else []
    if isinstance(given, str):
        return [*made, {"role": "user", "content": given}]
    return made + _from_items(given)


def _from_items(items: object) -> list[Message]:
    """Items of the responses dialect as messages: text and calls of one turn of the assistant are one message."""
    made: list[Message] = []
    for item in _dicts(items):
        kind = item.get("type", "message")
        if kind == "function_call_output":
            made.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind == "message" and item.get("role") != "assistant":
            made.append({"role": item.get("role"), "content": item.get("content")})
        elif kind in ("message", "function_call", "reasoning"):
            if not made or made[-1]["role"] != "assistant":
                made.append({"role": "assistant", "content": []})
            turn = made[-1]
            if kind == "reasoning":
                turn["reasoning_content"] = "…"
            elif kind == "message":
                content = item.get("content")
                turn["content"] += content if isinstance(content, list) else [{"text": str(content or "")}]
            else:
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                turn.setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": function})
        else:
            raise NotChat("not_text")
    return made


def _response_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if "function" in tool or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
