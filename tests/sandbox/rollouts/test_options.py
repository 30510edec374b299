"""`bench run` and `bench serve` read the options that they have in common alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from sandbox.cli import run_command
from sandbox.errors import JobError
from sandbox.service.cli import serve_command


@pytest.mark.parametrize("command", [run_command, serve_command])
@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--job", "a/b"], "--job a/b: a job's name is one folder's name"),
        (["--job", ".."], r"--job \.\.: a job's name is one folder's name"),
        (["--verifier-sandbox", "other"], "--verifier-sandbox must be shared or separate, not other"),
        (["--agent-env", "NOT_SET_HERE"], "--agent-env NOT_SET_HERE: give NAME=VALUE"),
    ],
)
def test_bad_values_are_refused_before_anything_starts(
    command: Callable[..., Any], words: list[str], sentence: str
) -> None:
    app = typer.Typer()
    app.command()(command)
    with pytest.raises(JobError, match=sentence):
        CliRunner().invoke(app, ["no-such-task", "-a", "nop", *words], catch_exceptions=False)
