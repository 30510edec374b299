"""The error edge of the four command lines: one sentence and one exit code, whichever door a command is entered by."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

import bench
import train.__main__
from capture.command.lazy import LazyCommand

ROOT = Path(__file__).parents[1]
#: Each door with a command of its own and a module which that command loads late.
DOORS = {
    "bench": ["bench", "train", "token-coverage", "."],
    "python -m proxy": ["-m", "proxy", "--upstream", "http://127.0.0.1:1/v1", "--no-probe", "--port", "0"],
    "python -m sandbox": ["-m", "sandbox", "tasks", "check", "."],
    "python -m train": ["-m", "train", "token-coverage", "."],
}
#: Sends this process a signal, or raises an error, when a module is looked for.
HOOK = """
import os, signal, sys

class AtImport:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["AT_IMPORT"]:
            sys.meta_path.remove(self)
            exec(os.environ["DO"])

sys.meta_path.insert(0, AtImport())
"""


def enter(door: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    words = DOORS[door]
    command = [sys.executable, str(ROOT / "bench.py"), *words[1:]] if door == "bench" else [sys.executable, *words]
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "AT_IMPORT": "", **environment}
    return subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


CTRL_C = "os.kill(os.getpid(), signal.SIGINT)"
LOADED = {
    "bench": ("typer", "capture.command.lazy", "train.cli", "train.commands.coverage", "orjson"),
    "python -m proxy": ("typer", "proxy.cli", "proxy.server", "starlette", "prometheus_client"),
    "python -m sandbox": ("typer", "sandbox.cli", "docker", "httpx", "yaml"),
    "python -m train": ("typer", "capture.command.lazy", "train.cli", "train.commands.coverage", "msgspec"),
}


@pytest.mark.parametrize(
    ("door", "module"),
    [
        pytest.param(door, module, marks=() if module in (modules[0], modules[-1]) else pytest.mark.slow)
        for door, modules in LOADED.items()
        for module in modules
    ],
)
def test_ctrl_c_while_a_module_loads_is_130_without_a_traceback(tmp_path: Path, door: str, module: str) -> None:
    done = enter(door, tmp_path, AT_IMPORT=module, DO=CTRL_C)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


ERRORS = (
    ("from capture.errors import FileFormatError as E; raise E('a.json: not JSON')", 2, "a.json: not JSON"),
    ("from capture.errors import JournalError as E; raise E('x: no journal')", 2, "x: no journal"),
    ("raise PermissionError(13, 'Permission denied', 'x/y')", 2, "x/y: Permission denied"),
    ("raise OSError(28, 'No space left on device', 'rows')", 2, "rows: No space left on device"),
    ("raise ZeroDivisionError('by zero')", 70, "this should not have happened (ZeroDivisionError: by zero). "
     "Run it again with BENCH_DEBUG=1 and report what it prints."),
    ("raise FileNotFoundError(2, 'No such file', 'ours')", 70, "this should not have happened (FileNotFoundError"),
)  # fmt: skip
#: Every error at one door, and at the others one that can be helped and one that is a bug.
AT_DOORS = [("bench", *error) for error in ERRORS] + [
    (door, *ERRORS[number]) for door in DOORS if door != "bench" for number in (0, 4)
]


@pytest.mark.parametrize(("door", "error", "code", "sentence"), AT_DOORS)
def test_an_error_is_the_same_sentence_at_every_door(
    tmp_path: Path, door: str, error: str, code: int, sentence: str
) -> None:
    done = enter(door, tmp_path, AT_IMPORT=LOADED[door][-1], DO=error)
    assert (done.returncode, done.stdout) == (code, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"{door.removeprefix('python -m ')}: {sentence}")


def test_bench_debug_shows_where_a_bug_is(tmp_path: Path) -> None:
    done = enter("bench", tmp_path, AT_IMPORT="orjson", DO="raise ZeroDivisionError", BENCH_DEBUG="1")
    assert done.returncode == 1 and "Traceback" in done.stderr and "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["train", "--help"], ["train", "token-coverage", "."]])
def test_a_closed_reader_gives_no_traceback(tmp_path: Path, words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench.py"), *words], stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path,
        text=True, timeout=60,
    )  # fmt: skip
    os.close(writer)
    assert done.returncode in (0, 1)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize("app", [bench.commands(), train.__main__.commands()], ids=["bench", "train"])
def test_a_lazy_commands_summary_is_its_own_first_sentence(app: object) -> None:
    def walk(command: object) -> None:
        for below in getattr(command, "commands", {}).values():
            if isinstance(below, LazyCommand):
                loaded = below.load()
                part = re.split(r"(?<=\.)\s", " ".join(loaded.help.split()))[0]
                assert below.help == part
                walk(loaded)

    walk(get_command(app))  # type: ignore[arg-type]


@pytest.mark.parametrize("door", ["bench", "python -m sandbox", "python -m proxy"])
@pytest.mark.parametrize("code", ["raise AttributeError('numpy')", "raise OSError('libz.so: cannot open')", ""])
def test_a_package_that_is_broken_is_named(tmp_path: Path, door: str, code: str) -> None:
    """It is no bug to report. The last one is half installed: a folder without its modules."""
    package = {"bench": "typer", "python -m sandbox": "docker", "python -m proxy": "prometheus_client"}[door]
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(code)
    done = enter(door, tmp_path)
    assert done.returncode == 2 and f"the package {package}, which this command needs" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and "report" not in done.stderr
