"""TOML out: what `tomllib` reads, written again; enough for a trainer's configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from train.errors import BadInput


def dumps(table: Mapping[str, Any]) -> str:
    """`table` as TOML: plain values first, then tables, then arrays of tables. None is left out, TOML has no null."""
    return "\n".join(_lines(table, ())).strip() + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    lines: list[str] = []
    below: list[str] = []
    for name, value in table.items():
        where = (*path, _key(name))
        if value is None:
            continue
        if isinstance(value, Mapping):
            below += ["", f"[{'.'.join(where)}]", *_lines(value, where)]
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for item in value:
                below += ["", f"[[{'.'.join(where)}]]", *_lines(item, where)]
        else:
            lines.append(f"{_key(name)} = {_value(value)}")
    return lines + below


def _key(name: str) -> str:
    plain = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if plain else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which JSON leaves as it is, and for pairs of surrogates.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(name)} = {_value(item)}" for name, item in value.items()) + " }"
    return str(value)  # dates and times, which print as TOML writes them


def put(table: dict[str, Any], dotted: str, value: Any) -> None:
    """Sets `a.b.c` in a nested table. Raises `BadInput` where a plain value stands on the way."""
    *path, last = dotted.split(".")
    at = table
    for name in path:
        at = at.setdefault(name, {})
        if not isinstance(at, dict):
            raise BadInput(f"{dotted}: {name} is a value already, not a table")
    at[last] = value
