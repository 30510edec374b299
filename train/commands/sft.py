"""`bench train run sft`: the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from train.commands.signals import taken_away_on_signals
from train.errors import NothingWritten
from train.prime_rl.launch import Plan, launch, prepare
from train.rows.convert import Options

run_app = typer.Typer(
    help="Start a trainer of yours on finished rollouts.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)


@run_app.callback()
def _group() -> None:
    """Start a trainer of yours on finished rollouts."""


@run_app.command("sft")
def sft_command(
    path: Annotated[
        Path | None, typer.Argument(help="A job, a folder of jobs, or one rollout.", show_default=False)
    ] = None,
    prime_rl_dir: Annotated[Path, typer.Option(help="Your checkout of Prime-RL.")] = Path(),
    model: Annotated[str | None, typer.Option("--model", "-m", help="The model, as Prime-RL names it.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file for Prime-RL; options here go over it.")] = None,
    data: Annotated[Path | None, typer.Option(help="Rows that are there already, instead of PATH.")] = None,
    work_dir: Annotated[Path, typer.Option(help="Where rows, configuration and train-run.json are written.")] = Path(
        "train-runs/sft"
    ),
    output_dir: Annotated[Path | None, typer.Option(help="Its own folder; default WORK_DIR/prime-rl.")] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Steps to train.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens of a packed sequence.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences of a step.")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences at once on a GPU.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    override: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of the TOML, as ckpt.interval=50.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only rollouts with at least this reward.")] = None,
    include_errored: Annotated[
        bool, typer.Option("--include-errored", help="Also rollouts that were scored and ended in an error.")
    ] = False,
    redact: Annotated[bool, typer.Option("--redact", help="Replace what looks like a secret in the rows.")] = False,
    expected_rows: Annotated[int | None, typer.Option(min=0, help="Stop unless there are so many rows.")] = None,
    uv_no_sync: Annotated[bool, typer.Option("--uv-no-sync", help="uv run --no-sync.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write everything, start nothing.")] = False,
) -> None:
    """Supervised fine-tuning with Prime-RL: write rows (one a branch) and a TOML, run `uv run sft` in its checkout.

    Exit codes: the trainer's own; 1 no row; 2 bad input, or no uv.
    """
    options = Options(
        format="prime-sft",
        min_reward=min_reward,
        include_errored=include_errored,
        redact=redact,
        expected_rows=expected_rows,
    )
    plan = Plan(
        checkout=prime_rl_dir, work_dir=work_dir, source=path, data=data, config=config, output_dir=output_dir,
        model=model, max_steps=max_steps, seq_len=seq_len, batch_size=batch_size, micro_batch_size=micro_batch_size,
        lr=lr, overrides=override or [], uv_no_sync=uv_no_sync, options=options,
    )  # fmt: skip

    def warn(sentence: str) -> None:
        typer.echo(sentence, err=True)

    try:
        with taken_away_on_signals():
            prepared = prepare(plan, warn)
    except NothingWritten as error:
        for sentence in error.told:
            warn(sentence)
        raise
    if prepared.converted is not None:
        made = prepared.converted
        warn(f"Converted {made.rows} row(s) from {made.rollouts} rollout(s) -> {made.out}")
        for sentence in made.told:
            warn(sentence)
    if dry_run:
        typer.echo((work_dir / "command.txt").read_text(encoding="utf-8").rstrip("\n"))
        return
    code = launch(prepared, typer.echo)
    if code:
        warn(f"Prime-RL SFT failed with exit code {code}; see {prepared.manifest}")
    raise typer.Exit(code)
