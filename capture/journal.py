"""The append-only journal of calls, `llm_trajectory.jsonl`: written one whole line at a time, read lazily.

A line is one call. The writer never touches what it wrote; a line torn by a crash stays where it is and the reader
reports it. This is the only module of `capture` that opens files.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import orjson

from capture.errors import FileFormatError, JournalClosed, JournalError, RecordError
from capture.record import SCHEMA_VERSION, Completion, Ids, TokenCapture

#: The number of a call in a line's metadata. Inside a string its quotes would be escaped.
_CALL = re.compile(rb'"call":(\d{1,9})[,}]')


class JournalWriter:
    """Appends whole lines to one journal, one `write` a line; a second writer of the same file is refused.

    With `fsync`, `append` returns when the line is on the disk; without, when the operating system holds it, which
    survives a `kill -9` but not a power cut.
    """

    def __init__(self, path: Path, *, fsync: bool = False) -> None:
        """Opens (and where needed creates) the journal. Raises `JournalError`."""
        self.path = path
        self.fsync = fsync
        self.lines = 0
        #: One more than the highest number of a call that is in the file already: a journal goes on after a restart.
        self.next_call = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise JournalError(
                f"cannot open the journal {path}: {error.strerror}; give a folder that can be written"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._begin_on_a_fresh_line()
        except BlockingIOError as error:
            os.close(self._fd)
            raise JournalError(f"another process writes the journal {path}; a journal has one writer") from error
        except OSError as error:
            os.close(self._fd)
            raise JournalError(f"cannot use the journal {path}: {error.strerror}") from error

    def _begin_on_a_fresh_line(self) -> None:
        """After a crash the last line may have no end: what comes next must not be glued to it, nor have its number."""
        size = os.fstat(self._fd).st_size
        if size:
            with mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ) as written:
                self.next_call = 1 + max((int(found[1]) for found in _CALL.finditer(written)), default=-1)
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def append(self, line: bytes) -> None:
        """Writes `line` (no newline in it) and its newline. Raises `JournalError`; the file then ends as it did before.

        Blocks for as long as the disk takes: for long lines call it off the event loop.
        """
        if self._fd < 0:
            raise JournalClosed(f"the journal {self.path} is sealed")
        data = line + b"\n"
        before = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, data)
            while written < len(data):  # a signal, or a disk that is nearly full
                written += os.write(self._fd, data[written:])
            if self.fsync:
                os.fdatasync(self._fd)
        except OSError as error:
            with suppress(OSError):  # a part of a line is no record: take it back, we are the only writer
                os.ftruncate(self._fd, before)
            raise JournalError(f"cannot write the journal {self.path}: {error.strerror}") from error
        if not self._in_place():
            raise JournalError(
                f"the journal {self.path} was deleted or moved while it was being written; what is recorded from now "
                "on is not at its path"
            )
        self.lines += 1

    def _in_place(self) -> bool:
        """Whether the file that is being written is the one that a reader finds at the path."""
        try:
            there = os.stat(self.path)  # noqa: PTH116 (a call of the hot path)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self._fd))

    def close(self) -> None:
        """Seals the journal: synced to disk, closed; further lines are refused. May be called twice."""
        if self._fd < 0:
            return
        with suppress(OSError):
            os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1


@dataclass(frozen=True, slots=True)
class Problem:
    """A line of a journal that is no call: its 0-based number, and a sentence that says what is wrong."""

    line: int
    what: str


class JournalReader:
    """Iterates the calls of a journal in file order, a line in memory at a time.

    A line that is no JSON object is left out and stands in `problems` after the iteration: nothing is skipped silently.
    Raises `JournalError` when the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[Problem] = []
        self._known = Known()

    def __iter__(self) -> Iterator[Call]:
        self.problems = []
        offset = 0
        try:
            with self.path.open("rb", buffering=1 << 20) as file:
                for number, raw in enumerate(file):
                    if not raw.isspace():
                        call = self._call(number, raw, offset)
                        if call is not None:
                            yield call
                    offset += len(raw)
                    if not raw.endswith(b"\n"):
                        break  # the end as it was when we came there; a writer may be going on behind it
        except OSError as error:
            raise JournalError(f"cannot read the journal {self.path}: {error.strerror}") from error

    def at(self, line: int, offset: int) -> Call:
        """The call that begins `offset` bytes into the file, again. Raises `JournalError`, `FileFormatError`."""
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                return Call(line, file.readline(), offset, self._known)
        except OSError as error:
            raise JournalError(f"cannot read the journal {self.path}: {error.strerror}") from error

    def _call(self, number: int, raw: bytes, offset: int) -> Call | None:
        try:
            return Call(number, raw, offset, self._known)
        except FileFormatError as error:
            torn = not raw.endswith(b"\n")
            what = "the last line was cut off while it was being written" if torn else str(error)
            self.problems.append(Problem(number, f"line {number + 1}: {what}; it is left out"))
            return None


