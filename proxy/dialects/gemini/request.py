"""Tools and settings of a Gemini request as chat fields: kept, refused by name, or dropped and listed."""

from __future__ import annotations

import re
from typing import Any, Final

from proxy.errors import Refusal

_READ: Final = frozenset("contents systemInstruction tools toolConfig generationConfig".split())
_LEFT_OUT: Final = frozenset("safetySettings labels model serviceTier".split())
#: Settings that have the same meaning as chat.
_NAMES: Final = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "maxOutputTokens": "max_tokens",
    "stopSequences": "stop",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}
_FORM: Final = ("responseMimeType", "responseSchema", "responseJsonSchema", "_responseJsonSchema")
#: Settings of other outputs than text: the values that ask for none.
_ONLY_TEXT: Final[dict[str, Any]] = {"candidateCount": (None, 1), "responseModalities": (None, [], ["TEXT"], ["Text"])}
_SETTINGS_LEFT_OUT: Final = frozenset(("responseLogprobs", "logprobs", "mediaResolution", "enableEnhancedCivicAnswers"))
_LEVELS: Final = {"MINIMAL": "minimal", "LOW": "low", "MEDIUM": "medium", "HIGH": "high"}
_MODES: Final = {"AUTO": "auto", "VALIDATED": "auto", "MODE_UNSPECIFIED": "auto", "NONE": "none", "ANY": "required"}


#: Google's clients write integers of 64 bits as texts.
_COUNT: Final = re.compile(r"[0-9]{1,19}")
#: The keys of these objects are the agent's own.
_FREE: Final = frozenset("args response properties parametersJsonSchema responseJsonSchema _responseJsonSchema".split())


def camel(value: Any) -> Any:
    """Names of fields as Google documents them; its routes, and so its clients, also know them with underscores."""
    if isinstance(value, list):
        return [camel(item) for item in value]
    if not isinstance(value, dict):
        return value
    made = {}
    for name, below in value.items():
        first, *rest = name.split("_") if not name.startswith("_") else [name]
        ours = first + "".join(word.capitalize() for word in rest)
        made[ours] = below if ours in _FREE and ours != "properties" else camel(below)
        if ours == "properties" and isinstance(below, dict):
            made[ours] = {key: camel(schema) for key, schema in below.items()}
    return made


def chat_fields(body: dict[str, Any]) -> tuple[dict[str, Any], list[str], bool]:
    """Chat fields but for the messages; paths of what was left out; whether thoughts are to be shown."""
    for name in body.keys() - _READ - _LEFT_OUT:
        if body[name] is not None:
            raise Refusal(400, f"`{name}` is not served here, and leaving it out may change what is sampled")
    dropped = [name for name in body if name in _LEFT_OUT and body[name] not in (None, [], {})]
    settings = _object(body.get("generationConfig"), "generationConfig")
    thinking = _object(settings.get("thinkingConfig"), "generationConfig.thinkingConfig")
    fields = _tools(body, dropped) | _settings(settings, dropped) | _thinking(thinking)
    return fields, dropped, thinking.get("includeThoughts") is True


def _settings(settings: dict[str, Any], dropped: list[str]) -> dict[str, Any]:
    known = {*_NAMES, *_FORM, *_ONLY_TEXT, *_SETTINGS_LEFT_OUT, "thinkingConfig"}
    for name in settings.keys() - known:
        if settings[name] is not None:
            raise Refusal(400, f"`generationConfig.{name}` is not served here: it may change what is sampled")
    for name, harmless in _ONLY_TEXT.items():
        if settings.get(name) not in harmless:
            raise Refusal(400, f"`generationConfig.{name}` is not served here: an answer is one text")
    dropped += [f"generationConfig.{name}" for name in settings if name in _SETTINGS_LEFT_OUT and settings[name]]
    fields = {ours: settings[theirs] for theirs, ours in _NAMES.items() if settings.get(theirs) not in (None, [])}
    form = _form(settings)
    return fields if form is None else {**fields, "response_format": form}


