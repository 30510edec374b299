"""What `bench view` shows, apart from the page: texts of tokens, layouts, entropies, groups, answers, the terminal."""

from __future__ import annotations

import io
import json
import math
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from starlette.testclient import TestClient
from typer.testing import CliRunner

from bench import commands as bench_commands
from capture.record import Completion
from tests.train.build import broken, conversation, failed, line, make_job, make_rollout, uncaptured
from tests.train.smollm import encode, smollm
from tests.train.view_job import NASTY, SCRIPT, long_journal, nasty_job
from train.errors import BadInput, NoSuchPath
from train.groups.groups import GroupOptions
from train.view import page
from train.view.api import View
from train.view.cli import is_loopback
from train.view.export import document, write_html
from train.view.groups import VIEW_BY
from train.view.id_text import Vocabulary
from train.view.server import listen, make_app
from train.view.terminal import print_story, story
from train.view.token_strips import SLICE, entropy_of
from train.view.token_text import BREAK, SYMBOL, TEXT, Part, plain, shown, widths

ROOT = Path(__file__).parents[2]


def view_of(root: Path, **more: Any) -> View:
    """A view that has read everything."""
    made = View(root, **more)
    made.index.scan()
    while made.index.read_next():
        pass
    return made


@given(st.text())
def test_nothing_of_a_token_is_invisible_or_moves_what_is_around_it(text: str) -> None:
    result = plain(shown(text))
    assert not any((one < " " and one != "\n") or "\u202a" <= one <= "\u202e" for one in result)
    assert result.count("\n") == text.count("\n")
    assert len(widths(shown(text))) == text.count("\n") + 1
    assert bool(result) == bool(text)


@given(st.binary(min_size=1, max_size=8))
def test_bytes_that_are_no_character_are_shown_as_bytes(data: bytes) -> None:
    parts = shown(data)
    bad = sum(part.text.count("⟨") for part in parts if part.kind == SYMBOL and part.text.startswith("⟨"))
    assert bad >= sum(one == "\ufffd" for one in data.decode("utf-8", "replace"))
    assert shown(b"\xe2\x9c") == [Part("⟨E2⟩⟨9C⟩", SYMBOL)]
    assert shown(b"a\xf0\x9f") == [Part("a", TEXT), Part("⟨F0⟩⟨9F⟩", SYMBOL)]


def test_a_line_end_a_tab_and_an_emoji_are_what_they_are() -> None:
    assert shown("}\n") == [Part("}", TEXT), Part("⏎", SYMBOL), Part("", BREAK)]
    assert shown("👩\u200d🚀") == [Part("👩\u200d🚀", TEXT)]
    assert widths(shown("漢字")) == [4]
    assert widths(shown("a\n\tb")) == [2, 5]


def test_a_tokenizer_gives_every_id_its_text_and_half_characters_their_bytes() -> None:
    words = Vocabulary(smollm())
    text = "naïve — 漢 👩‍🚀\n<|im_end|>"
    ids = encode(text)
    pieces = [words.text(token_id) for token_id in ids]
    assert b"".join(piece if isinstance(piece, bytes) else str(piece).encode() for piece in pieces) == text.encode()
    assert any(isinstance(piece, bytes) for piece in pieces)
    assert words.special(ids[-1], pieces[-1]) and not words.special(ids[0], pieces[0])
    assert words.text(10**9) is None


def test_without_a_tokenizer_an_id_is_what_the_engine_wrote_for_it_elsewhere() -> None:
    words = Vocabulary()
    words.learn([5, 6, 7], ["a", "\ufffd", ""])
    assert [words.text(one) for one in (5, 6, 7, 8)] == ["a", None, None, None]


def test_entropy_counts_what_was_not_captured_as_one_outcome() -> None:
    half = math.log(0.5)
    sure = Completion(0, None, ["a"], [half], [[{"token": "a", "logprob": half}, {"token": "b", "logprob": half}]])
    assert entropy_of(sure, 0) == pytest.approx(math.log(2))
    rest = Completion(0, None, ["a"], [half], [[{"token": "a", "logprob": half}]])
    assert entropy_of(rest, 0) == pytest.approx(math.log(2))
    beside = Completion(0, None, ["z"], [math.log(0.25)], [[{"token": "a", "logprob": half}]])
    assert entropy_of(beside, 0) == pytest.approx(1.5 * math.log(2))
    assert entropy_of(Completion(0, None, ["a"], [half]), 0) is None


