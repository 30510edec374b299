"""Rows whose columns get their type late: `datasets.load_dataset` takes the types from the first 10 MiB of a file."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.json
import pytest

from tests.train.build import Line, conversation, make_job
from tests.train.conversion import options
from tests.train.tool_calls import ARGUMENTS, BASH, SUFFIX, WRITE, answered, call_message, tool_rollout
from train.groups.groups import GroupOptions
from train.rows.column_types import CHUNK, ColumnTypes
from train.rows.convert import convert
from train.rows.formats import NAMES, find_format
from train.rows.formats.prime_sft import FORMAT
from train.rows.validate import validate
from train.rows.writers import JsonlWriter

#: `EARLY` rows of this are more than the first 10 MiB of a file.
PAD = "word " * 200_000
EARLY = 12


def loads(path: Path) -> list[str]:
    """What `load_dataset("json")` cannot cast: fields of a later chunk that the first has not, or has as null."""
    data = path.read_bytes()
    cut = data.find(b"\n", CHUNK) + 1
    read = pa.json.ReadOptions(block_size=1 << 28)
    first, later = (pa.json.read_json(io.BytesIO(part), read_options=read).schema for part in (data[:cut], data[cut:]))
    return [field.name for field in later if not fits(first, field)]


def fits(first: Any, field: Any) -> bool:
    if first.get_field_index(field.name) < 0:
        return False
    ours, theirs = first.field(field.name).type, field.type
    while pa.types.is_list(ours) and pa.types.is_list(theirs):
        ours, theirs = ours.value_type, theirs.value_type
    if pa.types.is_struct(theirs) and pa.types.is_struct(ours):
        return all(
            fits(pa.schema([ours.field(at) for at in range(ours.num_fields)]), theirs.field(at))
            for at in range(theirs.num_fields)
        )
    casts = (pa.types.is_floating(ours) and pa.types.is_integer(theirs)) or (
        pa.types.is_string(ours) and pa.types.is_timestamp(theirs)
    )
    return bool(ours == theirs or pa.types.is_null(theirs) or casts)


def padded(calls: list[Line]) -> list[Line]:
    """The calls, with a first message of a megabyte."""
    for call in calls:
        call["request"]["body"]["messages"][0]["content"] += PAD
    return calls


def plain_calls() -> list[Line]:
    return padded(conversation(1))


def tool_calls(arguments: dict[str, Any] = ARGUMENTS) -> list[Line]:
    calls = tool_rollout([WRITE, BASH])
    answered(calls[1], call_message("bash", arguments, "call_2"), [WRITE, BASH])
    return padded(calls)


FIRST: dict[str, Any] = {"reward": None}
LATE: dict[str, list[dict[str, Any]]] = {
    "a reward": [FIRST] * EARLY + [{"reward": 0.5}],
    "a task, an agent and a model": [{"result": {"task_name": None, "agent": None, "model": None}}] * EARLY + [{}],
    "tool calls": [{"calls": plain_calls()}] * EARLY + [{"calls": tool_calls()}],
    "an argument": [{"calls": tool_calls()}] * EARLY + [{"calls": tool_calls({"other": {"deep": [1]}})}],
    "a fraction": [{"calls": tool_calls({"n": 1})}] * EARLY + [{"calls": tool_calls({"n": 1.5})}],
    "a text after dates": [{"calls": tool_calls({"n": "2024-01-01"})}] * EARLY + [{"calls": tool_calls({"n": "soon"})}],
    "an item of a list": [{"calls": tool_calls({"n": []})}] * EARLY + [{"calls": tool_calls({"n": [{"m": None}]})}],
}


@pytest.mark.parametrize(
    ("form", "late"),
    [
        *(("trl-sft", late) for late in LATE),
        *(pytest.param(form, late, marks=pytest.mark.slow) for form in ("prime-sft", "skyrl-sft") for late in LATE),
    ],
)
def test_rows_that_show_a_type_late_come_first(tmp_path: Path, form: str, late: str) -> None:
    specs = [{"calls": plain_calls(), **spec} for spec in LATE[late]]
    job = make_job(tmp_path / "job", specs)
    out = tmp_path / "rows.jsonl"
    result = convert(job, out, options(format=form))
    assert result.rows == EARLY + 1 and out.stat().st_size > CHUNK + len(PAD)
    assert loads(out) == []
    assert validate(out, form).problems == []


def test_the_rows_of_ids_show_their_types_first(tmp_path: Path) -> None:
    long = conversation(1)
    long[0]["metadata"]["token_capture"]["prompt_token_ids"] = list(range(130_000))
    stamped = json.loads(json.dumps(long))
    stamped[0]["metadata"]["policy_version"] = "step-2"
    job = make_job(tmp_path / "job", [{"calls": long, "reward": None}] * EARLY + [{"calls": stamped}])
    out = tmp_path / "rows.jsonl"
    assert convert(job, out, options(format="trl-sft-ids")).rows == EARLY + 1
    assert out.stat().st_size > CHUNK * 1.2 and loads(out) == []
    assert validate(out, "trl-sft-ids").ok


def test_a_group_moves_as_a_whole(tmp_path: Path) -> None:
    specs = [{"calls": plain_calls(), "task": f"t{number // 2}", "reward": 0.0} for number in range(26)]
    specs += [{"calls": tool_calls(), "task": "late", "reward": float(number)} for number in range(2)]
    job = make_job(tmp_path / "job", specs)
    out = tmp_path / "rows.jsonl"
    result = convert(job, out, options(group=GroupOptions()))
    numbers = [orjson.loads(line)["group_number"] for line in out.read_bytes().splitlines()]
    assert numbers == [0, 0, 13, 13, *(number for number in range(1, 13) for _ in range(2))]
    assert loads(out) == [] and any("were moved to the front" in note for note in result.notes)


@pytest.mark.parametrize("form", NAMES)
def test_small_files_keep_their_order(tmp_path: Path, form: str) -> None:
    job = make_job(tmp_path / "job", [{"reward": 0.0}, {"reward": 0.5}, {"reward": 1.0}])
    result = convert(job, tmp_path / SUFFIX.get(form, "rows.jsonl"), options(format=form))
    assert result.rows == 3 and not any("moved" in note for note in result.notes)
    assert find_format(form).name == form


def test_rows_that_were_rolled_back_show_no_type(tmp_path: Path) -> None:
    with JsonlWriter(tmp_path / "rows.jsonl") as rows:
        rows.write({"pad": PAD})
        mark = rows.mark()
        rows.write({"pad": PAD, "reward": 1.0})
        rows.roll_back(mark)
        for _ in range(25):
            rows.write({"pad": PAD})
        rows.write({"pad": "", "reward": 0.5})
        assert rows.commit() != []
    lines = (tmp_path / "rows.jsonl").read_bytes().splitlines()
    assert len(lines) == 27 and orjson.loads(lines[1]) == {"pad": "", "reward": 0.5}


@pytest.mark.parametrize(
    ("early", "late", "field"),
    [
        ({"score": None}, {"score": 1.0}, "score"),
        ({}, {"score": 1.0}, "score"),
        ({"extra": []}, {"extra": ["x"]}, "extra[]"),
        ({"extra": {}}, {"extra": {"a": 1}}, "extra.a"),
        ({"extra": [[]]}, {"extra": [[1]]}, "extra[][]"),
        ({"score": 1}, {"score": 1.5}, "score"),
        ({"score": 1}, {"score": "x"}, "score"),
        ({"extra": "2024-01-01"}, {"extra": "x"}, "extra"),
    ],
)
def test_validate_refuses_what_load_dataset_refuses(
    tmp_path: Path, early: dict[str, Any], late: dict[str, Any], field: str
) -> None:
    row = {"messages": [{"role": "user", "content": PAD}, {"role": "assistant", "content": "x"}]}
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(orjson.dumps(row | extra) + b"\n" for extra in [early] * EARLY + [late]))
    assert FORMAT.check(row) == []
    report = validate(path, "prime-sft")
    assert not report.ok and any(
        problem.startswith(f"row {EARLY + 1}: {field} has its first") for problem in report.problems
    )
    path.write_bytes(b"".join(orjson.dumps(row | extra) + b"\n" for extra in [late] + [early] * EARLY))
    assert validate(path, "prime-sft").ok or field == "score"


def test_what_fits_the_first_types_may_come_later() -> None:
    types = ColumnTypes()
    types.add({"number": 1.5, "text": "x", "null": None}, 0)
    types.add({"number": 1, "text": "2024-01-01", "null": None}, CHUNK)
    assert types.late() == {}


@pytest.mark.parametrize(
    "text", ["2024-01-01", "2024-01-01T10:20", "2024-01-01 10:20:30Z", "2024-01-01T10:20:30+02:00"]
)
def test_replies_that_are_all_dates_are_noted(tmp_path: Path, text: str) -> None:
    calls = conversation(1)
    calls[0]["response"]["body"]["choices"][0]["message"]["content"] = text
    out = tmp_path / "rows.jsonl"
    result = convert(make_job(tmp_path / "job", [{"calls": calls}]), out, options())
    assert pa.types.is_timestamp(
        pa.json.read_json(out).schema.field("completion").type.value_type.field("content").type
    )
    assert "completion[].content has nothing but dates" in result.notes[-1]
    assert not validate(out, "trl-sft").ok


@pytest.mark.parametrize("text", ["2024-13-01", "2024-02-30", "20240101", "10:20:30", "2024-01-01 ", "2024-01-01T1020"])
def test_texts_that_only_look_like_dates_are_texts(text: str) -> None:
    types = ColumnTypes()
    types.add({"messages": [{"content": text}]}, 0)
    assert types.dates() == []
    assert pa.types.is_string(pa.json.read_json(io.BytesIO(orjson.dumps({"x": text}))).schema.field("x").type)
