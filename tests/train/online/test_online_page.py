"""docs/online.md: what it shows is run, and what it names exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.scripted_engine import ScriptedEngine
from tests.sandbox.service.local_service import KEY
from tests.sandbox.service.support import Model, Service, write_tasks

PAGE = (Path(__file__).parents[3] / "docs/online.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    write_tasks(tmp_path / "tasks")
    with ScriptedEngine(Model(right=0.75)) as engine, Service(tmp_path, engine, concurrency=4) as running:
        yield running


@pytest.mark.slow
def test_a_group_as_the_page_asks_for_it(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BENCHFLOW_SERVE_URL", service.url)
    monkeypatch.setenv("BENCHFLOW_SERVE_KEY", KEY)
    [program] = [text for text in PROGRAMS if "service.group(" in text]
    shown: dict[str, Any] = {}
    exec(compile(program, "docs/online.md", "exec"), shown)
    *rows, verdict = capsys.readouterr().out.splitlines()
    assert len(rows) == 4 and all(row.endswith("['0']") for row in rows)
    assert verdict.startswith("complete [") and shown["group"].verdict["advantage_kind"] == "grpo"


def test_every_name_that_the_page_imports_from_here_exists() -> None:
    names = re.findall(r"^from (train\.\S+) import (.+)$", "\n".join(PROGRAMS), re.MULTILINE)
    assert names
    for module, imported in names:
        for name in imported.split(", "):
            assert hasattr(import_module(module), name), f"{module}.{name}"


def test_options_that_the_page_names_exist() -> None:
    transfers = import_module("train.online.weights")
    for name, options in re.findall(r"`(\w+Transfer)\(([^)]*)\)`", PAGE):
        parameters = getattr(transfers, name).__init__.__annotations__
        for option in re.findall(r"(\w+)=", options):
            assert option in parameters, f"{name}({option}=)"
