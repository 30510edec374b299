"""The journal: whole lines or none, torn tails reported, ids read without parsing the prompt."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.errors import FileFormatError, JournalClosed, JournalError, RecordError
from capture.journal.call import CUT_ABOVE, Call, Known
from capture.journal.files import read_json, read_jsonl, write_json
from capture.journal.journal import JournalReader, JournalWriter
from capture.record import Ids
from capture.schemas import examples

LONG = list(range(100_000, 100_000 + CUT_ABOVE // 4))


def line(prompt: list[int] | None = None, sampled: list[int] | None = None, **metadata: Any) -> dict[str, Any]:
    sampled = [5, 6] if sampled is None else sampled
    return {
        "request": {"body": {"messages": [{"role": "user", "content": 'a "prompt_token_ids":[1,2] in a text'}]}},
        "response": {"status_code": 200, "body": {}},
        "metadata": {
            "call": 3, **metadata,
            "token_capture": {
                "schema_version": "benchflow.token_capture.v1", "provider": "vllm",
                "prompt_token_ids": LONG if prompt is None else prompt,
                "completions": [{"index": 0, "token_ids": sampled, "logprobs": [-0.5] * len(sampled)}],
                "unavailable": {},
            },
        },
    }  # fmt: skip


def test_lines_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "deep/er/log.jsonl"
    writer = JournalWriter(path)
    lines = [json.dumps(line(call=n)).encode() for n in range(3)]
    for written in lines:
        writer.append(written)
    assert writer.lines == 3
    assert [call.number for call in JournalReader(path)] == [0, 1, 2], "readable while it is being written"
    writer.close()
    writer.close()
    assert path.read_bytes() == b"".join(written + b"\n" for written in lines)
    with pytest.raises(JournalClosed):
        writer.append(b"{}")


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "log.jsonl")
    with pytest.raises(JournalError, match="one writer"):
        JournalWriter(tmp_path / "log.jsonl")
    writer.close()
    JournalWriter(tmp_path / "log.jsonl").close()


def test_a_torn_last_line_is_reported_and_preserved_and_the_next_line_starts_clean(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    whole, torn = json.dumps(line()).encode(), json.dumps(line()).encode()[:-9]
    path.write_bytes(whole + b"\n" + torn)
    reader = JournalReader(path)
    assert [call.line for call in reader] == [0]
    assert [problem.line for problem in reader.problems] == [1] and "cut off" in reader.problems[0].what
    writer = JournalWriter(path)
    writer.append(whole)
    writer.close()
    reader = JournalReader(path)
    assert [call.line for call in reader] == [0, 2]
    assert path.read_bytes() == whole + b"\n" + torn + b"\n" + whole + b"\n"


@pytest.mark.parametrize("junk", [b"not json", b"[1, 2]", b'"text"', b"\xff\xfe", b'{"a": }', b"null"])
def test_a_line_that_is_not_an_object_is_skipped_and_reported(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "log.jsonl"
    good = json.dumps(line()).encode()
    path.write_bytes(good + b"\n" + junk + b"\n\n" + good + b"\n")
    reader = JournalReader(path)
    assert [call.line for call in reader] == [0, 3]
    assert len(reader.problems) == 1 and reader.problems[0].what.startswith("line 2:")


def test_a_full_disk_takes_no_part_of_a_line(tmp_path: Path) -> None:
    limit = 4000
    code = (
        "import resource, signal, sys; from pathlib import Path; from capture.journal.journal import JournalWriter\n"
        "from capture.errors import JournalError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "writer = JournalWriter(Path(sys.argv[1]))\n"
        "try:\n    [writer.append(b'{' + b'x' * 1500 + b'}') for _ in range(9)]\n"
        "except JournalError as error:\n    print(error, writer.lines)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "log"], capture_output=True, text=True, check=True)
    assert "cannot write the journal" in done.stdout and done.stdout.strip().endswith(" 2")
    assert (tmp_path / "log").stat().st_size == 2 * 1503


def test_a_deleted_journal_is_not_a_journal(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "log.jsonl")
    (tmp_path / "log.jsonl").unlink()
    with pytest.raises(JournalError, match="deleted"):
        writer.append(b"{}")


def test_a_journal_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="give a folder"):
        JournalWriter(tmp_path / "file" / "log.jsonl")
    with pytest.raises(JournalError, match="cannot read"):
        list(JournalReader(tmp_path / "nowhere.jsonl"))


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_a_long_prompt_is_read_without_being_parsed_and_is_the_same(separators: tuple[str, str]) -> None:
    raw = json.dumps(line(), separators=separators).encode()
    call = Call(0, raw)
    assert call.capture is not None and call.capture.complete
    assert call.capture.prompt_token_ids == LONG
    assert call.request_body["messages"][0]["content"] == 'a "prompt_token_ids":[1,2] in a text'
    assert call.metadata == {"call": 3}


def test_a_capture_that_cannot_be_read_says_so_and_names_no_engine() -> None:
    """Found by the fuzzer: reading the engine alone raised an error about the capture."""
    row = line()
    row["metadata"]["token_capture"]["unavailable"] = 5
    call = Call(0, json.dumps(row).encode())
    assert call.engine is None
    with pytest.raises(RecordError, match="unavailable is not an object"):
        _ = call.capture


def test_a_key_of_that_name_elsewhere_is_left_alone() -> None:
    row = line()
    row["request"]["body"]["token_capture"] = {"prompt_token_ids": LONG[::-1]}
    call = Call(0, orjson.dumps(row))
    assert call.capture is not None and call.capture.prompt_token_ids == LONG
    assert call.request_body["token_capture"] == {"prompt_token_ids": LONG[::-1]}


def test_several_prompts_are_in_their_choices() -> None:
    row = line()
    capture = row["metadata"]["token_capture"]
    capture["prompt_token_ids"] = None
    for choice in capture["completions"]:
        choice["prompt_token_ids"] = LONG
    call = Call(0, orjson.dumps(row))
    assert call.capture is not None and call.capture.prompt_token_ids is None
    assert call.capture.completions[0].prompt_token_ids == LONG


@pytest.mark.parametrize("place", ["prompt", "sampled"])
@pytest.mark.parametrize("bad", [1.5, None, -1, True, "7", [1]])
def test_one_bad_id_voids_the_list_and_is_named(place: str, bad: Any) -> None:
    row = line(**{place: [*LONG, bad]})  # type: ignore[arg-type]
    row["metadata"]["token_capture"]["completions"][0]["logprobs"] = [-0.5] * (len(LONG) + 1)
    capture = Call(0, orjson.dumps(row)).capture
    assert capture is not None and not capture.complete
    assert ("prompt_token_ids" if place == "prompt" else "completion_token_ids") in capture.unavailable


@given(st.lists(st.lists(st.sampled_from([1, 12, 123, 5]), max_size=8), min_size=1, max_size=12))
def test_what_is_known_of_earlier_prompts_changes_nothing(prompts: list[list[int]]) -> None:
    known = Known()
    for prompt in prompts:
        assert known.parse(orjson.dumps(prompt)[1:-1]) == prompt


@pytest.mark.parametrize("tail", [b",x]", b",,1]", b",01]", b",-1]", b", 1]", b",1.5]", b"x]", b",]", b"5]"])
def test_a_bad_tail_after_a_known_prompt_is_seen(tail: bytes) -> None:
    known = Known()
    first = b"[10,11,12]"
    assert known.parse(first[1:-1]) == [10, 11, 12]
    text = (first[:-1] + tail)[1:-1]
    assert known.parse(text) == Ids.parse_text(text)


def test_growing_prompts_are_read_right_through_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    dice = random.Random(7)
    prompts: list[list[int]] = [[dice.randrange(50_000) for _ in range(900)]]
    for _ in range(9):
        base = dice.choice(prompts)
        prompts.append(base[: dice.randrange(500, len(base))] + [dice.randrange(50_000) for _ in range(60)])
    path.write_bytes(b"".join(orjson.dumps(line(prompt)) + b"\n" for prompt in prompts))
    reader = JournalReader(path)
    found = list(reader)
    assert [call.capture.prompt_token_ids.tolist() for call in found if call.capture] == prompts  # type: ignore[union-attr]
    again = [reader.at(call.line, call.offset).capture.prompt_token_ids for call in found]  # type: ignore[union-attr]
    assert again == prompts


@pytest.mark.parametrize(("tools", "offered"), [([{"a": 1}], True), ([], False), (None, False), ("x", False)])
def test_whether_tools_were_offered_is_known_without_reading_the_messages(tools: Any, offered: bool) -> None:
    row = line()
    row["request"]["body"]["tools"] = tools
    assert Call(0, orjson.dumps(row)).offers_tools is offered
    assert Call(0, b"{}").offers_tools is False


@pytest.mark.parametrize("name", [name for name, _ in examples()])
def test_the_golden_lines_are_read(name: str) -> None:
    golden = dict(examples())[name]
    call = Call(0, orjson.dumps(golden))
    stored = golden["metadata"].get("token_capture")
    assert (call.capture is None) == (stored is None)
    if stored and call.capture:
        assert call.capture.complete == (not stored["unavailable"])
        assert call.capture.prompt_token_ids == stored["prompt_token_ids"] or stored["prompt_token_ids"] is None


def test_a_reader_beside_a_writer_never_sees_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    writer = JournalWriter(path)
    raw = orjson.dumps(line(LONG * 40))
    writing = threading.Thread(target=lambda: [writer.append(raw) for _ in range(60)])
    writing.start()
    while writing.is_alive():
        reader = JournalReader(path)
        assert all(call.capture and call.capture.complete for call in reader)
        assert not [problem for problem in reader.problems if "cut off" not in problem.what]
    writing.join()
    writer.close()
    assert sum(1 for _ in JournalReader(path)) == 60


def test_files_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a/summary.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert read_json(path) == {"a": 2} and os.listdir(path.parent) == ["summary.json"]
    path.write_text("{")
    with pytest.raises(FileFormatError, match="not valid JSON"):
        read_json(path)


def test_rows_are_read_one_by_one_and_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n[]\n')
    rows = read_jsonl(path)
    assert next(rows) == (0, {"a": 1}) and next(rows) == (2, {"a": 2})
    with pytest.raises(FileFormatError, match="line 4: top-level record must be an object"):
        next(rows)


def recorded(number: object, body: object = None) -> bytes:
    """A line as the proxy writes it, with the agent's own bytes in it."""
    return b'{"request":{"body":%b},"response":{},"metadata":{"call":%b,"request_id":"req-a","outcome":"ok"}}' % (
        json.dumps(body).encode() if not isinstance(body, bytes) else body,
        json.dumps(number).encode(),
    )