def test_a_strip_holds_the_merged_sequence_token_by_token(tmp_path: Path) -> None:
    calls = conversation(3)
    view = view_of(make_job(tmp_path / "job", [{"calls": calls}]))
    name = view.index.entries()[0].rollout.rollout_path
    index = view.answer("strip", {"path": name, "of": "s0"})
    last = calls[-1]["metadata"]["token_capture"]
    ids = last["prompt_token_ids"] + last["completions"][0]["token_ids"]
    result = view.answer("slice", {"path": name, "of": "s0", "from": "0"})
    assert (index["tokens"], index["prompt"], index["trained"]) == (len(ids), 12, 12)
    assert result["ids"] == ids
    sampled = [
        at for stretch in index["stretches"] for at in range(stretch["start"], stretch["start"] + stretch["length"])
    ]
    assert [at for at, value in enumerate(result["logprobs"]) if value is not None] == sampled
    assert [result["texts"][at] for at in sampled] == [f"<{ids[at]}>" for at in sampled]
    assert result["texts"][0] is None and result["shown"]["0"] == [Part("⟨100⟩", SYMBOL)]
    assert result["logprobs"][index["least"][0]] == min(value for value in result["logprobs"] if value is not None)


def test_one_call_is_shown_also_where_it_is_not_complete(tmp_path: Path) -> None:
    one = line(0, [1, 2], [3, 4])
    one["metadata"]["token_capture"]["completions"][0]["logprobs"] = [-0.5]
    view = view_of(make_job(tmp_path / "job", [{"calls": [one]}]))
    name = view.index.entries()[0].rollout.rollout_path
    result = view.answer("slice", {"path": name, "of": "c0.0", "from": "0"})
    assert (result["ids"], result["logprobs"]) == ([1, 2, 3, 4], [None, None, -0.5, None])
    with pytest.raises(BadInput, match="no sequence 0"):
        view.answer("strip", {"path": name, "of": "s0"})


def test_slices_are_bounded_and_meet(tmp_path: Path) -> None:
    view = view_of(long_journal(tmp_path / "long.jsonl", 3 * SLICE))
    name = view.index.entries()[0].rollout.rollout_path
    got: list[int] = []
    for start in range(0, 4 * SLICE, SLICE):
        result = view.answer("slice", {"path": name, "of": "s0", "from": str(start)})
        assert len(result["ids"]) == len(result["texts"]) == len(result["logprobs"]) <= SLICE
        got += result["ids"]
    assert len(got) == 3 * SLICE + 3


def test_a_break_shows_two_windows_cut_at_the_same_places(tmp_path: Path) -> None:
    view = view_of(make_job(tmp_path / "job", [{"calls": broken(2)}]))
    name = view.index.entries()[0].rollout.rollout_path
    result = view.answer("rollout", {"path": name})
    (found,) = result["breaks"]
    held = [one["id"] for column in found["columns"] for one in column["held"]]
    sent = [one["id"] for column in found["columns"] for one in column["sent"]]
    assert (held, sent) == (found["expected_ids"], found["found_ids"])
    assert all((column["held"] == column["sent"]) == column["same"] for column in found["columns"])
    assert found["cause_name"] and found["remedy"] and found["sure"] in ("certain", "likely", "possible")
    assert (found["segment_before"], found["segment_after"]) == (0, 1)


def test_messages_that_a_call_has_from_the_one_before_are_not_repeated(tmp_path: Path) -> None:
    view = view_of(make_job(tmp_path / "job", [{"calls": conversation(3)}]))
    name = view.index.entries()[0].rollout.rollout_path
    result = view.answer("call", {"path": name, "call": "2"})
    assert result["same"] == {"call": 1, "messages": 3}
    assert [message["content"] for message in result["messages"]] == ["reply 1", "and then? 1"]


def test_groups_have_rewards_and_advantages_and_withheld_ones_their_reason(tmp_path: Path) -> None:
    make_job(tmp_path / "a", [{"task": "x", "reward": 1.0}, {"task": "x", "reward": 0.0}])
    make_job(tmp_path / "b", [{"task": "y", "reward": 1.0}, {"task": "y", "reward": None, "error": "it fell"}])
    job = view_of(tmp_path).answer("job", {})
    first, second = sorted(job["groups"], key=lambda one: one["key"]["task"])
    assert (first["rewards"], first["withheld"]) == ([1.0, 0.0], None)
    assert (second["withheld"], "it fell" in second["withheld_detail"]) == ("unscored", True)
    advantages = {row["task"]: row["advantage"] for row in job["rows"] if row["reward"] == 1.0}
    assert advantages["x"] == pytest.approx(0.7071, abs=1e-3) and advantages["y"] is None
    sized = view_of(tmp_path / "a", grouping=GroupOptions(VIEW_BY, size=4)).answer("job", {})
    assert [group["withheld"] for group in sized["groups"]] == ["group_incomplete"]


