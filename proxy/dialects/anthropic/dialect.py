"""Anthropic's Messages: `POST /v1/messages` to chat completions and back.

Anthropic's API of 2023-06-01 as Claude Code 2.1 and the official client (2.14) use it. vLLM 0.32 serves this route
itself, without token ids; where both had a choice, this one does as it does.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from proxy.dialects.anthropic.errors import error_object, status_of
from proxy.dialects.anthropic.history import History
from proxy.dialects.anthropic.reply import AnthropicReply
from proxy.dialects.base import ChatRequest, Dialect, EarlierAnswers
from proxy.dialects.chat import dumps
from proxy.errors import Refusal

#: Fields that mean the same in chat.
_SAME: Final = ("temperature", "top_p", "top_k")
#: Fields of engines that clients send besides (`extra_body`).
_ENGINES: Final = (
    "seed", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "repeat_penalty",
    "logit_bias", "min_tokens", "stop_token_ids", "ignore_eos", "bad_words", "allowed_token_ids",
    "chat_template_kwargs", "structured_outputs", "regex", "ebnf", "grammar", "cache_salt", "vllm_xargs", "priority",
    "cache_prompt",
)  # fmt: skip
#: Fields about accounts, caches, speed and what to do where a model fails: they do not change what is sampled.
_DROPPED: Final = (
    "metadata", "service_tier", "inference_geo", "speed", "cache_control", "betas", "user_profile_id", "workspace_id",
    "diagnostics", "billing_policy", "fallbacks", "fallback_credit_token",
)  # fmt: skip
_READ: Final = frozenset(
    ("model", "messages", "system", "max_tokens", "stream", "stop_sequences", "tools", "tool_choice", "thinking",
     "output_config", "output_format", "context_management", *_SAME, *_ENGINES, *_DROPPED)
)  # fmt: skip
#: Tools that Anthropic's own servers run; an agent offers them and can do without.
_SERVER_TOOLS: Final = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_")
_TOOL_READ: Final = frozenset(("type", "name", "description", "input_schema", "strict"))
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
#: Thinking off and on, by the names that templates know it under (Qwen 3, GLM; DeepSeek).
_OFF: Final = {"enable_thinking": False, "thinking": False}
_ON: Final = {"enable_thinking": True, "thinking": True}


class AnthropicDialect(Dialect):
    wire: ClassVar[str] = "anthropic-messages"
    call_type: ClassVar[str] = "anthropic_messages"
    paths: ClassVar[tuple[str, ...]] = ("/v1/messages",)
    count_path: ClassVar[str | None] = "/v1/messages/count_tokens"
    client_header: ClassVar[bytes | None] = b"anthropic-version"

    def translate(self, body: dict[str, Any], earlier: EarlierAnswers) -> ChatRequest:
        history = History(earlier)
        dropped = history.dropped
        chat = _conversation(body, history)
        _check_fields(body, dropped)
        limit = body.get("max_tokens")
        if type(limit) is not int or limit < 1:
            raise Refusal(400, "max_tokens: Field required" if limit is None else "max_tokens: Input should be above 0")
        chat["max_tokens"] = limit
        for name in (*_SAME, *_ENGINES):
            if body.get(name) is not None:
                chat[name] = body[name]
        _stops(body, chat)
        _tools(body, chat, dropped)
        _thinking(body, chat, dropped)
        _output(body, chat)
        prefill = _prefill(chat)
        streams = body.get("stream") is True
        if streams:
            chat.update(stream=True, stream_options={"include_usage": True})
        return ChatRequest(chat, list(dropped), streams, prefill)

    def count(self, body: dict[str, Any], earlier: EarlierAnswers) -> dict[str, Any]:
        """The chat request whose prompt `count_tokens` asks about; it has no `max_tokens`."""
        return self.translate({**body, "max_tokens": body.get("max_tokens") or 1}, earlier).chat

    def reply(self, request: ChatRequest) -> AnthropicReply:
        return AnthropicReply(request)

    def error(self, status: int, message: str, engine_error: Any = None) -> tuple[int, bytes]:
        error = error_object(status, message)
        return status_of(status, message), dumps(error)


def _conversation(body: dict[str, Any], history: History) -> dict[str, Any]:
    if not isinstance(body.get("model"), str):
        raise Refusal(400, "model: Field required" if body.get("model") is None else "model: Input should be a string")
    if body.get("system") is not None:
        history.system(body["system"])
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refusal(400, "messages: Field required" if messages is None else "messages: at least one is required")
    for at, message in enumerate(messages):
        history.add(message, f"messages.{at}")
    return {"model": body["model"], "messages": history.messages}


def _check_fields(body: dict[str, Any], dropped: dict[str, None]) -> None:
    """Every field is read, dropped because it changes nothing, or refused because nobody knows what it changes."""
    for name in body.keys() - _READ:
        if body[name] is not None and body[name] != []:
            raise Refusal(400, f"{name}: this field cannot be kept here, and leaving it out may change what is sampled")
        dropped[name] = None
    for name in _DROPPED:
        if body.get(name) is not None:
            dropped[name] = None
    managed = body.get("context_management")
    if managed is not None:
        edits = managed.get("edits") if isinstance(managed, dict) else None
        if not isinstance(edits, list | None):
            raise Refusal(400, "context_management.edits: Input should be a list")
        for at, edit in enumerate(edits or ()):
            if not (isinstance(edit, dict) and str(edit.get("type")).startswith("clear_thinking")
                    and edit.get("keep") == "all"):  # fmt: skip
                raise Refusal(400, f"context_management.edits.{at}: this edit of the conversation is not done here")
        dropped["context_management"] = None


def _stops(body: dict[str, Any], chat: dict[str, Any]) -> None:
    stops = body.get("stop_sequences")
    if stops is None or stops == []:
        return
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise Refusal(400, "stop_sequences: Input should be a list of strings that are not empty")
    chat["stop"] = list(stops)


def _tools(body: dict[str, Any], chat: dict[str, Any], dropped: dict[str, None]) -> None:
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise Refusal(400, "tools: Input should be a list")
    functions = (_tool(tool, f"tools.{at}", dropped) for at, tool in enumerate(tools or ()))
    made = [function for function in functions if function is not None]
    if made:
        chat["tools"] = made
    choice = body.get("tool_choice")
    if choice is None:
        return
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        name = choice.get("name")
        if name not in [function["function"]["name"] for function in made]:
            raise Refusal(400, f"tool_choice.name: no tool of this request that the engine can be given is {name!r}")
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in _CHOICES:
        if kind == "any" and not made:
            raise Refusal(400, "tool_choice.type: 'any' needs `tools`")
        if made:
            chat["tool_choice"] = _CHOICES[kind]
    else:
        raise Refusal(400, "tool_choice.type: Input should be 'auto', 'any', 'tool' or 'none'")
    if choice.get("disable_parallel_tool_use") and made:
        chat["parallel_tool_calls"] = False


def _tool(tool: Any, place: str, dropped: dict[str, None]) -> dict[str, Any] | None:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise Refusal(400, f"{place}.name: Field required")
    schema, kind = tool.get("input_schema"), tool.get("type")
    if kind not in (None, "custom"):
        if str(kind).startswith(_SERVER_TOOLS):
            dropped[f"{place}: {kind}"] = None
            return None
        if not isinstance(schema, dict):
            raise Refusal(
                400, f"{place}: a tool of type {kind!r} is known to Anthropic's models alone; give its schema"
            )
    if not isinstance(schema, dict):
        raise Refusal(400, f"{place}.input_schema: Field required")
    for name in tool.keys() - _TOOL_READ:
        if tool[name] not in (None, False, []):
            dropped[f"tools[].{name}"] = None
    function: dict[str, Any] = {"name": tool["name"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    function["parameters"] = schema if "type" in schema else {"type": "object", **schema}
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _thinking(body: dict[str, Any], chat: dict[str, Any], dropped: dict[str, None]) -> None:
    """Off and on go to the template; `adaptive` is the default: the model decides."""
    thinking = body.get("thinking")
    if thinking is None:
        return
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if kind not in ("enabled", "disabled", "adaptive"):
        raise Refusal(400, "thinking.type: Input should be 'enabled', 'disabled' or 'adaptive'")
    if kind == "adaptive":
        dropped["thinking"] = None
    else:
        own = chat.get("chat_template_kwargs")
        own = own if isinstance(own, dict) else {}
        chat["chat_template_kwargs"] = {**(_ON if kind == "enabled" else _OFF), **own}
    for name in ("budget_tokens", "display"):  # a target for Claude, and how it is shown; max_tokens still bounds it
        if thinking.get(name) is not None:
            dropped[f"thinking.{name}"] = None


def _output(body: dict[str, Any], chat: dict[str, Any]) -> None:
    config = body.get("output_config")
    if config is not None and not isinstance(config, dict):
        raise Refusal(400, "output_config: Input should be an object")
    config = config or {}
    for name in config.keys() - {"effort", "format"}:
        if config[name] is not None:
            raise Refusal(400, f"output_config.{name}: this cannot be kept here")
    if config.get("effort") is not None:
        chat["reasoning_effort"] = config["effort"]
    name = "output_config.format" if config.get("format") is not None else "output_format"
    wanted = config.get("format") or body.get("output_format")
    if wanted is None:
        return
    schema = wanted.get("schema") if isinstance(wanted, dict) and wanted.get("type") == "json_schema" else None
    if not isinstance(schema, dict):
        raise Refusal(400, f"{name}: Input should be of type 'json_schema' with a `schema`")
    chat["response_format"] = {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": schema, "strict": True},
    }


def _prefill(chat: dict[str, Any]) -> str:
    """The text that the answer continues, where the conversation ends with an assistant's turn."""
    last = chat["messages"][-1] if chat["messages"] else {}
    if last.get("role") != "assistant":
        return ""
    if last.get("tool_calls") or not last["content"]:
        raise Refusal(400, "messages: the conversation must end with a turn of the user, or with text to go on from")
    chat.update(add_generation_prompt=False, continue_final_message=True)
    return str(last["content"])
