"""JSON and JSON Lines files of a job folder: written atomically as strict JSON, read as others wrote them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from capture import json
from capture.errors import FileFormatError, JournalError, JsonError


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a file so that a reader sees the old one or the whole new one. Raises `JournalError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, temp_path = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.fchmod(file.fileno(), 0o644)
            Path(temp_path).replace(path)
        except BaseException:
            Path(temp_path).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise JournalError(f"cannot write {path}: {error.strerror}") from error


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON, atomically."""
    write_atomic(path, json.dumps(value, orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def read_json(path: Path) -> Any:
    """The JSON of a file. Raises `FileFormatError` (not JSON) or `JournalError` (cannot be read)."""
    try:
        return json.loads(path.read_bytes())
    except JsonError as error:
        raise FileFormatError(f"{path} is not valid JSON ({error})") from error
    except OSError as error:
        raise JournalError(f"cannot read {path}: {error.strerror}") from error


def write_jsonl(path: Path, rows: list[Any]) -> None:
    """Writes `rows` as a JSON Lines file, atomically, replacing what was there."""
    write_atomic(path, b"".join(json.dumps(row, orjson.OPT_APPEND_NEWLINE) for row in rows))


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
                    row = json.loads(line)
                except JsonError as error:
                    raise FileFormatError(f"{path}: line {number + 1}: invalid JSON: {error}") from error
                if not isinstance(row, dict):
                    raise FileFormatError(f"{path}: line {number + 1}: top-level record must be an object")
                yield number, row
    except OSError as error:
        raise JournalError(f"cannot read {path}: {error.strerror}") from error
