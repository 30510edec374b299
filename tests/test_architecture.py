"""The arrows between rooms: imports only ever point down, and the ground floor stays pure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("capture", "proxy", "sandbox", "train")
MAY_IMPORT = {"capture": set(), "proxy": {"capture"}, "sandbox": {"capture", "proxy"}, "train": {"capture"}}
IMPURE = {
    "aiohttp", "anyio", "asyncio", "docker", "http", "httptools", "httpx", "multiprocessing", "requests", "rich",
    "socket", "starlette", "subprocess", "threading", "typer", "urllib3", "uvicorn",
}  # fmt: skip
FILE_CALLS = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "fdopen"}
#: The journal, the lock, and the published schemas, which are package data.
OPENS_FILES = {
    "capture/journal/journal.py",
    "capture/journal/files.py",
    "capture/lock.py",
    "capture/schemas/__init__.py",
}


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, anywhere in it, absolute, with its line."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield ".".join([*base, *(node.module or "").split(".")]).strip("."), node.lineno


@pytest.mark.parametrize("room", ROOMS)
def test_imports_only_point_down(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules(room)
        for name, line in imports(path)
        if name.split(".")[0] in {*ROOMS, "bench"} - {room} - MAY_IMPORT[room]
    ]
    assert not wrong


def test_the_sandbox_enters_the_proxy_by_its_public_door_only() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules("sandbox")
        for name, line in imports(path)
        if name.startswith("proxy.")
    ]
    assert not wrong


def test_capture_has_no_network_no_docker_no_command_line() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules("capture")
        for name, line in imports(path)
        if (name.split(".")[0] in IMPURE or name == "urllib.request") and path.relative_to(ROOT).parts[1] != "command"
    ]
    assert not wrong


def test_nothing_in_capture_uses_the_command_line() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules("capture")
        for name, line in imports(path)
        if name.startswith("capture.command") and path.relative_to(ROOT).parts[1] != "command"
    ]
    assert not wrong


def test_only_the_journal_and_the_lock_open_files_in_capture() -> None:
    wrong = []
    for path in modules("capture"):
        name = str(path.relative_to(ROOT))
        if name in OPENS_FILES or name.startswith("capture/command/"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called in FILE_CALLS:
                    wrong.append(f"{name}:{node.lineno} calls {called}")
    assert not wrong


@pytest.mark.parametrize("room", ROOMS)
def test_every_module_says_what_it_is_for(room: str) -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in modules(room)
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent


def test_the_rooms_are_where_this_test_looks() -> None:
    assert all(modules(room) for room in ROOMS)
