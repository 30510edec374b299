"""The conversation of a Responses request as chat messages.

One turn of the assistant is several items there (reasoning, text, one item per call) and one message here. Items that
came from us name the answer they belong to in their ids, so what was sampled together is put together again, even where
the agent wrote a tool's output between two calls of one answer.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable
from typing import Any, Final

from proxy.dialects.base import EarlierAnswers
from proxy.dialects.chat import arguments_name
from proxy.dialects.responses.tools import (
    ADDITIONAL_TOOLS,
    TOOL_SEARCH,
    TOOL_SEARCH_OUTPUT,
    as_arguments,
    chat_name,
    free_text,
    parsed,
)
from proxy.errors import Refusal

Message = dict[str, Any]

ROLES: Final = ("user", "assistant", "system", "developer")
#: Marks the reasoning that we hand out as `encrypted_content`: not secret, only opaque, so that it comes back whole.
_CARRIED: Final = "capture.reasoning.v1."
_OWN_ID: Final = re.compile(r"(?:msg|rs|fc|ctc|tsc)_([0-9a-f]{32})_\d+")
_TEXTS: Final = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def carried(reasoning: str) -> str:
    """Reasoning as `encrypted_content`."""
    return _CARRIED + base64.b64encode(reasoning.encode("utf-8", "surrogatepass")).decode()


def item_id(kind: str, answer: str, place: int) -> str:
    """`kind` is msg, rs, fc, ctc or tsc; `answer` the 32 hex digits of its response's id."""
    return f"{kind}_{answer}_{place}"


def answer_of(item: dict[str, Any]) -> str | None:
    """The hex digits of the response that an item of ours came in."""
    own = _OWN_ID.fullmatch(str(item.get("id") or ""))
    return own[1] if own else None


def items_of(body: dict[str, Any], earlier: EarlierAnswers) -> list[tuple[str, dict[str, Any]]]:
    """Every item of the conversation with its path: those of `previous_response_id`, then the request's own,
    references resolved."""
    before: list[tuple[str, dict[str, Any]]] = []
    previous = body.get("previous_response_id")
    if previous is not None:
        known = _conversation(earlier, str(previous))
        if known is None:
            raise Refusal(
                400,
                f"`previous_response_id` {previous!r} is not known in this session: it was not stored (`store` was "
                "false), is too long ago, or the session was opened again since; send the whole history as `input`",
            )
        before = [(f"previous_response_id[{at}]", item) for at, item in enumerate(known)]
    given = body.get("input")
    if isinstance(given, str):
        return [*before, ("input", {"type": "message", "role": "user", "content": given})]
    if given is None and before:
        given = []
    if not isinstance(given, list):
        raise Refusal(400, "`input` must be a text or a list of items")
    return before + [(f"input[{at}]", _resolved(item, f"input[{at}]", earlier)) for at, item in enumerate(given)]


def _resolved(item: Any, path: str, earlier: EarlierAnswers) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise Refusal(400, f"`{path}` must be an item, which is an object")
    if item.get("type") != "item_reference":
        return item
    answer = answer_of(item)
    for known in (_conversation(earlier, f"resp_{answer}") if answer else None) or ():
        if known.get("id") == item.get("id"):
            return known
    raise Refusal(400, f"`{path}` refers to an item that is not known in this session: send the item itself")


def _conversation(earlier: EarlierAnswers, response: str) -> list[dict[str, Any]] | None:
    """The items up to the end of a response of this session."""
    conversation = earlier.get(response)
    items: list[dict[str, Any]] | None = json.loads(conversation) if isinstance(conversation, bytes) else None
    return items


def messages_of(instructions: Any, items: list[tuple[str, dict[str, Any]]], earlier: EarlierAnswers) -> list[Message]:
    """Instructions and items as chat messages. Raises `Refusal` for an item that has no form as chat."""
    if instructions is not None and not isinstance(instructions, str):
        raise Refusal(400, "`instructions` must be a text")
    conversation = Conversation(earlier)
    if instructions:
        conversation.system(instructions)
    for path, item in items:
        conversation.add(item, path)
    if not conversation.messages:
        raise Refusal(400, "`input` is empty: there is nothing to answer")
    return conversation.messages


