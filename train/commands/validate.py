"""`bench train validate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import orjson
import typer

from capture.command.terminal import echo
from train.rows.formats import NAMES
from train.rows.validate import Report, validate

#: This many problems are printed; the report on stdout has more, and counts all.
PRINTED = 20


def validate_command(
    file: Annotated[Path, typer.Argument(help="File of rows, or the folder it is in.", show_default=False)],
    format: Annotated[str, typer.Option(help=f"{', '.join(NAMES)}.")] = "prime-sft",
    tokenizer: Annotated[
        str | None,
        typer.Option(help="A folder with the model's tokenizer, or its name: render the rows, count, and compare."),
    ] = None,
    tokenizer_revision: Annotated[
        str | None, typer.Option(help="Revision of a tokenizer that is named: a branch, a tag or a commit.")
    ] = None,
    source_jobs: Annotated[
        Path | None, typer.Option(help="The converted folder, if it is no longer where the rows say.")
    ] = None,
    expected_rows: Annotated[
        int | None, typer.Option(min=0, help="Fail unless there are exactly this many rows.")
    ] = None,
    require_tool_calls: Annotated[
        bool, typer.Option("--require-tool-calls", help="Fail unless every row calls a tool.")
    ] = False,
    require_llm_trajectory: Annotated[
        bool,
        typer.Option("--require-llm-trajectory", help="Fail if a rollout of --source-jobs has no readable log."),
    ] = False,
    max_length: Annotated[int | None, typer.Option(help="Fail if a row has more tokens.")] = None,
) -> None:
    """Check a file of rows; with a tokenizer, render each and compare it with the ids that were captured.

    Prints a report as JSON. Exit codes: 0 all rows are valid; 1 some are not; 2 the file cannot be checked.
    """
    report = validate(
        file,
        format,
        tokenizer=tokenizer,
        tokenizer_revision=tokenizer_revision,
        source_jobs=source_jobs,
        expected_rows=expected_rows,
        require_tool_calls=require_tool_calls,
        require_llm_trajectory=require_llm_trajectory,
        max_length=max_length,
    )
    typer.echo(orjson.dumps(report.to_json(), option=orjson.OPT_INDENT_2).decode())
    for sentence in sentences(report):
        echo(sentence, err=True)
    if not report.ok:
        raise typer.Exit(1)


def sentences(report: Report) -> list[str]:
    """What a person reads: the problems, and where rows and captures differ."""
    lines = report.problems[:PRINTED]
    if report.problem_count > len(lines):
        lines.append(f"and {report.problem_count - len(lines)} more problem(s)")
    if report.valid_as:
        lines.append(f"row 1 is a valid row of {' or '.join(report.valid_as)}: give that as --format")
    for difference in report.differences[:PRINTED]:
        texts = ""
        if "captured_text" in difference:
            captured, rendered = difference["captured_text"], difference["rendered_text"]
            texts = f" after {difference['before_text']!r}: {captured!r} was captured, {rendered!r} is rendered"
        lines.append(
            f"row {difference['row']}: differs from the captured ids at index {difference['index']}, "
            f"in the {difference['in']}{texts}"
        )
    if report.different > len(report.differences[:PRINTED]):
        lines.append(f"and {report.different - PRINTED} more row(s) differ")
    return lines
