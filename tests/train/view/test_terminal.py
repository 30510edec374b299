"""`bench view --text`."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from tests.train.build import broken, make_job
from tests.train.view.view_job import NASTY, nasty_job
from train.view.api import View
from train.view.terminal import print_story, story


def test_the_terminal_shows_the_tree_and_colors_the_unlikely(tmp_path: Path) -> None:
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
