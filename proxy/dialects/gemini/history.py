"""The conversation of a Gemini request as chat messages.

A `content` holds the parts of a turn. A model's content becomes one assistant message. Of a user's content, each
function response becomes a tool message, and the rest the user's message.
"""

from __future__ import annotations

import base64
import json
from typing import Any, Final

import orjson

from proxy.dialects.base import EarlierAnswers
from proxy.dialects.chat import arguments_name
from proxy.errors import Refusal

Message = dict[str, Any]

#: Marks reasoning that we hand out as a part's `thoughtSignature`: agents give signatures back, thoughts seldom.
_CARRIED: Final = b"capture.reasoning.v1."
#: What Gemini CLI puts where an answer had no signature.
_NO_SIGNATURES: Final = ("skip_thought_signature_validator", "context_engineering_is_the_way_to_go")
#: Keys under which agents give a function's plain text.
_TEXT_KEYS: Final = ("output", "result")


def signature(reasoning: str) -> str:
    """Reasoning as a `thoughtSignature`, which is base64."""
    return base64.b64encode(_CARRIED + reasoning.encode("utf-8", "surrogatepass")).decode()


def messages_of(body: dict[str, Any], earlier: EarlierAnswers) -> list[Message]:
    """`systemInstruction` and `contents`. Raises `Refusal` for a part that has no form as chat."""
    history = History(earlier)
    instruction = body.get("systemInstruction")
    if instruction is not None:
        history.system(instruction)
    contents = body.get("contents")
    if isinstance(contents, dict):
        contents = [contents]
    if not isinstance(contents, list) or not contents:
        raise Refusal(400, "`contents` must be a list of at least one content")
    for at, content in enumerate(contents):
        history.add(content, f"contents[{at}]")
    return history.messages


class History:
    """The messages of a conversation, from one content after another."""

    def __init__(self, earlier: EarlierAnswers) -> None:
        self.messages: list[Message] = []
        self._earlier = earlier
        self._open: list[tuple[str, str]] = []  # id and name of calls without a response yet
        self._calls = 0

    def system(self, content: Any) -> None:
        if isinstance(content, str):
            text = content
        else:
            parts = _parts(content, "systemInstruction")
            text = "\n\n".join(_text(part, f"systemInstruction.parts[{at}]") for at, part in enumerate(parts))
        if text:
            self.messages.append({"role": "system", "content": text})

    def add(self, content: Any, path: str) -> None:
        parts = _parts(content, path)
        role = content.get("role", "user")
        if role == "model":
            self._model(parts, path)
        elif role in ("user", "function"):
            self._user(parts, path)
        else:
            raise Refusal(400, f"`{path}.role` {role!r} is not served here: it is user or model")

    def _model(self, parts: list[dict[str, Any]], path: str) -> None:
        turn: Message = {"role": "assistant", "content": None}
        thought, carried = "", None
        for at, part in enumerate(parts):
            where = f"{path}.parts[{at}]"
            carried = _carried(part, where) or carried
            if part.get("thought") is True:
                thought += _text(part, where)
            elif isinstance(part.get("functionCall"), dict):
                turn.setdefault("tool_calls", []).append(self._call(part["functionCall"], where))
            elif "text" in part:
                turn["content"] = (turn["content"] or "") + _text(part, where)
            elif set(part) - {"thoughtSignature"}:
                raise Refusal(400, f"`{where}` is not served here: {_kind(part)} has no form as chat")
        reasoning = thought if carried is None else carried
        if reasoning:
            turn["reasoning"] = turn["reasoning_content"] = reasoning
        if len(turn) > 2 or turn["content"] is not None:
            self.messages.append(turn)

    def _call(self, given: dict[str, Any], path: str) -> dict[str, Any]:
        name, args = given.get("name"), given.get("args")
        if not isinstance(name, str) or not name:
            raise Refusal(400, f"`{path}.functionCall.name` must be the function's name")
        if args is not None and not isinstance(args, dict):
            raise Refusal(400, f"`{path}.functionCall.args` must be an object")
        self._calls += 1
        call_id = str(given.get("id") or f"call_{self._calls}")
        self._open.append((call_id, name))
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": self._args(call_id, args)}}

    def _args(self, call_id: str, args: dict[str, Any] | None) -> str:
        """The string that the model wrote, where the session still has it and it says the same."""
        written = self._earlier.get(arguments_name(call_id))
        if isinstance(written, str):
            try:
                if orjson.loads(written) == (args or {}):
                    return written
            except orjson.JSONDecodeError:
                pass
        return json.dumps(args or {}, ensure_ascii=False)

    def _user(self, parts: list[dict[str, Any]], path: str) -> None:
        content: list[dict[str, Any]] = []
        for at, part in enumerate(parts):
            where = f"{path}.parts[{at}]"
            if isinstance(part.get("functionResponse"), dict):
                self._response(part["functionResponse"], f"{where}.functionResponse")
            else:
                content.append(_content_part(part, where))
        if not content:
            return
        plain = len(content) == 1 and content[0]["type"] == "text"
        self.messages.append({"role": "user", "content": content[0]["text"] if plain else content})

    def _response(self, given: dict[str, Any], path: str) -> None:
        name, call_id = given.get("name"), given.get("id")
        matching = [call for call in self._open if call[0] == call_id or (call_id is None and call[1] == name)]
        if not matching:
            raise Refusal(400, f"`{path}` answers a call of {name!r} that is not in `contents`")
        if given.get("parts"):
            raise Refusal(400, f"`{path}.parts` is not served here: a function's answer is text")
        self._open.remove(matching[0])
        self.messages.append(
            {"role": "tool", "tool_call_id": matching[0][0], "content": _response_text(given.get("response"))}
        )


