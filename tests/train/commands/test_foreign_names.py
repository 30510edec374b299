"""What agents, engines and folders are called does not steer the terminal of whoever looks at them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench import commands as bench_commands
from tests.train.build import broken, failed, make_job
from train.cli import app

EVIL = "x\x1b[2J\x07\r\nFORGED\x1b]0;t\x07\u202e\u2028\x9b31m\x85"
COMMANDS = {
    "coverage": ["token-coverage", "JOB"],
    "explained": ["token-coverage", "JOB", "--explain"],
    "rows": ["convert", "JOB", "--format", "trl-sft", "--out", "OUT"],
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    retold = broken()
    for call in retold:
        for message in call["request"]["body"]["messages"]:
            message["content"] += EVIL
    refused = failed(2)
    refused["response"]["body"] = {"error": {"message": EVIL}}
    specs = [
        {"name": f"{EVIL}-good", "task": EVIL, "agent": EVIL, "model": EVIL},
        {"name": f"{EVIL}-broken", "calls": [*retold, refused], "error": EVIL, "result": {"verifier_error": EVIL}},
        {"name": f"{EVIL}-unread", "journal": EVIL.encode() + b"\n"},
    ]
    return make_job(tmp_path / "job", specs)


@pytest.mark.parametrize("name", COMMANDS)
def test_names_and_texts_are_printed_escaped(job: Path, name: str) -> None:
    words = [{"JOB": str(job), "OUT": str(job.parent / "rows.jsonl")}.get(word, word) for word in COMMANDS[name]]
    printed = CliRunner().invoke(app, words).output
    assert "FORGED" in printed or name == "rows"
    assert all(sign.isprintable() for sign in printed.replace("\n", ""))
    assert not any(line.startswith("FORGED") for line in printed.splitlines())


def test_names_are_printed_escaped_in_the_terminals_view(job: Path) -> None:
    printed = CliRunner().invoke(bench_commands(), ["view", str(job), "--text"]).output
    assert "FORGED" in printed and all(sign.isprintable() for sign in printed.replace("\n", ""))
    assert not any(line.startswith("FORGED") for line in printed.splitlines())
