"""One line of a journal as a call: its parts are parsed on first use, its ids not at all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from capture import json
from capture.errors import FileFormatError, RecordError
from capture.record import SCHEMA_VERSION, Completion, Ids, TokenCapture


class Known:
    """The last prompts that were read from a journal. Where a prompt starts with one of them, only the rest is checked.

    A prompt grows call by call, so almost all of it has been checked before.
    """

    KEPT = 4

    def __init__(self) -> None:
        self._prompts: list[Ids] = []

    def parse(self, text: bytes) -> Ids | None:
        """`Ids.parse` of the inside of an array, at the cost of the new ids only."""
        for position, before in enumerate(self._prompts):
            new = Ids.going_on(text, before)
            if new is not None:
                self._prompts[position] = new
                return new
        found = Ids.parse_text(text)
        if found:
            self._prompts = [found, *self._prompts[: self.KEPT - 1]]
        return found


class _CompletionLine(msgspec.Struct):
    index: Any = None
    token_ids: msgspec.Raw = msgspec.Raw(b"null")
    tokens: msgspec.Raw = msgspec.Raw(b"null")
    logprobs: Any = None
    top_logprobs: msgspec.Raw = msgspec.Raw(b"null")
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"null")


class _CaptureLine(msgspec.Struct):
    schema_version: Any = None
    wire: Any = None
    provider: Any = None
    requested: Any = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"null")
    completions: list[_CompletionLine] = []
    unavailable: Any = None
    digest: Any = None


class _MetadataLine(msgspec.Struct):
    token_capture: _CaptureLine | None = None


class _TokenInLine(msgspec.Struct):
    mode: Any = None
    bridged: Any = None
    reason: Any = None
    detail: Any = None
    continues: Any = None
    rendered_prompt_token_ids: msgspec.Raw = msgspec.Raw(b"null")


class _BridgedLine(msgspec.Struct):
    token_in: _TokenInLine | None = None


class _BodyLine(msgspec.Struct):
    tools: msgspec.Raw = msgspec.Raw(b"null")


class _RequestLine(msgspec.Struct):
    body: _BodyLine | None = None


class _Line(msgspec.Struct):
    request: msgspec.Raw = msgspec.Raw(b"null")
    response: msgspec.Raw = msgspec.Raw(b"null")
    duration_ms: Any = None
    metadata: msgspec.Raw = msgspec.Raw(b"null")


#: Arrays of prompt ids longer than this (bytes) are cut out before the line is parsed.
CUT_ABOVE = 2048
PLACEHOLDER = b'"\\u0000cut"'

_line = msgspec.json.Decoder(_Line)
_metadata = msgspec.json.Decoder(_MetadataLine)
_bridged = msgspec.json.Decoder(_BridgedLine)
_request = msgspec.json.Decoder(_RequestLine)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class TokenIn:
    """What a call's record says about token-in. `rendered`: the prompt that the template makes of its messages, where
    it was bridged and that differs.
    """

    mode: str
    bridged: bool
    reason: str | None
    detail: str | None
    continues: int | None
    rendered: Ids | None


class Call:
    """One line of a journal. Its parts are parsed on first use."""

    def __init__(self, line: int, raw: bytes, offset: int = 0, known: Known | None = None) -> None:
        """`line` is the 0-based line number, `offset` the byte at which the line starts.

        Raises `FileFormatError` when `raw` is not a JSON object.
        """
        self.line = line
        self.raw = raw
        self.offset = offset
        self._known = known or Known()
        self._prompt: bytes | None = None
        try:
            if not raw.isascii():
                raw.decode()  # msgspec skips what it need not parse, invalid UTF-8 included
            self._parts = self._decode()
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FileFormatError(f"not a JSON object ({error})") from error

    def _decode(self) -> _Line:
        """The line's parts. The prompt's ids, nearly all of a line, are cut out as bytes first and never tokenized as
        JSON; inside a string their key could not stand like this, its quotes would be escaped.
        """
        start, end = _prompt_array(self.raw)
        if start < 0 or end - start < CUT_ABOVE:
            return _line.decode(self.raw)
        try:
            view = memoryview(self.raw)
            parts = _line.decode(b"".join((view[:start], PLACEHOLDER, view[end + 1 :])))
        except msgspec.DecodeError:
            return _line.decode(self.raw)  # a list in the list, or a line that is torn
        if PLACEHOLDER not in bytes(parts.metadata):
            return _line.decode(self.raw)  # a field of that name stood somewhere else
        self._prompt = self.raw[start + 1 : end]
        return parts

    @cached_property
    def request(self) -> dict[str, Any]:
        """`{timestamp, method, path, headers, body}`."""
        return _object(self._parts.request)

    @cached_property
    def response(self) -> dict[str, Any]:
        """`{timestamp, status_code, headers, body}`."""
        return _object(self._parts.response)

    @property
    def request_body(self) -> dict[str, Any]:
        return json.as_object(self.request.get("body"))

    @property
    def response_body(self) -> dict[str, Any]:
        return json.as_object(self.response.get("body"))

    @property
    def offers_tools(self) -> bool:
        """Whether the request names tools; the rest of it is not parsed."""
        try:
            body = _request.decode(self._parts.request).body
        except msgspec.DecodeError:
            return False
        tools = b"" if body is None else bytes(body.tools).strip()
        return tools.startswith(b"[") and bool(tools.strip(b"[] \t\r\n"))

    @property
    def duration_ms(self) -> float | None:
        value = self._parts.duration_ms
        return float(value) if isinstance(value, int | float) else None

    @property
    def status_code(self) -> int:
        """0 when the line has none."""
        value = self.response.get("status_code")
        return value if isinstance(value, int) else 0

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """All of the metadata but `token_capture` and `token_in`, which have properties of their own."""
        try:
            fields = _fields.decode(self._parts.metadata)
        except msgspec.DecodeError:
            return {}
        for name in ("token_capture", "token_in"):
            fields.pop(name, None)
        return {name: _part(value) for name, value in fields.items()}

    @property
    def own_number(self) -> int | None:
        """The call's place in the order the calls began, from 0, as its writer numbered it; None where it did not."""
        value = self.metadata.get("call")
        return value if type(value) is int and 0 <= value < 2**63 else None

    @property
    def number(self) -> int:
        """`own_number`, or the line's number."""
        number = self.own_number
        return self.line if number is None else number

    @property
    def outcome(self) -> str:
        """`ok`, `error`, `aborted`, `truncated`, or `ended` by a budget; by the status where the writer did not say."""
        value = self.metadata.get("outcome")
        return value if isinstance(value, str) else ("ok" if self.status_code == 200 else "error")

    @property
    def purpose(self) -> str:
        value = self.metadata.get("call_purpose")
        return value if isinstance(value, str) else "agent"

    @property
    def engine(self) -> str | None:
        value = self.metadata.get("engine")
        if isinstance(value, str):
            return value
        try:
            return self.capture.provider if self.capture else None
        except RecordError:  # who reads the capture is told
            return None

    @cached_property
    def token_in(self) -> TokenIn | None:
        """What token-in did with the call; None where it was off. Ids stay text."""
        try:
            found = _bridged.decode(self._parts.metadata).token_in
        except msgspec.DecodeError:
            return None
        if found is None:
            return None
        return TokenIn(
            mode=str(found.mode),
            bridged=found.bridged is True,
            reason=found.reason if isinstance(found.reason, str) else None,
            detail=found.detail if isinstance(found.detail, str) else None,
            continues=found.continues if isinstance(found.continues, int) else None,
            rendered=Ids.parse(bytes(found.rendered_prompt_token_ids)),
        )

    @cached_property
    def capture(self) -> TokenCapture | None:
        """The call's token capture; None when capture was off. Ids stay text until they are used.

        Raises `RecordError` for a capture that this version cannot read.
        """
        try:
            found = _metadata.decode(self._parts.metadata).token_capture
        except msgspec.DecodeError:
            # Of another shape than a writer of this schema makes: let the tolerant reader say what is wrong.
            if self._prompt is not None:
                return Call._uncut(self).capture
            metadata = _part(self._parts.metadata)
            value = metadata.get("token_capture") if isinstance(metadata, dict) else None
            return None if value is None else TokenCapture.from_json(value)
        if found is None:
            return None
        if found.schema_version != SCHEMA_VERSION:
            raise RecordError(
                f"token_capture has schema_version {found.schema_version!r}; this version reads {SCHEMA_VERSION!r}"
            )
        prompt = bytes(found.prompt_token_ids)
        if self._prompt is None:
            prompt_ids = Ids.parse(prompt)
        elif prompt == PLACEHOLDER:
            prompt_ids = self._known.parse(self._prompt)
        else:  # it stood in a choice: the line as it is says where
            return Call._uncut(self).capture
        return TokenCapture.read(
            wire=found.wire,
            provider=found.provider,
            requested=found.requested,
            prompt_token_ids=prompt_ids,
            completions=[
                Completion(
                    index=row.index if isinstance(row.index, int) else position,
                    token_ids=Ids.parse(bytes(row.token_ids)),
                    tokens=_part(row.tokens),
                    logprobs=row.logprobs if isinstance(row.logprobs, list) else None,
                    top_logprobs=_part(row.top_logprobs),
                    prompt_token_ids=Ids.parse(bytes(row.prompt_token_ids)),
                )
                for position, row in enumerate(found.completions)
            ],
            unavailable=found.unavailable,
            digest=found.digest,
        )

    def _uncut(self) -> Call:
        call = Call.__new__(Call)
        call.line, call.raw, call.offset, call._known, call._prompt = self.line, self.raw, self.offset, Known(), None
        call._parts = _line.decode(self.raw)
        return call


def _prompt_array(raw: bytes) -> tuple[int, int]:
    """Where the array of the capture's prompt ids opens and closes in a line; -1 for the first where it is not found.

    Searched from the end, where the writers put the choices behind it; single bytes are found a hundred times faster
    than words.
    """
    end = raw.rfind(b"]", 0, max(raw.rfind(b'"completions":'), 0))
    start = raw.rfind(b"[", 0, max(end, 0))
    if start < 0 or not raw[max(start - 24, 0) : start].rstrip(b" ").endswith(b'"prompt_token_ids":'):
        start = raw.find(b'"prompt_token_ids":', max(raw.find(b'"token_capture":'), 0))
        start = raw.find(b"[", start, start + 21) if start > 0 else -1
        end = raw.find(b"]", start)
    return start, end


def _part(raw: msgspec.Raw) -> Any:
    return json.loads_or_none(bytes(raw))


def _object(raw: msgspec.Raw) -> dict[str, Any]:
    return json.as_object(_part(raw))
