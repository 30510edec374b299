"""A Responses request as a chat completions request: every field kept, refused by name, or dropped and
listed.

Dropped are only fields that do not change what is sampled; one that would, and has no form as chat, is a 400.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from proxy.dialects.base import ChatRequest, EarlierAnswers
from proxy.dialects.responses.history import items_of, messages_of
from proxy.dialects.responses.tools import Tool, tool_choice, toolset
from proxy.errors import Refusal
from proxy.sampling import SAMPLING


@dataclass(frozen=True, slots=True)
class Context:
    """What the answer needs to know of its request.

    `tools` by their names as chat; `items` are the whole conversation; `echo` are the fields that an answer repeats.
    """

    tools: dict[str, Tool]
    items: list[dict[str, Any]]
    echo: dict[str, Any]
    summary: bool
    encrypted: bool
    logprobs: bool
    store: bool


#: Read by what follows.
_READ: Final = frozenset(
    "model input instructions previous_response_id stream tools tool_choice parallel_tool_calls temperature top_p "
    "max_output_tokens text reasoning include top_logprobs store truncation metadata".split()
)
#: Sampling parameters beyond OpenAI's, as vLLM's own Responses route takes them too; they go on as they are.
_ENGINE: Final = frozenset(SAMPLING).union(
    "length_penalty thinking_token_budget skip_special_tokens spaces_between_special_tokens mm_processor_kwargs "
    "priority cache_salt".split()
)
#: Who asks, what is billed, cached or shown, and bounds of tools that are not here: dropped and listed.
_LEFT_OUT: Final = frozenset(
    "user safety_identifier service_tier client_metadata prompt_cache_key prompt_cache_retention prompt_cache_options "
    "max_tool_calls stream_options access_programs background_options image".split()
)
#: Names of other dialects, and what they are called here.
_ELSEWHERE: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "functions": "tools",
    "function_call": "tool_choice",
}
#: Fields that would change the answer and have no form as chat, and the values of each that ask for nothing.
_REFUSED: Final[dict[str, Any]] = {
    "background": (None, False),
    "conversation": (None,),
    "prompt": (None,),
    "context_management": (None, []),
    "moderation": (None,),
    "generate": (None, True),
    "n": (None, 1),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
}
_TEXT_READ: Final = ("format",)
_REASONING_READ: Final = ("effort", "summary", "generate_summary", "mode")
_ASKS_NOTHING: Final = (None, "medium", "auto")  # the defaults of verbosity and context
_LOGPROBS: Final = "message.output_text.logprobs"
_ENCRYPTED: Final = "reasoning.encrypted_content"


def translate(body: dict[str, Any], earlier: EarlierAnswers) -> ChatRequest:
    """`body` as chat. Raises `Refusal` (400) with a sentence that names the field."""
    _refuse(body)
    streams = body.get("stream") is True
    include = _include(body)
    items = items_of(body, earlier)
    tools = toolset(body.get("tools"), items)
    dropped = [*tools.dropped, *_dropped(body)]

    chat: dict[str, Any] = {"model": body["model"]} if body.get("model") is not None else {}
    chat["messages"] = messages_of(body.get("instructions"), items, earlier)
    choice = tool_choice(body.get("tool_choice"), tools)
    if tools.functions:
        chat["tools"] = tools.functions
        if choice is not None:
            chat["tool_choice"] = choice
        if body.get("parallel_tool_calls") is not None:
            chat["parallel_tool_calls"] = body["parallel_tool_calls"]
    chat |= _sampling(body)
    if _LOGPROBS in include:
        chat["logprobs"] = True
        if body.get("top_logprobs"):
            chat["top_logprobs"] = body["top_logprobs"]
    elif body.get("top_logprobs"):
        dropped.append("top_logprobs")  # nothing shows them without `include`
    if streams:
        chat["stream"] = True
        chat["stream_options"] = {"include_usage": True}
    context = Context(
        tools=tools.named,
        items=[item for _, item in items],
        echo=_echo(body),
        summary=bool(_object(body, "reasoning").get("summary") or _object(body, "reasoning").get("generate_summary")),
        encrypted=_ENCRYPTED in include,
        logprobs=_LOGPROBS in include,
        store=body.get("store") is not False,
    )
    return ChatRequest(chat=chat, dropped=dropped, streams=streams, context=context)


def _refuse(body: dict[str, Any]) -> None:
    for name, harmless in _REFUSED.items():
        if body.get(name) not in harmless:
            raise Refusal(400, f"`{name}` is not served here: it would change the answer and has no form as chat")
    for name in body.keys() - _READ - _ENGINE - _LEFT_OUT - _REFUSED.keys() - _ELSEWHERE.keys():
        if body[name] is not None:
            raise Refusal(400, f"`{name}` is not known here, and leaving it out may change what is sampled")
    for name, ours in _ELSEWHERE.items():
        if body.get(name) is not None:
            raise Refusal(400, f"`{name}` is no field of a Responses request: it is `{ours}` here")
    mode = _object(body, "reasoning").get("mode")
    if mode not in (None, "standard"):
        raise Refusal(400, f"`reasoning.mode` {mode!r} is not served here: engines have no such mode")


def _sampling(body: dict[str, Any]) -> dict[str, Any]:
    """What shapes the sampling, under its names as chat."""
    chat = {name: body[name] for name in ("temperature", "top_p") if body.get(name) is not None}
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]  # of its two names the one that every engine knows
    effort = _object(body, "reasoning").get("effort")
    if effort is not None:
        chat["reasoning_effort"] = effort
    form = _form(body)
    if form is not None:
        chat["response_format"] = form
    chat |= {name: body[name] for name in body if name in _ENGINE and name not in _READ and body[name] is not None}
    return chat


def _form(body: dict[str, Any]) -> dict[str, Any] | None:
    form = _object(body, "text").get("format")
    if form is None:
        return None
    if not isinstance(form, dict):
        raise Refusal(400, "`text.format` must be an object")
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise Refusal(400, f"`text.format` {kind!r} is not served here: it is text, json_object or json_schema")
    if not isinstance(form.get("schema"), dict):
        raise Refusal(400, "`text.format.schema` must be a JSON schema")
    fields = {name: form[name] for name in ("name", "description", "schema", "strict") if form.get(name) is not None}
    return {"type": "json_schema", "json_schema": {"name": "answer", **fields}}


def _include(body: dict[str, Any]) -> list[Any]:
    include = body.get("include")
    if include is None:
        return []
    if not isinstance(include, list):
        raise Refusal(400, "`include` must be a list")
    return include


def _dropped(body: dict[str, Any]) -> list[str]:
    """The paths of fields that are dropped because they do not change what is sampled."""
    dropped = [name for name, value in body.items() if name in _LEFT_OUT and value is not None]
    dropped += [f"include[{at}]" for at, name in enumerate(_include(body)) if name not in (_LOGPROBS, _ENCRYPTED)]
    # Codex sends `text.verbosity` and `reasoning.context` to models that it knows by name. No engine has a
    # verbosity, and the template decides which turns' reasoning a prompt holds.
    for name, read in (("text", _TEXT_READ), ("reasoning", _REASONING_READ)):
        fields = _object(body, name)
        dropped += [
            f"{name}.{field}" for field, value in fields.items() if field not in read and value not in _ASKS_NOTHING
        ]
    if body.get("truncation") not in (None, "disabled"):
        dropped.append("truncation")  # what is too long is the engine's 400
    return dropped


def _echo(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request that its answer repeats, with OpenAI's defaults."""
    reasoning = _object(body, "reasoning")
    return {
        "background": False,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": body.get("safety_identifier"),
        "service_tier": "default",
        "store": body.get("store") is not False,
        "temperature": body.get("temperature"),
        "text": {"format": {"type": "text"}, **_object(body, "text")},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": body.get("top_p"),
        "truncation": body.get("truncation") or "disabled",
        "user": body.get("user"),
    }


def _object(body: dict[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Refusal(400, f"`{name}` must be an object")
    return value
