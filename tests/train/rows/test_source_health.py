"""The logs behind rows, as `bench train validate --source-jobs` reports them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.train.build import conversation, make_job
from tests.train.conversion import options
from train.cli import app
from train.rows.convert import convert


def validate(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["validate", *map(str, words), "--format", "trl-sft"])


def torn() -> bytes:
    return b"".join(json.dumps(call).encode() + b"\n" for call in conversation(2))[:-200]


@pytest.mark.parametrize(
    ("spec", "counts"),
    [
        ({}, (2, 0, 0)),
        ({"calls": None}, (2, 1, 0)),
        ({"journal": b""}, (2, 0, 1)),
        ({"journal": b"{}\nnot json\n"}, (2, 0, 1)),
        ({"journal": torn()}, (2, 0, 1)),
        ({"calls": None, "finished": False}, (1, 0, 0)),
    ],
)
def test_missing_and_malformed_logs_are_counted_and_can_fail(
    tmp_path: Path, spec: dict[str, Any], counts: tuple[int, int, int]
) -> None:
    job = make_job(tmp_path / "job", [{}, spec])
    rows = tmp_path / "rows.jsonl"
    convert(job / next(path.name for path in sorted(job.iterdir()) if path.is_dir()), rows, options())
    report = json.loads(validate(rows, "--source-jobs", job).stdout)
    ok = not any(counts[1:])
    names = ("rollouts", "missing_llm_trajectory", "malformed_llm_trajectory")
    assert report["ok"] and report["source_health"] == {"ok": ok, **dict(zip(names, counts, strict=True))}
    strict = validate(rows, "--source-jobs", job, "--require-llm-trajectory")
    assert strict.exit_code == (0 if ok else 1)
    assert ("source jobs contain missing/malformed llm_trajectory.jsonl" in strict.stderr) is not ok


def test_without_source_jobs_there_is_nothing_to_require(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    convert(make_job(tmp_path / "job", [{}]), rows, options())
    assert "source_health" not in json.loads(validate(rows).stdout)
    assert "--require-llm-trajectory requires --source-jobs" in str(
        validate(rows, "--require-llm-trajectory").exception
    )
    assert "--tokenizer-revision requires" in str(validate(rows, "--tokenizer-revision", "main").exception)
