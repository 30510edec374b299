"""Removes secrets from what is stored: key fields, headers, addresses and error texts are redacted, model text never.

Text that a model read or wrote is not changed, so that text and token ids agree. If it contains what looks like a
secret, the record says so (`secrets_seen`); redacting it (`redact_text`) is the exporter's choice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple

from capture import json

REDACTED: Final = "***REDACTED***"

#: Fields whose names end in these contain a secret. `token`, `tokens` and `token_ids` do not: those are model tokens.
_SECRET_ENDS: Final = tuple(
    "_" + name
    for name in (
        "api_key apikey authorization cookie credential credentials password passwd secret access_key account_key "
        "encryption_key master_key private_key secret_key access_token api_token auth_token bearer_token id_token "
        "refresh_token session_token"
    ).split()
)
#: These fields contain what the model read or wrote, limits on its output, or the engine's report of its tokens.
_TEXT_FIELDS: Final = frozenset(
    "content text prompt suffix input arguments logprobs top_logprobs tokens functions instructions token_capture "
    "reasoning reasoning_content refusal system thinking stop stop_sequences bad_words chat_template "
    "response_format structured_outputs json_schema grammar regex ebnf guided_json guided_regex guided_choice "
    "guided_grammar functioncall functionresponse inlinedata".split()  # the last three are Gemini's
)
#: Parts of a message that contain an address, which the model does not read.
_MEDIA: Final = frozenset("image_url video_url audio_url file_url".split())
_NUMBERS: Final = frozenset((int, float, bool))
_PLAIN: Final = _NUMBERS | {type(None)}
#: Only this many characters at the end of a field's name count, so that no long names are cached.
_NAME: Final = 32
_SCHEME: Final = re.compile(r"(?i)(bearer|basic|token)\s")


class _Kind(NamedTuple):
    """A kind of secret. The pattern is tried only where one of `words` occurs, and not inside a longer word."""

    name: str
    words: tuple[str, ...]
    pattern: re.Pattern[str]


#: Every repetition is bounded, so that no text can take more than linear time.
_KINDS: Final = (
    _Kind("private_key", ("-----BEGIN ",), re.compile(
        r"-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----"
        r"(?:[A-Za-z0-9+/=\s\\]{0,8000}-----END [A-Z ]{0,20}PRIVATE KEY-----)?")),
    _Kind("openai_key", ("sk-",), re.compile(r"sk-(?=[A-Za-z_-]{0,40}[0-9A-Z])[A-Za-z0-9_-]{12,200}")),
    _Kind("google_key", ("AIzaSy",), re.compile(r"AIzaSy[A-Za-z0-9_-]{20,60}")),
    _Kind("aws_key", ("AKIA", "ASIA"), re.compile(r"A[KS]IA[A-Z0-9]{16}(?![A-Za-z0-9])")),
    _Kind("github_token", ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"), re.compile(
        r"(?:gh[pousr]|github_pat)_[A-Za-z0-9_]{20,100}")),
    _Kind("slack_token", ("xox",), re.compile(r"xox[abeoprs]-[A-Za-z0-9-]{10,200}")),
    _Kind("huggingface_token", ("hf_",), re.compile(r"hf_[A-Za-z0-9]{20,100}")),
    _Kind("provider_key", ("gsk_", "r8_", "fw_", "dtn_", "xai-"), re.compile(
        r"(?:gsk_|r8_|fw_|dtn_|xai-)[A-Za-z0-9]{20,100}")),
    _Kind("jwt", ("eyJ",), re.compile(r"eyJ[A-Za-z0-9_]{10,300}\.eyJ[A-Za-z0-9_-]{10,4000}\.[A-Za-z0-9_-]{5,1000}")),
)  # fmt: skip
_WORDS: Final = tuple(word for kind in _KINDS for word in kind.words)
#: No secret of any kind is shorter (an OpenAI key is `sk-` and twelve characters or more).
_SHORTEST: Final = 15
_URL_USER: Final = re.compile(r"(?<=://)(?!\*\*\*R)[^/\s@:]{1,200}(?::[^/\s@]{0,200})?(?=@)")
_URL_QUERY: Final = re.compile(
    r"(?<=[?&])((?:api[_-]?key|access_token|password|signature|sig|x-amz-signature|token|secret)=)[^&\s\"']{1,2000}",
    re.I,
)


def redact(value: Any) -> Any:
    """`value` with the secrets in known fields, addresses and errors replaced; the same object if there are none."""
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, dict):
        changed: dict[Any, Any] | None = None
        for name, item in value.items():
            clean = None if type(item) in _PLAIN else _cleaner(name[-_NAME:])
            if clean is not None and (new := clean(item)) is not item:
                changed = changed if changed is not None else dict(value)
                changed[name] = new
        return value if changed is None else changed
    return _each(value, redact) if isinstance(value, list) else value


@lru_cache(1024)
def _cleaner(name: str) -> Callable[[Any], Any] | None:
    """The function that redacts the value of a field whose name ends like this; None if the value is not changed."""
    key = name.lower().replace("-", "_")
    if key in ("messages", "input"):  # the second: items of the responses dialect
        return _messages
    if key in _TEXT_FIELDS:
        return None
    if key == "tools":
        return _tools
    return _blank if f"_{key}".endswith(_SECRET_ENDS) else redact


def _messages(value: Any) -> Any:
    return _each(value, _message) if isinstance(value, list) else value


def _tools(value: Any) -> Any:
    return _each(value, _tool) if isinstance(value, list) else value


def _message(message: Any) -> Any:
    """A message's text is not changed; the addresses of its images lose their signatures."""
    if not isinstance(message, dict):
        return message
    for name in ("content", "output"):
        content = message.get(name)
        if isinstance(content, list):
            new = _each(content, _part)
            message = message if new is content else {**message, name: new}
    return message


