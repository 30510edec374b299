"""Tools of the Responses dialect as chat functions, and the way back: which kind of tool a sampled call belongs to.

A custom tool takes free text; a chat model is offered it as a function with one string parameter (as vLLM 0.32's own
Responses route does), and what it writes there is the tool's input again. A namespace becomes functions named
`<namespace>__<name>`. A tool search that the agent runs is a function too; the tools that it found, and those that came
as `additional_tools`, join the others. Tools that OpenAI runs itself (web search, code interpreter) are left out, which
the record says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import orjson

from proxy.errors import Refusal

#: The one parameter of a custom tool.
INPUT: Final = "input"
_INPUT_SCHEMA: Final = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The whole input of the tool, as free text."}},
    "required": [INPUT],
    "additionalProperties": False,
}
#: The name of Codex's search for deferred tools, which has none in the request (Codex 0.171, `execution: client`).
TOOL_SEARCH: Final = "tool_search"
#: Items of a conversation that hold tools. Models that Codex knows get all tools by the first (since 0.144).
ADDITIONAL_TOOLS: Final = "additional_tools"
TOOL_SEARCH_OUTPUT: Final = "tool_search_output"
BRINGS_TOOLS: Final = (ADDITIONAL_TOOLS, TOOL_SEARCH_OUTPUT)
_NO_PARAMETERS: Final = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """What the agent declared under a chat function's name."""

    name: str
    kind: Literal["function", "custom", "tool_search"] = "function"
    namespace: str | None = None


@dataclass(slots=True)
class Toolset:
    """`functions` go to the engine; `named` tells what each of their names is to the agent; `dropped` are paths."""

    functions: list[dict[str, Any]]
    named: dict[str, Tool]
    dropped: list[str]


def chat_name(name: str, namespace: str | None) -> str:
    """The name under which the model knows a tool (vLLM's own rule)."""
    return f"{namespace}__{name}" if namespace else name


def toolset(tools: Any, items: Sequence[tuple[str, dict[str, Any]]] = ()) -> Toolset:
    """The agent's `tools` as chat functions, and those that items of the conversation (with their paths) brought.

    Raises `Refusal` where one is no tool.
    """
    made = Toolset([], {}, [])
    _add(made, "tools", tools)
    for path, item in items:
        if item.get("type") in BRINGS_TOOLS:
            known = set(made.named)  # an agent that searches twice finds the same tool twice
            _add(made, f"{path}.tools", item.get("tools"), known)
    return made


def _add(made: Toolset, where: str, tools: Any, known: Container[str] = ()) -> None:
    if tools is None:
        return
    if not isinstance(tools, list):
        raise Refusal(400, f"`{where}` must be a list of tools")
    for namespace, path, given in _flat(tools, where):
        kind = given.get("type")
        if kind not in ("function", "custom", TOOL_SEARCH) or (kind == TOOL_SEARCH and _run_by_openai(given)):
            made.dropped.append(f"{path} ({kind})")
            continue
        name = TOOL_SEARCH if kind == TOOL_SEARCH else given.get("name")
        if not isinstance(name, str) or not name:
            raise Refusal(400, f"`{path}.name` must be the tool's name")
        tool = Tool(name, kind, namespace.get("name") if namespace is not None else None)
        known_as = chat_name(name, tool.namespace)
        if known_as in known:
            continue
        if kind == "custom" and _grammar(given) is not None:
            made.dropped.append(f"{path}.format")  # described to the model, not enforced on it
        if given.get("defer_loading"):
            made.dropped.append(f"{path}.defer_loading")  # no engine loads tools later: the model has it from the start
        made.named[known_as] = tool
        made.functions.append({"type": "function", "function": _function(known_as, given, namespace)})


def _run_by_openai(tool_search: dict[str, Any]) -> bool:
    return tool_search.get("execution") != "client"


def _flat(tools: list[Any], where: str) -> Iterator[tuple[dict[str, Any] | None, str, dict[str, Any]]]:
    """Each tool with its namespace, if it is in one, and its path in the request."""
    for at, given in enumerate(tools):
        path = f"{where}[{at}]"
        if not isinstance(given, dict):
            raise Refusal(400, f"`{path}` must be an object")
        if given.get("type") != "namespace":
            yield None, path, given
            continue
        inner = given.get("tools")
        if not isinstance(given.get("name"), str) or not isinstance(inner, list):
            raise Refusal(400, f"`{path}` must have a name and its tools")
        for below, tool in enumerate(inner):
            if not isinstance(tool, dict):
                raise Refusal(400, f"`{path}.tools[{below}]` must be an object")
            yield given, f"{path}.tools[{below}]", tool


def _function(name: str, given: dict[str, Any], namespace: dict[str, Any] | None) -> dict[str, Any]:
    made: dict[str, Any] = {"name": name}
    described = [namespace.get("description") if namespace else None, given.get("description")]
    if given.get("type") == "custom":
        described.append(_grammar(given))
    text = "\n\n".join(text for text in described if isinstance(text, str) and text)
    if text:
        made["description"] = text
    if given.get("type") == "custom":
        made["parameters"] = _INPUT_SCHEMA
    else:
        parameters = given.get("parameters")
        made["parameters"] = _NO_PARAMETERS if parameters is None else parameters
        if given.get("strict") is True:  # SGLang and vLLM guide by it; false is what they do without
            made["strict"] = True
    return made


def _grammar(given: dict[str, Any]) -> str | None:
    """A custom tool's grammar, in words for the model: no engine enforces one on a string parameter."""
    form = given.get("format")
    if not isinstance(form, dict) or form.get("type") != "grammar":
        return None
    return f"The input has to follow this {form.get('syntax')} grammar:\n{form.get('definition')}"


