"""A recorded call as chat: messages, tools and choices, whichever dialect the agent spoke."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from capture.journal.call import Call
from capture.json import objects
from train.rollouts.messages import Message, NotChat, text_of


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One choice: the assistant message as it came back (OpenAI shape), and why it ended."""

    message: Message
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """What was sent and what came back, in the shape of chat completions."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    choices: list[ChatChoice]
    #: What the agent set for the chat template (`enable_thinking`, ...): a trainer must render with the same.
    template_kwargs: dict[str, Any] | None = None


def chat_of(call: Call) -> Chat:
    """The call as chat. Raises `NotChat` (`no_messages`) for a call without messages, such as a text completion.

    For a translated call the proxy recorded what it sent (`metadata.chat_request`). Where another writer did not,
    Anthropic messages and OpenAI responses are read as they are.
    """
    sent = call.metadata.get("chat_request")
    body = sent if isinstance(sent, dict) else call.request_body
    path = str(call.request.get("path") or "")
    if isinstance(sent, dict) or (isinstance(body.get("messages"), list) and not path.endswith("/messages")):
        messages, tools = objects(body.get("messages")), objects(body.get("tools"))
    elif path.endswith("/messages"):
        messages, tools = _anthropic_messages(body), [_anthropic_tool(tool) for tool in objects(body.get("tools"))]
    elif "input" in body:
        messages, tools = _response_input(body), [_response_tool(tool) for tool in objects(body.get("tools"))]
    else:
        raise NotChat("no_messages")
    if not messages:
        raise NotChat("no_messages")
    kwargs = body.get("chat_template_kwargs")
    return Chat(messages, tools, choices_of(answer_of(call)), kwargs if isinstance(kwargs, dict) and kwargs else None)


def answer_of(call: Call) -> dict[str, Any]:
    """The call's answer: as chat where the proxy translated it, otherwise as the agent received it."""
    chat = call.metadata.get("chat_response")
    return chat if isinstance(chat, dict) else call.response_body


def choices_of(answer: dict[str, Any]) -> list[ChatChoice]:
    """The choices of a response body in any of the three dialects; empty where the body is none of them.

    In the order of their indexes, as the completions of a token capture: one without a message keeps its place.
    """
    choices = answer.get("choices")
    if isinstance(choices, list):
        return _by_index(choices)
    if isinstance(answer.get("content"), list):
        return [ChatChoice(_anthropic_assistant(answer["content"]), _text(answer.get("stop_reason")))]
    if isinstance(answer.get("output"), list):
        messages = _from_items(answer["output"])
        last = messages[-1] if messages else {"role": "assistant", "content": ""}
        return [ChatChoice(last, _text(answer.get("status")))]
    return []


def _by_index(choices: list[Any]) -> list[ChatChoice]:
    numbered: list[tuple[int, ChatChoice]] = []
    for position, choice in enumerate(choices):
        if isinstance(choice, dict):
            index, message = choice.get("index"), choice.get("message")
            made = ChatChoice(message if isinstance(message, dict) else {}, _text(choice.get("finish_reason")))
            numbered.append((index if type(index) is int else position, made))
    ordered = [choice for _, choice in sorted(numbered, key=lambda pair: pair[0])]
    last = max((at for at, choice in enumerate(ordered) if choice.message), default=-1)
    return [
        choice if choice.message else ChatChoice(_NO_MESSAGE, choice.finish_reason) for choice in ordered[: last + 1]
    ]


_NO_MESSAGE: Final[Message] = {"role": "assistant", "content": None}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _anthropic_messages(body: dict[str, Any]) -> list[Message]:
    system = body.get("system")
    made: list[Message] = [{"role": "system", "content": text_of(system)}] if system else []
    for message in objects(body.get("messages")):
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
    for block in objects(blocks):
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
    """Items of the responses dialect as messages; text and calls of one assistant turn are one message."""
    made: list[Message] = []
    for item in objects(items):
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