def _part(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    if isinstance(part.get("source"), dict) and "url" in part["source"]:  # an Anthropic image
        new = redact(part["source"])
        return part if new is part["source"] else {**part, "source": new}
    if part.get("type") == "tool_result":
        return _message(part)
    if _MEDIA.isdisjoint(part):
        return part
    new = {name: redact(item) if name in _MEDIA else item for name, item in part.items()}
    return part if all(new[name] is part[name] for name in part) else new


def _tool(tool: Any) -> Any:
    """A function's definition is part of the prompt; the headers of a tool server (MCP) are not."""
    known = not isinstance(tool, dict) or tool.get("type", "function") in ("function", "custom")
    return tool if known or "input_schema" in tool else redact(tool)


def _each(items: list[Any], clean: Any) -> list[Any]:
    if _are_numbers(items):
        return items
    new = [clean(item) for item in items]
    return new if any(a is not b for a, b in zip(new, items, strict=True)) else items


def _are_numbers(items: list[Any]) -> bool:
    """Token ids and logprobs: there is nothing to redact in them."""
    return bool(items) and type(items[0]) in _NUMBERS and _NUMBERS.issuperset(map(type, items))


def _blank(value: Any) -> Any:
    """Replaces every string below a field that contains a secret; the scheme (`Bearer`) is kept."""
    if isinstance(value, str) and value:
        scheme = _SCHEME.match(value)
        return f"{scheme[1]} {REDACTED}" if scheme else REDACTED
    if isinstance(value, list):
        return [_blank(item) for item in value]
    if isinstance(value, dict):
        return {name: _blank(item) for name, item in value.items()}
    return value


def redact_url(text: str) -> str:
    """An address, or a text with addresses in it, without user, password and secret query parameters."""
    if "@" in text and "://" in text:
        text = _URL_USER.sub(REDACTED, text)
    if "=" in text and ("?" in text or "&" in text):
        text = _URL_QUERY.sub(lambda found: found[1] + REDACTED, text)
    return text


def redact_text(text: str) -> str:
    """A text with everything that looks like a secret replaced; the same object if nothing does."""
    if text.startswith("data:"):
        return text
    suspect = _suspect(text)
    if not suspect and "://" not in text and "=" not in text:
        return text
    for kind in _KINDS if suspect else ():
        parts, at = [], 0
        for start, end in sorted(_found(text, kind)):
            parts += [text[at:start], REDACTED]
            at = end
        if at:
            text = "".join((*parts, text[at:]))
    new = redact_url(text)
    return text if new == text else new


def secrets_seen(*values: Any) -> list[str]:
    """The kinds of secrets that seem to occur in the texts of `values`, sorted.

    A conversation and its tools are sent again with every call, so results are cached by hash.
    """
    seen: set[str] = set()
    short: list[str] = []
    found = list(values)
    for place, value in enumerate(values):
        tools = value.get("tools") if isinstance(value, dict) else None
        if isinstance(tools, list):
            seen |= _kinds_of_tools(tools)
            found[place] = {name: inner for name, inner in value.items() if name != "tools"}
    for item in found:  # grows by the contents of each item
        kind = type(item)
        if kind is str:
            if item.startswith("data:"):  # an image
                continue
            if len(item) < _LONG:
                short.append(item)
            else:
                seen |= _remembered(hash(item), _kinds, item)
        elif kind is dict:
            found += item.values()
        elif kind is list and not _are_numbers(item):
            found += item
    seen |= _kinds("\n".join(short))
    return sorted(seen)


#: Texts of at least `_LONG` characters are scanned once: up to `_MOST` results are cached.
_LONG: Final = 48
_MOST: Final = 20_000
_found_in: dict[int, frozenset[str]] = {}


def _remembered(key: int, find: Callable[[Any], Iterable[str]], where: Any) -> frozenset[str]:
    kinds = _found_in.get(key)
    if kinds is None:
        if len(_found_in) >= _MOST:
            _found_in.clear()
        kinds = _found_in[key] = frozenset(find(where))
    return kinds


def _kinds_of_tools(tools: list[Any]) -> frozenset[str]:
    """Tools are many small texts: scanning them one by one costs twenty times what serializing them does."""
    text = json.dumps(tools)
    return _remembered(hash((text, "tools")), secrets_seen, tools)


def _kinds(text: str) -> frozenset[str]:
    """The kinds of secrets in one text, or in texts joined by newlines, which no secret's first word contains."""
    seen = {kind.name for kind in _KINDS if next(_found(text, kind), None) is not None} if _suspect(text) else set()
    if "://" in text and _URL_USER.search(text) is not None:
        seen.add("url_credentials")
    return frozenset(seen)


def _suspect(text: str) -> bool:
    """Whether any kind's words occur in the text."""
    if len(text) < _SHORTEST:
        return False
    for word in _WORDS:  # noqa: SIM110 (a generator costs as much as the search)
        if word in text:
            return True
    return False


def _found(text: str, kind: _Kind) -> Iterator[tuple[int, int]]:
    """Start and end of each secret of a kind. `str.find` finds the words: a pattern alone is fifty times slower."""
    done = 0
    for word in kind.words:
        at = text.find(word)
        while at >= 0:
            following = at + len(word)
            if at >= done and not (at and (text[at - 1].isalnum() or text[at - 1] == "_")):
                match = kind.pattern.match(text, at)
                if match is not None:
                    yield at, match.end()
                    done = following = match.end()
            at = text.find(word, following)
        done = 0