def test_rows_are_there_before_any_log_is_read(tmp_path: Path) -> None:
    view = View(make_job(tmp_path / "job", [{}, {"calls": uncaptured()}, {"calls": [failed(0)]}]))
    view.index.scan()
    before = view.answer("job", {})
    assert (before["read"], len(before["rows"])) == (0, 3)
    assert all("grade" not in row and row["reward"] == 1.0 for row in before["rows"])
    while view.index.read_next():
        pass
    after = view.answer("job", {"since": str(before["version"])})
    assert [row["grade"] for row in after["rows"]] == [True, False, False]
    assert all(row["reason"] for row in after["rows"] if not row["grade"])


@pytest.mark.parametrize("kind", ["rollout", "journal", "bare", "trials"])
def test_every_layout_is_shown(tmp_path: Path, kind: str) -> None:
    if kind == "trials":
        make_job(tmp_path / "jobs/trial-01/job", [{}])
        make_job(tmp_path / "jobs/trial-02/job", [{}])
        root = tmp_path / "jobs"
    else:
        root = make_rollout(tmp_path / "job", finished=kind != "bare")
        root = root / "trajectory/llm_trajectory.jsonl" if kind == "journal" else root
    view = view_of(root)
    job = view.answer("job", {})
    assert len(job["rows"]) == (2 if kind == "trials" else 1) and len(job["groups"]) <= 1
    for row in job["rows"]:
        assert row["grade"] is True and row["all_calls"] == 2
        assert view.answer("strip", {"path": row["path"], "of": "s0"})["trained"] == 8


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    view = view_of(make_job(tmp_path / "job", [{"calls": broken(2)}]))
    return TestClient(make_app(view), base_url="http://127.0.0.1:1234")


def test_the_page_lets_in_no_other_script_and_nobody_frame_it(client: TestClient) -> None:
    for path in ("/", "/static/app.js", "/static/vendor/preact.mjs", "/style.css", "/api/job"):
        answer = client.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers
    document_text = client.get("/").text
    assert "<script>" not in document_text and "style=" not in document_text


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""])
def test_a_name_that_was_made_to_lead_here_is_refused(client: TestClient, host: str) -> None:
    assert client.get("/api/job", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost:1", "[::1]:1", "192.168.1.4"])
def test_an_address_of_this_machine_is_answered(client: TestClient, host: str) -> None:
    assert client.get("/api/job", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("question", "status"),
    [
        ("rollout?path=nowhere", 404),
        ("rollout?path=../../etc", 404),
        ("nothing", 404),
        ("call?path=write-number__00000001&call=99", 400),
        ("call?path=write-number__00000001&call=x", 400),
        ("slice?path=write-number__00000001&of=s0", 400),
        ("strip?path=write-number__00000001&of=s99", 400),
        ("strip?path=write-number__00000001&of=%3Cscript%3E", 400),
        ("slice?path=write-number__00000001&of=s0&from=999999", 200),
    ],
)
def test_a_question_that_makes_no_sense_is_answered_with_a_sentence(
    client: TestClient, question: str, status: int
) -> None:
    answer = client.get(f"/api/{question}")
    assert answer.status_code == status
    assert status == 200 or len(answer.json()["error"]) > 10


def test_the_file_holds_no_text_of_a_model_as_markup(tmp_path: Path) -> None:
    file = tmp_path / "view.html"
    list(write_html(View(nasty_job(tmp_path / "job")), file, most=4 << 20))
    text = file.read_text()
    assert SCRIPT not in text and "<img" not in text
    assert text.count("<script") == text.count("</script>") == 4
    assert not re.search(r"<[a-z]+[^>]*\b(?:src|href)=(?!\"data:,)", text)


def test_nothing_in_the_file_could_end_the_element_it_stands_in() -> None:
    assert page.scripts(inline=True).count("<") == 4 and "</style" not in page.style()
    assert "sha256-" in document({"name": "j"}, {}, {}, [])


def test_the_terminal_tells_the_tree_and_colours_the_unlikely(tmp_path: Path) -> None:
    view = View(make_job(tmp_path / "job", [{"calls": broken(2)}]))
    view.index.scan()
    result = "\n".join(line.plain for line in story(view, color=False))
    assert "● call 0" in result and "⟂ call 1" in result and "breaks off from call 0" in result
    assert "<1100>" in result and "\x1b" not in result
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, color_system="256", highlight=False, width=20)
    print_story(view, console, console)
    assert "\x1b[38;5;16;48;5;" in shown.getvalue()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue()).splitlines()
    assert [line for line in result.splitlines() if "call 1" in line and line not in lines] == []  # nothing is wrapped


