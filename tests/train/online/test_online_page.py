"""docs/online.md: what it shows is run, and what it names exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from sandbox.tasks.task import find_tasks
from tests.sandbox.scripted_engine import ScriptedEngine
from tests.sandbox.service.local_service import KEY
from tests.sandbox.service.support import Model, Service, write_tasks

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/online.md").read_text(encoding="utf-8")
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


@pytest.mark.engine
def test_what_the_service_is_started_with_comes_from_the_clone(tmp_path: Path) -> None:
    [commands] = [text for text in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL) if "bench serve" in text]
    lines = [line.removeprefix("$ ") for line in commands.splitlines()]
    [serve] = [line for line in lines if line.startswith("bench serve")]
    (tmp_path / "sandbox").symlink_to(ROOT / "sandbox")
    activate = lines.index(". .venv/bin/activate")  # the tests' own Python instead
    script = "\n".join(["set -e", *lines[:activate], *lines[activate + 1 : lines.index(serve)]])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    subprocess.run(["sh", "-c", script], cwd=tmp_path, env=environment, check=True)
    tasks, model = serve.split()[2], serve.split("--gguf ")[1].split()[0]
    [task] = find_tasks([str(tmp_path / tasks)])
    assert task.name == "write-number"
    assert (tmp_path / model).stat().st_size > 1 << 20


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
