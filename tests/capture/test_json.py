"""JSON that others wrote: what strict JSON does not have is read as it says, and stored as strict JSON."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import orjson
import pytest

from capture import json
from capture.errors import JsonError
from capture.journal.files import read_json, read_jsonl, write_json, write_jsonl


def nested(levels: int, leaf: Any = 0) -> Any:
    for _ in range(levels):
        leaf = [leaf]
    return leaf


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'"\\ud83d"', "\ud83d"),
        (b'"\\ud83d\\ude00"', "😀"),
        (b'{"\\udc00": 1}', {"\udc00": 1}),
        (b"123456789012345678901234567890", 123456789012345678901234567890),
        (b"-9223372036854775809", -9223372036854775809),
        (b"[Infinity, -Infinity, 1e400]", [math.inf, -math.inf, math.inf]),
        (b'{"a": 1, "a": 2}', {"a": 2}),
        ("[1.0]", [1.0]),
        (b"[" * 500 + b"0" + b"]" * 500, nested(500)),
    ],
)
def test_what_others_write_is_read_as_it_says(text: bytes | str, value: Any) -> None:
    assert json.loads(text) == value
    stored = json.dumps(value)
    assert orjson.loads(stored) is not None or value is None


def test_a_big_integer_is_not_a_float() -> None:
    assert type(json.loads(b"18446744073709551616")) is int


@pytest.mark.parametrize(
    "text", [b"", b"{", b"nan", b'"\xff"', b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b"1 2"]
)
def test_what_is_not_json_is_one_error(text: bytes) -> None:
    with pytest.raises(JsonError):
        json.loads(text)
    assert json.loads_or_none(text) is None


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ("\ud83d", b'"\\\\ud83d"'),
        ("\ud83d\ude00", '"😀"'.encode()),
        ({"name\udcff": ["\udc00"]}, b'{"name\\\\udcff":["\\\\udc00"]}'),
        (2**64, b"18446744073709551616"),
        ([-(2**63) - 1], b"[-9223372036854775809]"),
        (math.nan, b"null"),
        ([math.inf, "\ud800"], b'[null,"\\\\ud800"]'),
        ((1, {2}), b'[1,"{2}"]'),
        (Path("/a"), b'"/a"'),
    ],
)
def test_what_is_stored_is_strict(value: Any, stored: bytes) -> None:
    assert json.dumps(value) == stored
    orjson.loads(stored)


def test_deep_nesting_is_stored_up_to_a_bound() -> None:
    for levels in (300, 900):
        stored = json.dumps(nested(levels))
        assert json.TOO_DEEP.encode() in stored
        orjson.loads(stored)


def test_what_came_in_is_passed_on_as_it_came() -> None:
    text = b'{"a":"\\ud83d","b":NaN,"c":18446744073709551616}'
    with pytest.raises(JsonError):
        json.loads_strict(text)
    assert json.dumps_as_read(json.loads(text)) == text
    with pytest.raises(JsonError):
        json.dumps_as_read(nested(100_000))


def test_files_contain_what_an_agent_put_into_them(tmp_path: Path) -> None:
    row = {"text": "\udcff", "big": 10**40, "deep": nested(400), "reward": math.nan}
    write_json(tmp_path / "a.json", row)
    write_jsonl(tmp_path / "a.jsonl", [row, row])
    read = read_json(tmp_path / "a.json")
    assert (read["text"], read["big"], read["reward"]) == ("\\udcff", 10**40, None)
    assert [found for _, found in read_jsonl(tmp_path / "a.jsonl")] == [read, read]
