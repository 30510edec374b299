"""The arrows between files: `python -m tests.import_graph` prints entries per folder, upward arrows and circles.

Imports at module level and inside functions count; imports for type checkers only do not.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("capture", "proxy", "sandbox", "train")
#: The rooms of each package (its files and folders) from the ground up: a room imports rooms before it, none after it.
FLOORS = {
    "capture": (
        "errors", "command", "schemas", "sse", "json", "token_ids", "lock", "chat", "record", "unavailable", "engines",
        "breaks", "sequences", "token_in", "journal",
    ),
    "proxy": (
        "errors", "runtime", "sampling", "http", "settings", "env", "dialects", "upstream", "token_in", "sessions",
        "admin", "calls", "routes", "server", "workers", "cli",
    ),
    "sandbox": (
        "errors", "embedded_engine", "tasks", "containers", "scoring", "agents", "doctor", "rollouts", "demo", "cli",
        "service",
    ),
    "train": (
        "errors", "extras", "rollouts", "tokens", "groups", "rows", "stream", "api", "online", "prime_rl", "view",
        "commands", "cli",
    ),
}  # fmt: skip


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, anywhere in it, absolute, with its line; those for type checkers too."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield ".".join([*base, *(node.module or "").split(".")]).strip("."), node.lineno


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those below `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and getattr(child.test, "id", getattr(child.test, "attr", "")) == "TYPE_CHECKING":
            for other in child.orelse:
                yield other
                yield from _nodes(other)
            continue
        yield child
        yield from _nodes(child)


@functools.cache
def graph(package: str) -> dict[str, set[str]]:
    """For each module of a package, the modules of the same package that it imports."""
    modules = {module_name(path): path for path in files(package)}
    arrows: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in _nodes(tree(path)):
            found: Iterable[str] = ()
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                below = [f"{node.module}.{alias.name}" for alias in node.names]
                found = [full if full in modules else str(node.module) for full in below]
            arrows[name] |= {module for module in found if module in modules and module != name}
    return arrows


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import one another, directly or by way of others (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for below in sorted(arrows[name]):
            if below not in index:
                visit(below)
                low[name] = min(low[name], low[below])
            elif below in stack:
                low[name] = min(low[name], index[below])
        if low[name] == index[name]:
            members = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(members) > 1:
                found.append(sorted(members))

    for name in sorted(arrows):
        if name not in index:
            visit(name)
    return found


def upward(package: str) -> list[str]:
    """Imports that point from a room to one above it."""
    order = {room: floor for floor, room in enumerate(FLOORS[package])}
    found = []
    for name, below in graph(package).items():
        for other in below:
            here, there = (module.split(".")[1] if "." in module else "" for module in (name, other))
            if here in order and order[here] < order.get(there, -1):
                found.append(f"{name} imports {other}")
    return sorted(found)


def folder_circles(package: str) -> list[str]:
    """Folders of a package that import one another, without its first level, which `upward` covers."""
    arrows = graph(package)
    found = []
    for folder, entries in folders(package).items():
        if folder == package:
            continue
        between: dict[str, set[str]] = {entry: set() for entry in entries}
        inside = f"{folder}."
        for name, below in arrows.items():
            for other in below:
                if name.startswith(inside) and other.startswith(inside):
                    here, there = (module[len(inside) :].split(".")[0] for module in (name, other))
                    between[here] |= {there} - {here}
        found += [f"{folder}: {', '.join(members)}" for members in circles(between)]
    return found


def folders(package: str) -> dict[str, list[str]]:
    """For each folder with modules its entries: files and folders with code; `__init__` and data are left out."""
    found: dict[str, set[str]] = {}
    for path in files(package):
        parts = path.relative_to(ROOT).with_suffix("").parts
        for depth in range(1, len(parts)):
            if not parts[depth].startswith("__"):
                found.setdefault(".".join(parts[:depth]), set()).add(parts[depth])
    return {folder: sorted(names) for folder, names in sorted(found.items())}


def main() -> None:
    for package in PACKAGES:
        arrows = graph(package)
        print(f"{package}: {len(arrows)} modules, {sum(map(len, arrows.values()))} arrows")
        for folder, entries in folders(package).items():
            print(f"  {folder}: {len(entries)} entries")
        print(f"  upward: {len(upward(package))}")
        for arrow in upward(package):
            print(f"    {arrow}")
        found = [", ".join(members) for members in circles(arrows)] + folder_circles(package)
        print(f"  circles: {len(found)}")
        for circle in found:
            print(f"    {circle}")


if __name__ == "__main__":
    main()
