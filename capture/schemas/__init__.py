"""The published JSON Schemas, open to new optional fields, and golden examples of what they describe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

_HERE = files(__name__)


@cache
def load(name: str) -> dict[str, Any]:
    """The schema of that name, such as `token_capture.v1`."""
    schema: dict[str, Any] = json.loads(_HERE.joinpath(f"{name}.json").read_text(encoding="utf-8"))
    return schema


def names() -> list[str]:
    return sorted(path.name.removesuffix(".json") for path in _HERE.iterdir() if path.name.endswith(".json"))


def examples(of: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Golden lines of a journal, by name; those of a stream with `of="stream"`."""
    folder = _HERE.joinpath("examples", of) if of else _HERE.joinpath("examples")
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.name.endswith(".json"):
            yield path.name.removesuffix(".json"), json.loads(path.read_text(encoding="utf-8"))