def test_the_terminal_gets_no_escape_of_a_model(tmp_path: Path) -> None:
    view = View(nasty_job(tmp_path / "job"))
    view.index.scan()
    result = "\n".join(line.plain for line in story(view, color=False))
    assert "\x1b" not in result and "\u202e" not in result and "␛[31mred␇" in result
    assert any("\u0301" in text for text in NASTY)


def run_view(*words: str | Path) -> Any:
    return CliRunner().invoke(bench_commands(), ["view", *map(str, words)])


def test_what_cannot_be_shown_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for words, said in (
        ((tmp_path / "nowhere",), NoSuchPath),
        ((tmp_path / "notes.txt",), BadInput),
        ((tmp_path, "--html", tmp_path / "x.html", "--text"), BadInput),
        ((tmp_path, "--host", "0.0.0.0"), BadInput),
        ((tmp_path, "--html", tmp_path), BadInput),
        ((tmp_path, "--html", tmp_path / "x.html"), BadInput),
        ((tmp_path, "--text", "--tokenizer", tmp_path), BadInput),
    ):
        assert isinstance(run_view(*words).exception, said), words
    assert not (tmp_path / "x.html").exists()


def test_a_port_that_is_taken_is_a_sentence_and_code_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, ROOT / "bench.py", "view", make_job(tmp_path / "job"), "--port", str(port)]
        done = subprocess.run([*command, "--no-open"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in done.stderr and "Traceback" not in done.stderr


def test_without_a_browser_the_address_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from train.view import server

    messages: list[str] = []
    monkeypatch.setattr(server.webbrowser, "open", lambda _: False)
    server._open("http://127.0.0.1:1/", messages.append)
    assert messages == [
        "no browser could be opened here: open http://127.0.0.1:1/ yourself, or use --html FILE or --text"
    ]


def test_loopback_is_told_from_the_rest() -> None:
    assert [is_loopback(one) for one in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", "me.example")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
    listener = listen("127.0.0.1", 0)
    assert listener.getsockname()[1] > 0
    listener.close()


def test_a_lost_folder_is_said_and_what_was_read_is_kept(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{}, {}])
    view = view_of(job)
    (job / "result").mkdir()
    name = view.index.entries()[0].rollout
    for file in sorted(name.path.rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    name.path.rmdir()
    view.index.scan()
    rows = {row["path"]: row for row in view.answer("job", {})["rows"]}
    assert rows[name.rollout_path]["gone"] and rows[name.rollout_path]["grade"] is True
    with pytest.raises(NoSuchPath, match="is gone"):
        view.answer("rollout", {"path": name.rollout_path})


def test_a_journal_that_grows_is_read_again(tmp_path: Path) -> None:
    calls = conversation(3)
    folder = make_rollout(tmp_path, calls=calls[:1], finished=False)
    view = view_of(folder)
    name = view.index.entries()[0].rollout.rollout_path
    assert len(view.answer("rollout", {"path": name})["calls"]) == 1
    with (folder / "trajectory/llm_trajectory.jsonl").open("a") as journal:
        journal.writelines(json.dumps(call) + "\n" for call in calls[1:])
    view.index.scan()
    assert view.index.read_next()
    assert len(view.answer("rollout", {"path": name})["calls"]) == 3


def test_a_log_that_our_own_code_fails_at_is_said_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = View(make_job(tmp_path / "job", [{}, {}]))
    view.index.scan()
    first, once = view.index.entries()[0], view.readings.once
    monkeypatch.setattr(view.readings, "once", lambda one: {}["x"] if one == first.rollout else once(one))
    while view.index.read_next():
        pass
    rows = {row["path"]: row for row in view.index.job()["rows"]}
    failed_at = rows.pop(first.rollout.rollout_path)
    assert "KeyError" in failed_at["unreadable"] and failed_at["fresh"]
    assert rows and all(row["fresh"] and "unreadable" not in row for row in rows.values())