def _form(settings: dict[str, Any]) -> dict[str, Any] | None:
    mime = settings.get("responseMimeType")
    if mime in (None, "text/plain"):
        return None
    if mime != "application/json":
        raise Refusal(400, f"`generationConfig.responseMimeType` {mime!r} is not served here")
    schema = settings.get("responseJsonSchema") or settings.get("_responseJsonSchema")
    if schema is None and settings.get("responseSchema") is not None:
        schema = json_schema(settings["responseSchema"])
    if schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _thinking(thinking: dict[str, Any]) -> dict[str, Any]:
    for name in thinking.keys() - {"includeThoughts", "thinkingBudget", "thinkingLevel"}:
        raise Refusal(400, f"`generationConfig.thinkingConfig.{name}` is not served here")
    level, budget = thinking.get("thinkingLevel"), thinking.get("thinkingBudget")
    if level not in (None, "THINKING_LEVEL_UNSPECIFIED"):
        if not isinstance(level, str) or level not in _LEVELS:
            raise Refusal(400, f"`generationConfig.thinkingConfig.thinkingLevel` {level!r} is not known here")
        return {"reasoning_effort": _LEVELS[level]}
    if budget in (None, -1):
        return {}
    return {"reasoning_effort": "none"} if budget == 0 else {"thinking_token_budget": budget}


# tools


def _tools(body: dict[str, Any], dropped: list[str]) -> dict[str, Any]:
    given = body.get("tools")
    if given is not None and not isinstance(given, list):
        raise Refusal(400, "`tools` must be a list of tools")
    functions = []
    for at, tool in enumerate(given or ()):
        for kind, declared in _object(tool, f"tools[{at}]").items():
            if kind != "functionDeclarations":
                dropped.append(f"tools[{at}].{kind}")  # Google runs it
                continue
            if not isinstance(declared, list):
                raise Refusal(400, f"`tools[{at}].functionDeclarations` must be a list")
            path = f"tools[{at}].functionDeclarations"
            functions += [_function(given, f"{path}[{n}]") for n, given in enumerate(declared)]
    if not functions:
        return {}
    config = _object(_object(body.get("toolConfig"), "toolConfig").get("functionCallingConfig"), "toolConfig")
    mode = config.get("mode") or "AUTO"
    if not isinstance(mode, str) or mode not in _MODES:
        raise Refusal(400, f"`toolConfig.functionCallingConfig.mode` {mode!r} is not known here")
    allowed = config.get("allowedFunctionNames")
    if allowed:
        if not isinstance(allowed, list):
            raise Refusal(400, "`toolConfig.functionCallingConfig.allowedFunctionNames` must be a list of names")
        functions = [function for function in functions if function["function"]["name"] in allowed]
    fields: dict[str, Any] = {"tools": functions}
    if config.get("mode"):
        fields["tool_choice"] = _MODES[mode]
    return fields


def _function(given: Any, path: str) -> dict[str, Any]:
    declared = _object(given, path)
    if not isinstance(declared.get("name"), str) or not declared["name"]:
        raise Refusal(400, f"`{path}.name` must be the function's name")
    made: dict[str, Any] = {"name": declared["name"]}
    if declared.get("description"):
        made["description"] = declared["description"]
    schema = declared.get("parametersJsonSchema")
    if schema is None:
        schema = json_schema(declared.get("parameters") or {"type": "OBJECT", "properties": {}})
    made["parameters"] = schema
    return {"type": "function", "function": made}


def json_schema(schema: Any) -> Any:
    """Gemini's Schema (OpenAPI 3.0: types in capitals, `nullable`, counts as texts) as a JSON schema."""
    if isinstance(schema, list):
        return [json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "type" and isinstance(value, str):
            made["type"] = value.lower()
        elif name == "properties" and isinstance(value, dict):
            made["properties"] = {key: json_schema(below) for key, below in value.items()}
        elif name in ("items", "anyOf", "prefixItems", "additionalProperties"):
            made[name] = json_schema(value)
        elif name.startswith(("min", "max")) and isinstance(value, str) and _COUNT.fullmatch(value):
            made[name] = int(value)
        elif name not in ("nullable", "propertyOrdering"):
            made[name] = value
    if schema.get("nullable") is True and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    return made


def _object(value: Any, path: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Refusal(400, f"`{path}` must be an object")
    return value