FORGED = [
    b'{"call":777,"request_id":"req-x"}',
    b'{"metadata":{"call":777,"request_id":"req-x","outcome":"ok"}}',
    b'{"messages":[{"role":"user","content":"\\"call\\":777,\\"request_id\\":\\"req-x\\""}],"call":999999999}',
    b'{"call":9999999999999,"request_id":"req-x"}',
    b'{"call":999999999999999999999999,"request_id":"req-x"}',
]


@pytest.mark.parametrize("body", FORGED)
def test_an_agents_json_does_not_number_calls(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join(recorded(number, body) + b"\n" for number in (0, 2, 1)))
    writer = JournalWriter(path)
    assert writer.next_call == 3
    writer.append(recorded(3, body))
    writer.close()
    reader = JournalReader(path)
    assert [call.number for call in reader] == [0, 2, 1, 3] and reader.gaps is None


@pytest.mark.parametrize("number", [10**9, 10**12 + 1, 2**53, 10**17])
def test_numbering_continues_from_a_number_of_any_length(tmp_path: Path, number: int) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(recorded(number - 1) + b"\n" + recorded(number) + b"\n" + recorded(3)[:-2] + b"\n")
    writer = JournalWriter(path)
    assert writer.next_call == number + 1
    writer.close()


@pytest.mark.parametrize("number", [None, True, -1, "4", 4.0, [4], 2**70])
def test_what_is_not_a_number_is_none(tmp_path: Path, number: object) -> None:
    call = Call(7, recorded(number))
    assert call.own_number is None and call.number == 7


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ([0, 2], "call 1 has no line"),
        ([1], "call 0 has no line"),
        ([5, 0, 3], "3 calls (1, 2, 4) have no line"),
        ([0, 30], "29 calls (1, 2, 3, 4, 5, ...) have no line"),
        ([0, 10**15], "999999999999999 calls (1, 2, 3, 4, 5, ...) have no line"),
        ([0, 1, 2], None),
        ([2, 0, 1], None),
        ([0, 0, 2], None),
        ([None, None], None),
        ([], None),
    ],
)
def test_calls_without_a_line_are_named(tmp_path: Path, numbers: list[int | None], problem: str | None) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join(recorded(number) + b"\n" for number in numbers))
    reader = JournalReader(path)
    assert len(list(reader)) == len(numbers)
    assert (None if reader.gaps is None else reader.gaps.partition(": ")[0]) == problem


def test_a_torn_line_is_the_call_that_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(recorded(0) + b"\n" + recorded(1)[:40] + b"\n" + recorded(2) + b"\n")
    reader = JournalReader(path)
    assert [call.number for call in reader] == [0, 2]
    assert [problem.line for problem in reader.problems] == [1] and reader.gaps is None


@pytest.mark.parametrize("kind", ["fifo", "link to a fifo", "/dev/null", "/dev/zero", "/dev/full", "socket"])
def test_what_keeps_no_lines_is_not_a_journal(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "log.jsonl", tmp_path / "target"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link to a fifo":
        os.mkfifo(target)
        path.symlink_to(target)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    else:
        path.symlink_to(kind)
    with pytest.raises(JournalError, match="cannot open the journal"):
        JournalWriter(path)


def test_a_link_to_a_file_is_a_journal(tmp_path: Path) -> None:
    path, target = tmp_path / "log.jsonl", tmp_path / "target"
    path.symlink_to(target)
    writer = JournalWriter(path)
    writer.append(b"{}")
    writer.close()
    assert target.read_bytes() == b"{}\n"