def tool_choice(choice: Any, tools: Toolset) -> Any:
    """The chat form of `tool_choice`; None where it has none to send. `allowed_tools` narrows `tools`.

    Raises `Refusal` for a choice that names a tool which is not offered here.
    """
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        _narrow(choice, tools)
        choice = choice.get("mode", "auto")
    if choice is None:
        return None
    if choice in ("auto", "none", "required"):
        if not tools.functions:
            if choice == "required":
                raise Refusal(400, '`tool_choice` is "required", but `tools` has no function or custom tool to call')
            return None
        return choice
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        return {"type": "function", "function": {"name": _named(choice, tools, "tool_choice")}}
    kind = choice.get("type") if isinstance(choice, dict) else choice
    raise Refusal(400, f"`tool_choice` {kind!r} is not served here: it names no function or custom tool")


def _narrow(choice: dict[str, Any], tools: Toolset) -> None:
    allowed = choice.get("tools")
    if not isinstance(allowed, list):
        raise Refusal(400, "`tool_choice.tools` must be a list of tools")
    names = {
        _named(tool, tools, f"tool_choice.tools[{at}]")
        for at, tool in enumerate(allowed)
        if isinstance(tool, dict) and tool.get("type") in ("function", "custom")
    }
    tools.functions = [function for function in tools.functions if function["function"]["name"] in names]


def _named(given: dict[str, Any], tools: Toolset, path: str) -> str:
    name = chat_name(str(given.get("name")), given.get("namespace"))
    if name not in tools.named:
        raise Refusal(400, f"`{path}` names {name!r}, which `tools` does not have")
    return name


# free text within a function's arguments

_OPENING: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_OPENING_BEGUN: Final = re.compile(r'\s*(\{\s*("(i(n(p(ut?)?)?)?)?|"input"\s*(:\s*)?)?)?$')
_ESCAPE: Final = re.compile(r"\\(?:u[0-9a-fA-F]{4}|[^u])", re.DOTALL)
_PLAIN_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


class FreeText:
    """The text in `{"input": "…"}`, as its pieces come in; `feed` returns its new part.

    Where the arguments are of another form, nothing is known before their end: then `rest` gives the whole.
    """

    def __init__(self) -> None:
        self._arguments = ""
        self._at: int | None = None
        self._ended = False
        self._other = False

    def feed(self, piece: str) -> str:
        if self._ended or self._other:
            self._arguments += piece if self._other else ""
            return ""
        self._arguments += piece
        if self._at is None:
            opened = _OPENING.match(self._arguments)
            if opened is None:
                self._other = _OPENING_BEGUN.match(self._arguments) is None
                return ""
            self._at = opened.end()
        return self._decoded()

    def rest(self) -> str:
        """The rest of the text when the arguments have ended."""
        return "" if self._at is not None else _text_of(self._arguments)

    def _decoded(self) -> str:
        """Decodes up to the closing quote, or as far as it is clear; what is not is kept for the next piece."""
        text, at, out = self._arguments, self._at or 0, []
        while at < len(text):
            quote, slash = text.find('"', at), text.find("\\", at)
            if slash < 0 or 0 <= quote < slash:
                end = quote if quote >= 0 else len(text)
                out.append(text[at:end])
                self._ended = quote >= 0
                at = end
                break
            out.append(text[at:slash])
            at = slash
            escape = _ESCAPE.match(text, at)
            if escape is None:
                if len(text) - at < 6:
                    break  # an escape that is not all here yet
                out.append("\\")  # \u without four digits: no JSON, so taken literally
                at += 1
                continue
            decoded, end = _unescaped(text, escape)
            if decoded is None:
                break
            out.append(decoded)
            at = end
        self._arguments, self._at = text[at:], 0
        return "".join(out)


def _unescaped(text: str, escape: re.Match[str]) -> tuple[str | None, int]:
    """One escape's character; None where it is the first half of a pair whose second half has not come."""
    written = escape[0]
    if written[1] != "u":
        return _PLAIN_ESCAPES.get(written[1], written[1]), escape.end()
    code = int(written[2:], 16)
    if not 0xD800 <= code < 0xDC00:
        return chr(code), escape.end()
    second = text[escape.end() : escape.end() + 6]
    if len(second) < 6 and second == "\\u"[: len(second)] + second[2:]:
        return None, escape.start()
    if second.startswith("\\u") and re.fullmatch(r"[dD][c-fC-F][0-9a-fA-F]{2}", second[2:]):
        return chr(0x10000 + ((code - 0xD800) << 10) + int(second[2:], 16) - 0xDC00), escape.end() + 6
    return chr(code), escape.end()


def _text_of(arguments: str) -> str:
    """The one string of arguments that are not `{"input": "…"}`; else the arguments unchanged."""
    try:
        parsed = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    if isinstance(parsed, dict):
        parsed = parsed.get(INPUT, next(iter(parsed.values())) if len(parsed) == 1 else None)
    return parsed if isinstance(parsed, str) else arguments


def free_text(arguments: str) -> str:
    """What a custom tool's agent reads of a whole call's arguments."""
    text = FreeText()
    return text.feed(arguments) + text.rest()


def parsed(arguments: str) -> Any:
    """Arguments as the object that they are, an empty one where there are none; else as they were sampled."""
    try:
        return orjson.loads(arguments) if arguments.strip() else {}
    except orjson.JSONDecodeError:
        return arguments


def as_arguments(text: str) -> str:
    """Free text as the arguments of the function that the model knows."""
    return json.dumps({INPUT: text}, ensure_ascii=False)