class Known:
    """The last prompts of a journal that were read: where a prompt begins with one of them, only the rest is checked.

    A prompt grows call by call, so almost all of it has been looked at before.
    """

    KEPT = 4

    def __init__(self) -> None:
        self._prompts: list[Ids] = []

    def parse(self, text: bytes) -> Ids | None:
        """`Ids.parse` of the inside of an array, at the price of the ids that are new."""
        for position, before in enumerate(self._prompts):
            if not text.startswith(before.text):
                continue
            end = len(before.text)
            if len(text) == end:
                return before
            # The text must go on with a whole id: `1,2` does not begin `1,23`.
            tail = Ids.parse_text(text[end + 1 :]) if text[end : end + 1] == b"," else None
            if tail and len(tail.text) == len(text) - end - 1:
                self._prompts[position] = new = Ids(text)
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
_request = msgspec.json.Decoder(_RequestLine)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Call:
    """One line of a journal. Its parts are parsed when they are asked for."""

    def __init__(self, line: int, raw: bytes, offset: int = 0, known: Known | None = None) -> None:
        """`line` is the 0-based number in the file, `offset` where it begins there, in bytes.

        Raises `FileFormatError` when `raw` is no JSON object.
        """
        self.line = line
        self.raw = raw
        self.offset = offset
        self._known = known or Known()
        self._prompt: bytes | None = None
        try:
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
        return _dict(self.request.get("body"))

    @property
    def response_body(self) -> dict[str, Any]:
        return _dict(self.response.get("body"))

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
        """All of the metadata but `token_capture`, which `capture` reads."""
        try:
            fields = _fields.decode(self._parts.metadata)
        except msgspec.DecodeError:
            return {}
        fields.pop("token_capture", None)
        return {name: _loads(value) for name, value in fields.items()}

    @property
    def number(self) -> int:
        """The call's place in the order the calls began; the line's number where the writer did not say."""
        value = self.metadata.get("call")
        return value if isinstance(value, int) else self.line

    @property
    def outcome(self) -> str:
        """`ok`, `error`, `aborted` or `truncated`; told from the status where the writer did not say."""
        value = self.metadata.get("outcome")
        return value if isinstance(value, str) else ("ok" if self.status_code == 200 else "error")

    @property
    def purpose(self) -> str:
        value = self.metadata.get("call_purpose")
        return value if isinstance(value, str) else "agent"

    @property
    def engine(self) -> str | None:
        value = self.metadata.get("engine")
        return value if isinstance(value, str) else (self.capture.provider if self.capture else None)

    @cached_property
    def capture(self) -> TokenCapture | None:
        """The call's token capture; None when the call was made without. Ids stay text until they are asked for.

        Raises `RecordError` for a capture that this version cannot read.
        """
        try:
            found = _metadata.decode(self._parts.metadata).token_capture
        except msgspec.DecodeError:
            # Of another shape than a writer of this schema makes: let the tolerant reader say what is wrong.
            if self._prompt is not None:
                return Call._uncut(self).capture
            metadata = _loads(self._parts.metadata)
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
                    tokens=_loads(row.tokens),
                    logprobs=row.logprobs if isinstance(row.logprobs, list) else None,
                    top_logprobs=_loads(row.top_logprobs),
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


def _loads(raw: msgspec.Raw) -> Any:
    return orjson.loads(memoryview(raw))


def _object(raw: msgspec.Raw) -> dict[str, Any]:
    return _dict(_loads(raw))


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a file so that a reader sees the old one or the whole new one. Raises `JournalError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.fchmod(file.fileno(), 0o644)
            Path(beside).replace(path)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise JournalError(f"cannot write {path}: {error.strerror}") from error


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON, atomically."""
    write_atomic(path, orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def read_json(path: Path) -> Any:
    """The JSON of a file. Raises `FileFormatError` (not JSON) or `JournalError` (cannot be read)."""
    try:
        return orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise FileFormatError(f"{path} is not valid JSON ({error})") from error
    except OSError as error:
        raise JournalError(f"cannot read {path}: {error.strerror}") from error


def write_jsonl(path: Path, rows: list[Any]) -> None:
    """Writes `rows` as a JSON Lines file, atomically, replacing what was there."""
    write_atomic(path, b"".join(orjson.dumps(row) + b"\n" for row in rows))


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON Lines file with their 0-based line numbers, one in memory at a time.

    Raises `FileFormatError` for a line that is no JSON object, `JournalError` when the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file):
                if line.isspace():
                    continue
                try:
                    row = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    raise FileFormatError(f"{path}: line {number + 1}: invalid JSON: {error}") from error
                if not isinstance(row, dict):
                    raise FileFormatError(f"{path}: line {number + 1}: top-level record must be an object")
                yield number, row
    except OSError as error:
        raise JournalError(f"cannot read {path}: {error.strerror}") from error
