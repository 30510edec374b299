"""The options of `bench view`."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from bench import commands as bench_commands
from tests.train.build import make_job
from train.errors import BadInput, NoSuchPath
from train.view.cli import is_loopback
from train.view.server import listen

ROOT = Path(__file__).parents[3]


def run_view(*words: str | Path) -> Any:
    return CliRunner().invoke(bench_commands(), ["view", *map(str, words)])


def test_what_cannot_be_shown_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for words, sentence in (
        ((tmp_path / "nowhere",), NoSuchPath),
        ((tmp_path / "notes.txt",), BadInput),
        ((tmp_path, "--html", tmp_path / "x.html", "--text"), BadInput),
        ((tmp_path, "--host", "0.0.0.0"), BadInput),
        ((tmp_path, "--html", tmp_path), BadInput),
        ((tmp_path, "--html", tmp_path / "x.html"), BadInput),
        ((tmp_path, "--text", "--tokenizer", tmp_path), BadInput),
    ):
        assert isinstance(run_view(*words).exception, sentence), words
    assert not (tmp_path / "x.html").exists()


def test_a_port_that_is_taken_is_a_sentence_and_code_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, ROOT / "bench.py", "view", make_job(tmp_path / "job"), "--port", str(port)]
        done = subprocess.run([*command, "--no-open"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in done.stderr and "Traceback" not in done.stderr


def test_loopback_is_distinguished_from_other_hosts() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", "me.example")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
    listener = listen("127.0.0.1", 0)
    assert listener.getsockname()[1] > 0
    listener.close()