class Conversation:
    """The messages of a conversation, from one item after another."""

    def __init__(self, earlier: EarlierAnswers) -> None:
        self.messages: list[Message] = []
        self._earlier = earlier
        self._called: set[str] = set()
        self._turns: dict[str, Message] = {}
        self._turn: Message | None = None
        self._turn_answer: str | None = None

    def add(self, item: dict[str, Any], path: str) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._message(item, path)
        elif kind == "function_call":
            self._call(item, path, _arguments(item, path))
        elif kind == "custom_tool_call":
            self._call(item, path, self._free_text(item, path))
        elif kind == "tool_search_call" and item.get("execution") == "client":
            self._call({**item, "name": TOOL_SEARCH}, path, self._search(item, path))
        elif kind == TOOL_SEARCH_OUTPUT and item.get("execution") == "client":
            self._output({**item, "output": _found_tools(item, path)}, path)
        elif kind == ADDITIONAL_TOOLS:
            pass  # `toolset` reads it
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._output(item, path)
        elif kind == "reasoning":
            self._reasoning(item, path)
        else:
            raise Refusal(400, f"`{path}.type` {kind!r} is not served here: it has no form as chat")

    def system(self, text: str) -> None:
        """Instructions before the first turn are one system message: many templates take only one, at the head."""
        self._turn = None
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += "\n\n" + text
        else:
            self.messages.append({"role": "system", "content": text})

    def _message(self, item: dict[str, Any], path: str) -> None:
        role, content = item.get("role"), item.get("content")
        if role not in ROLES:
            raise Refusal(400, f"`{path}.role` must be one of {', '.join(ROLES)}")
        if role == "user":
            self._turn = None
            self.messages.append({"role": "user", "content": _parts(content, f"{path}.content")})
        elif role == "assistant":
            self._assistant_text(item, _text(content, f"{path}.content", between=""))
        else:
            self.system(_text(content, f"{path}.content", between="\n"))

    def _assistant_text(self, item: dict[str, Any], text: str) -> None:
        turn = self._turn_of(item, joins=lambda turn: turn["content"] is None)
        turn["content"] = (turn["content"] or "") + text

    def _reasoning(self, item: dict[str, Any], path: str) -> None:
        text = _thought(item, path)
        if not text:
            return
        turn = self._turn_of(item, joins=lambda turn: turn["content"] is None and "tool_calls" not in turn)
        # vLLM 0.32 reads `reasoning`, SGLang and llama.cpp read `reasoning_content`.
        turn["reasoning"] = turn["reasoning_content"] = turn.get("reasoning", "") + text

    def _call(self, item: dict[str, Any], path: str, arguments: str) -> None:
        call_id, name = item.get("call_id"), item.get("name")
        if not isinstance(call_id, str) or not isinstance(name, str):
            raise Refusal(400, f"`{path}` must have a call_id and a name")
        turn = self._turn_of(item, joins=lambda turn: True)
        function = {"name": chat_name(name, item.get("namespace")), "arguments": arguments}
        turn.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        self._called.add(call_id)

    def _output(self, item: dict[str, Any], path: str) -> None:
        call_id = item.get("call_id")
        if not isinstance(call_id, str) or call_id not in self._called:
            raise Refusal(400, f"`{path}.call_id` {call_id!r} is the output of a call that is not in `input`")
        self._turn = None
        content = _parts(item.get("output"), f"{path}.output")
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _turn_of(self, item: dict[str, Any], joins: Callable[[Message], bool]) -> Message:
        """The assistant's message that an item belongs to: that of its answer, else the open one that it `joins`."""
        answer = answer_of(item)
        if answer is not None and answer in self._turns and self._only_outputs_since(self._turns[answer]):
            self._turn = self._turns[answer]
            self._turn_answer = answer
            return self._turn
        apart = answer is not None and self._turn_answer is not None  # two answers are two messages
        if self._turn is None or apart or not joins(self._turn):
            self._turn = {"role": "assistant", "content": None}
            self._turn_answer = None
            self.messages.append(self._turn)
        if answer is not None:
            self._turns[answer] = self._turn
            self._turn_answer = answer
        return self._turn

    def _only_outputs_since(self, turn: Message) -> bool:
        after = self.messages[self._place(turn) + 1 :]
        return all(message["role"] == "tool" for message in after)

    def _place(self, turn: Message) -> int:
        return next(at for at in range(len(self.messages) - 1, -1, -1) if self.messages[at] is turn)

    def _search(self, item: dict[str, Any], path: str) -> str:
        """The arguments of a tool search: as the model wrote them, where the session still has them."""
        given = item.get("arguments")
        sampled = self._earlier.get(arguments_name(str(item.get("call_id"))))
        if isinstance(sampled, str) and parsed(sampled) == given:
            return sampled
        return given if isinstance(given, str) else json.dumps({} if given is None else given, ensure_ascii=False)

    def _free_text(self, item: dict[str, Any], path: str) -> str:
        """The arguments that the model wrote for a custom call, where the session still has them; else rewritten."""
        text = item.get("input")
        if not isinstance(text, str):
            raise Refusal(400, f"`{path}.input` must be a text")
        sampled = self._earlier.get(arguments_name(str(item.get("call_id"))))
        return sampled if isinstance(sampled, str) and free_text(sampled) == text else as_arguments(text)


