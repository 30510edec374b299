"""Tool calls of a stream, put together from their fragments: the one rule for which call a fragment belongs to.

Engines number their calls by `index`; some APIs give every call index 0, some no index, some no id, or "" for one. The
record (`capture.assemble`) and every dialect of the proxy use this rule, so that all of them tell the same calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from capture.chat.surrogates import join_pairs

_MARKS: Final = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)


class ToolCall:
    """One call. `id` is the engine's, None where it gave none; `fields` and `function` hold what else it brought."""

    __slots__ = ("_scan", "_scanned", "fields", "function", "id", "index", "name", "pieces", "value")

    def __init__(self, index: int) -> None:
        self.index = index
        self.id: Any = None
        self.name: str | None = None
        self.fields: dict[str, Any] = {"type": "function"}
        self.function: dict[str, Any] = {}
        self.pieces: list[str] = []
        #: Arguments that came as an object where a string belongs.
        self.value: Any = None
        self._scan = _JsonScan()
        self._scanned = 0

    @property
    def arguments(self) -> str:
        """The arguments as text, as they were sampled."""
        return join_pairs("".join(self.pieces)) if self.value is None else json.dumps(self.value)

    def is_whole(self) -> bool:
        """Whether the arguments are a JSON object or array that has ended, so that nothing can follow. Linear in the
        arguments, however often it is asked."""
        for piece in self.pieces[self._scanned :]:
            self._scan.feed(piece)
        self._scanned = len(self.pieces)
        return self._scan.ended or self.value is not None

    def json(self) -> dict[str, Any]:
        """The call as a completed chat message has it."""
        arguments = join_pairs("".join(self.pieces)) if self.value is None else self.value
        function = {"arguments": arguments, **({} if self.name is None else {"name": self.name}), **self.function}
        return {"id": self.id, **self.fields, "function": function}


class ToolCalls:
    """The calls of one message, in the order in which they were opened."""

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []
        self._last: dict[int | None, ToolCall] = {}  # by index; under None the last of all
        self._by_id: dict[tuple[int | None, str], ToolCall] = {}

    def add(self, fragments: Any) -> Iterator[tuple[ToolCall, str]]:
        """Takes the `tool_calls` of one delta; gives each call that it opens or continues, and the new piece of its
        arguments. What is not of the expected shape is passed over."""
        first = True
        for fragment in fragments if isinstance(fragments, list) else ():
            if isinstance(fragment, dict):
                yield self._add(fragment, first)
                first = False

    def _add(self, fragment: dict[str, Any], first: bool) -> tuple[ToolCall, str]:
        given = fragment.get("function")
        function: dict[str, Any] = given if isinstance(given, dict) else {}
        call = self._call_of(fragment, function, first)
        for name, value in fragment.items():
            if name == "id":
                self._identify(call, value)
            elif name not in ("index", "function") and not is_absent(value):
                call.fields[name] = value
        piece = ""
        for name, value in function.items():
            if name == "arguments":
                piece = self._arguments(call, value)
            elif name == "name":
                if isinstance(value, str) and value and value != call.name:  # some engines repeat it in every fragment
                    call.name = (call.name or "") + value
            elif not is_absent(value):
                call.function[name] = value
        return call, piece

    def _arguments(self, call: ToolCall, value: Any) -> str:
        if isinstance(value, str):
            if value:
                call.pieces.append(value)
            return value
        if value is None:
            return ""
        call.value = value  # an object where a string belongs: kept as the engine sent it
        return json.dumps(value)

    def _call_of(self, fragment: dict[str, Any], function: dict[str, Any], first: bool) -> ToolCall:
        index, call_id = fragment.get("index"), fragment.get("id")
        index = index if type(index) is int else None
        found = self._open(index, None if is_absent(call_id) else call_id, bool(function.get("name")))
        if found is not None and index is None and is_absent(call_id) and function.get("name") and not first:
            found = None  # two calls of one delta, without index and id
        if found is None or _begins_another(found, function):
            found = ToolCall(len(self.calls) if index is None else index)
            self.calls.append(found)
            self._last[found.index] = self._last[None] = found
        return found

    def _identify(self, call: ToolCall, value: Any) -> None:
        if not is_absent(value):
            call.id = value if call.id is None else call.id
            self._by_id[call.index, str(value)] = self._by_id[None, str(value)] = call

    def _open(self, index: int | None, call_id: Any, named: bool) -> ToolCall | None:
        """The call with this index, else (where there is none) with this id, else the last one; None for a new one."""
        last = self._last.get(index)
        if call_id is None or last is None:
            return last
        same = self._by_id.get((index, str(call_id)))
        if same is not None or last.id is None:
            return same or last
        # A new id that brings a name opens a call, also under an index that is taken. vLLM before 0.7 gave every
        # fragment a new id, but the name to the first alone.
        return last if index is not None and not named else None


def with_call_ids(body: dict[str, Any], ids: Sequence[str]) -> dict[str, Any]:
    """A completed chat body whose first message's tool calls have these ids; `body` itself is not changed.

    For agents that got other ids than the engine's, which left them out or repeated them.
    """
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    message = choice.get("message")
    if not isinstance(message, dict):
        return body
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or len(calls) != len(ids) or not all(isinstance(call, dict) for call in calls):
        return body
    renamed = [{**call, "id": call_id} for call, call_id in zip(calls, ids, strict=True)]
    return {**body, "choices": [{**choice, "message": {**message, "tool_calls": renamed}}]}


def _begins_another(call: ToolCall, function: dict[str, Any]) -> bool:
    """Whether a fragment that brings a name belongs to another call than the one that has its index and id."""
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name or call.name is None:
        return False
    if name != call.name:  # names in pieces come before any arguments
        return bool(call.pieces) or arguments is not None
    started = arguments.lstrip().startswith("{") if isinstance(arguments, str) else arguments is not None
    return started and call.is_whole()


def is_absent(value: Any) -> bool:
    """Some engines and gateways write "" where there is nothing."""
    return value is None or value == ""


class _JsonScan:
    """Finds the end of the object or array with which a text begins."""

    __slots__ = ("_depth", "_escaped", "_in_string", "ended")

    def __init__(self) -> None:
        self.ended = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> None:
        for mark in _MARKS.finditer(text, 1 if self._escaped and text else 0):
            sign = mark[0]
            if self._in_string:
                self._in_string = sign != '"'
            elif sign == '"':
                self._in_string = True
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
                self.ended = self.ended or self._depth == 0
        self._escaped = self._in_string and _ends_in_escape(text, self._escaped)


def _ends_in_escape(text: str, escaped: bool) -> bool:
    """Whether the last character of a string's piece escapes the first of the next one."""
    body = text[1:] if escaped else text
    return (len(body) - len(body.rstrip("\\"))) % 2 == 1
