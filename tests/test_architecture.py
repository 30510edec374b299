"""Imports only ever point down, between packages and inside them, and the ground floor stays pure."""

from __future__ import annotations

import ast

import pytest

from tests.import_graph import (
    FLOORS,
    PACKAGES,
    ROOT,
    circles,
    files,
    folder_circles,
    folders,
    graph,
    imports,
    tree,
    upward,
)

MAY_IMPORT = {"capture": set(), "proxy": {"capture"}, "sandbox": {"capture", "proxy", "train"}, "train": {"capture"}}
IMPURE = {
    "aiohttp", "anyio", "asyncio", "docker", "http", "httptools", "httpx", "multiprocessing", "requests", "rich",
    "socket", "starlette", "subprocess", "threading", "typer", "urllib3", "uvicorn",
}  # fmt: skip
#: Entries in one folder at most. A package, or a folder of variants such as agents, may reach it; others are smaller.
MOST_ENTRIES = 18
FILE_CALLS = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "fdopen"}
#: The journal, the lock, and the published schemas, which are package data.
OPENS_FILES = {
    "capture/journal/journal.py",
    "capture/journal/files.py",
    "capture/lock.py",
    "capture/schemas/__init__.py",
}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_only_point_down(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files(package)
        for name, line in imports(path)
        if name.split(".")[0] in {*PACKAGES, "bench"} - {package} - MAY_IMPORT[package]
    ]
    assert not wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_import_only_rooms_below_them(package: str) -> None:
    assert upward(package) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_has_its_place_in_the_order(package: str) -> None:
    assert set(folders(package)[package]) == set(FLOORS[package]), "add the new room to FLOORS in tests/import_graph.py"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_files_and_no_folders_import_one_another(package: str) -> None:
    assert circles(graph(package)) == []
    assert folder_circles(package) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_is_seen_at_a_glance(package: str) -> None:
    assert {folder: len(names) for folder, names in folders(package).items() if len(names) > MOST_ENTRIES} == {}


def test_only_the_rollout_service_of_the_sandbox_needs_what_trainers_read() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files("sandbox")
        for name, line in imports(path)
        if name.split(".")[0] == "train" and "service" not in path.parts
    ]
    assert not wrong


def test_the_sandbox_enters_the_proxy_by_its_public_door_only() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files("sandbox")
        for name, line in imports(path)
        if name.startswith("proxy.")
    ]
    assert not wrong


def test_capture_has_no_network_no_docker_no_command_line() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files("capture")
        for name, line in imports(path)
        if (name.split(".")[0] in IMPURE or name == "urllib.request") and path.relative_to(ROOT).parts[1] != "command"
    ]
    assert not wrong


def test_nothing_in_capture_uses_the_command_line() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files("capture")
        for name, line in imports(path)
        if name.startswith("capture.command") and path.relative_to(ROOT).parts[1] != "command"
    ]
    assert not wrong


def test_only_the_journal_and_the_lock_open_files_in_capture() -> None:
    wrong = []
    for path in files("capture"):
        name = str(path.relative_to(ROOT))
        if name in OPENS_FILES or name.startswith("capture/command/"):
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called in FILE_CALLS:
                    wrong.append(f"{name}:{node.lineno} calls {called}")
    assert not wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_says_what_it_is_for(package: str) -> None:
    silent = [str(path.relative_to(ROOT)) for path in files(package) if not ast.get_docstring(tree(path))]
    assert not silent


def test_the_rooms_are_where_this_test_looks() -> None:
    assert all(files(package) for package in PACKAGES)