def _found_tools(item: dict[str, Any], path: str) -> str:
    """What a tool search found, as the agent wrote it; `toolset` makes functions of it."""
    if not isinstance(item.get("tools"), list):
        raise Refusal(400, f"`{path}.tools` must be a list of tools")
    return json.dumps(item["tools"], ensure_ascii=False)


def _arguments(item: dict[str, Any], path: str) -> str:
    """The arguments unchanged, even where they are not JSON: the engine decides what to make of them."""
    arguments = item.get("arguments")
    if arguments is None or arguments == "":
        return "{}"  # llama.cpp refuses an empty text, vLLM takes it for this
    if isinstance(arguments, str):
        return arguments
    raise Refusal(400, f"`{path}.arguments` must be a text: the call's arguments as JSON")


def _thought(item: dict[str, Any], path: str) -> str:
    """The reasoning in an item: as it was carried, else its text, else its summary."""
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and sealed.startswith(_CARRIED):
        try:
            return base64.b64decode(sealed[len(_CARRIED) :], validate=True).decode("utf-8", "surrogatepass")
        except (binascii.Error, UnicodeDecodeError):
            raise Refusal(400, f"`{path}.encrypted_content` is broken: it does not read as it was handed out") from None
    for field, between in (("content", ""), ("summary", "\n\n")):
        if item.get(field):
            return _text(item[field], f"{path}.{field}", between)
    if sealed:
        raise Refusal(
            400, f"`{path}.encrypted_content` was not made here and cannot be read: leave the reasoning item out"
        )
    return ""


def _text(content: Any, path: str, between: str) -> str:
    """Text of content that may hold nothing else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal(400, f"`{path}` must be a text or a list of parts")
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if (kind not in _TEXTS and kind != "refusal") or not isinstance(text, str):
            raise Refusal(400, f"`{path}[{at}].type` {kind!r} is not served here: only text has a form as chat")
        texts.append(text)
    return between.join(texts)


def _parts(content: Any, path: str) -> Any:
    """Content as chat has it: a text where it is only one, else parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal(400, f"`{path}` must be a text or a list of parts")
    parts = [_part(part, f"{path}[{at}]") for at, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts) and len(parts) < 2:
        return parts[0]["text"] if parts else ""
    return parts


def _part(part: Any, path: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "input_image":
        url = part.get("image_url")
        if not isinstance(url, str):
            raise Refusal(400, f"`{path}.image_url` must be an address or a data URL: no files are kept here")
        image = {"url": url}
        if part.get("detail") not in (None, "auto"):
            image["detail"] = part["detail"]
        return {"type": "image_url", "image_url": image}
    if kind == "input_audio" and isinstance(part.get("input_audio"), dict):
        return {"type": "input_audio", "input_audio": part["input_audio"]}
    raise Refusal(400, f"`{path}.type` {kind!r} is not served here: it has no form as chat")
