"""`bench train convert` as the tests of rows call it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from train.cli import app
from train.rows.convert import ConvertOptions


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["convert", *(str(argument) for argument in arguments)])


def options(**fields: Any) -> ConvertOptions:
    return ConvertOptions(**{"format": "trl-sft", **fields})


def notes_of(result: Any) -> str:
    return "\n".join(result.notes)


def results_line(**fields: Any) -> dict[str, Any]:
    row = {
        "example_id": 0,
        "prompt": [{"role": "user", "content": "Write 42."}],
        "completion": [{"role": "assistant", "content": "ok"}, {"role": "assistant", "content": "done"}],
        "info": {"task_id": "write-number", "agent": "pi-acp", "training_ready": True, "schema_version": 2},
        "reward": 1.0,
        "error": None,
        "is_completed": True,
    }
    return row | fields
