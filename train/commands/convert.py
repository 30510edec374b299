"""`bench train convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from capture.command.terminal import echo
from train.commands.signals import exit_on_signals
from train.errors import NothingWritten
from train.groups.advantage import EPS, AdvantageKind
from train.groups.groups import DEFAULT_BY, GroupOptions, parse_group_by
from train.rollouts.purpose import HELP
from train.rows.convert import ConvertOptions, convert
from train.rows.formats import NAMES


def convert_command(
    path: Annotated[
        Path,
        typer.Argument(help="A job, a folder of jobs, one rollout, a journal, or a results.jsonl.", show_default=False),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write; for openenv-episodes a folder.")],
    format: Annotated[str, typer.Option(help=f"{', '.join(NAMES)}.")] = "prime-sft",
    row_mode: Annotated[
        str,
        typer.Option(
            help="rollout: one row per rollout (per branch of it, where all replies train); exchange: one per call; "
            "segment: one per exact part."
        ),
    ] = "rollout",
    min_reward: Annotated[float | None, typer.Option(help="Only rollouts with at least this reward.")] = None,
    include_errored: Annotated[
        bool, typer.Option("--include-errored", help="Include rollouts that were scored and ended in an error.")
    ] = False,
    group_advantage: Annotated[
        bool,
        typer.Option(
            "--group-advantage",
            help="Write whole groups only, with an advantage on every row; scored errors stay in their group.",
        ),
    ] = False,
    group_by: Annotated[str, typer.Option(help="Keys of a group: task, agent, model, task_digest, job.")] = ",".join(
        DEFAULT_BY
    ),
    group_size: Annotated[
        int | None, typer.Option(min=1, help="Rollouts per group; default: all with the same key.")
    ] = None,
    advantage: Annotated[str, typer.Option(help="grpo, dr-grpo or rloo.")] = "grpo",
    std_ddof: Annotated[
        int, typer.Option(min=0, max=1, help="1: the sample's standard deviation; 0: the population's.")
    ] = 1,
    eps: Annotated[float, typer.Option(min=0.0, help="Added to the standard deviation.")] = EPS,
    expected_rows: Annotated[
        int | None, typer.Option(min=0, help="Write nothing unless there are exactly this many rows.")
    ] = None,
    manifest: Annotated[
        Path | None, typer.Option(help="Write the counts of what was seen, written and left out to this file, as JSON.")
    ] = None,
    redact: Annotated[
        bool,
        typer.Option(
            "--redact/--no-redact", help="Replace what looks like a secret; rows of ids that have one are left out."
        ),
    ] = False,
    purpose: Annotated[str, typer.Option(help=HELP)] = "train",
    require_plain_sampling: Annotated[
        bool,
        typer.Option(
            "--require-plain-sampling",
            help="Leave out what was not sampled plainly (temperature 1, nothing cut or penalized).",
        ),
    ] = False,
) -> None:
    """Write finished rollouts as rows that a trainer loads.

    Exit codes: 0 written; 1 no rows, or not --expected-rows; 2 bad input; 143 SIGTERM. The file appears whole or not
    at all.
    """
    groups = GroupOptions(parse_group_by(group_by), group_size, cast(AdvantageKind, advantage), std_ddof, eps)
    groups.check()
    options = ConvertOptions(
        format=format,
        row_mode=row_mode,
        min_reward=min_reward,
        include_errored=include_errored,
        expected_rows=expected_rows,
        manifest=manifest,
        redact=redact,
        require_plain_sampling=require_plain_sampling,
        purpose=purpose,
        group=groups if group_advantage else None,
    )
    try:
        with exit_on_signals():
            result = convert(path, out, options, on_warning=lambda sentence: echo(sentence, err=True))
    except NothingWritten as error:
        for note in error.notes:
            echo(note, err=True)
        raise
    echo(f"Converted {result.rows} row(s) from {result.rollouts} rollout(s) -> {result.out}")
    if manifest is not None:
        echo(f"Stats: {manifest}")
    for note in result.notes:
        echo(note, err=True)