def _response_text(response: Any) -> str:
    """A response's plain text where it holds nothing else, else its JSON."""
    if isinstance(response, dict) and len(response) == 1:
        for key in _TEXT_KEYS:
            if isinstance(response.get(key), str):
                text: str = response[key]
                return text
    return json.dumps(response, ensure_ascii=False)


def _parts(content: Any, path: str) -> list[dict[str, Any]]:
    parts = content.get("parts") if isinstance(content, dict) else None
    if isinstance(parts, dict):
        parts = [parts]
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise Refusal(400, f"`{path}.parts` must be a list of parts")
    return parts


def _content_part(part: dict[str, Any], path: str) -> dict[str, Any]:
    if "text" in part:
        return {"type": "text", "text": _text(part, path)}
    data = part.get("inlineData")
    if isinstance(data, dict) and isinstance(data.get("data"), str):
        kind = str(data.get("mimeType"))
        if kind.startswith("image/"):
            return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data['data']}"}}
        if kind.startswith("audio/"):
            audio = {"data": data["data"], "format": kind.removeprefix("audio/")}
            return {"type": "input_audio", "input_audio": audio}
        raise Refusal(400, f"`{path}.inlineData` of {kind} is not served here: it has no form as chat")
    raise Refusal(400, f"`{path}` is not served here: {_kind(part)} has no form as chat")


def _text(part: dict[str, Any], path: str) -> str:
    text = part.get("text")
    if not isinstance(text, str):
        raise Refusal(400, f"`{path}.text` must be a text")
    return text


def _kind(part: dict[str, Any]) -> str:
    return next((repr(name) for name in part if name not in ("thought", "thoughtSignature")), "an empty part")


def _carried(part: dict[str, Any], path: str) -> str | None:
    sealed = part.get("thoughtSignature")
    if sealed is None or sealed in _NO_SIGNATURES:
        return None
    try:
        data = base64.b64decode(sealed.translate({45: 43, 95: 47}) + "==")  # some clients write it for addresses
        if data.startswith(_CARRIED):
            return data[len(_CARRIED) :].decode("utf-8", "surrogatepass")
    except (AttributeError, TypeError, ValueError):
        pass
    raise Refusal(400, f"`{path}.thoughtSignature` was not made here and cannot be read: leave it out")
