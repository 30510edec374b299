"""`bench train run sft`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capture.command.terminal import echo
from train.commands.signals import exit_on_signals
from train.errors import NothingWritten
from train.prime_rl.launch import SftOptions, launch, prepare
from train.rows.convert import ConvertOptions

run_app = typer.Typer(
    help="Start your own trainer on finished rollouts.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)


@run_app.callback()
def _group() -> None:
    """Start your own trainer on finished rollouts."""


@run_app.command("sft")
def sft_command(
    path: Annotated[
        Path | None, typer.Argument(help="A job, a folder of jobs, or one rollout.", show_default=False)
    ] = None,
    prime_rl_dir: Annotated[Path, typer.Option(help="Your checkout of Prime-RL.")] = Path(),
    model: Annotated[str | None, typer.Option("--model", "-m", help="The model, as Prime-RL names it.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file for Prime-RL; options given here override it.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Rows that exist already, instead of PATH.")] = None,
    work_dir: Annotated[Path, typer.Option(help="Folder for rows, configuration and train-run.json.")] = Path(
        "train-runs/sft"
    ),
    output_dir: Annotated[
        Path | None, typer.Option(help="Prime-RL's output folder; default WORK_DIR/prime-rl.")
    ] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens per packed sequence.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences per step.")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences per GPU at a time.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    override: Annotated[
        list[str] | None, typer.Option(help="A setting of the TOML, NAME=VALUE, as ckpt.interval=50.")
    ] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only rollouts with at least this reward.")] = None,
    include_errored: Annotated[
        bool, typer.Option("--include-errored", help="Include rollouts that were scored and ended in an error.")
    ] = False,
    redact: Annotated[bool, typer.Option("--redact", help="Replace what looks like a secret in the rows.")] = False,
    expected_rows: Annotated[
        int | None, typer.Option(min=0, help="Stop unless there are exactly this many rows.")
    ] = None,
    uv_no_sync: Annotated[bool, typer.Option("--uv-no-sync", help="Run uv with --no-sync.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write all files, but start nothing.")] = False,
) -> None:
    """Supervised fine-tuning with Prime-RL: write rows and a TOML, then run `uv run sft` in its checkout.

    Exit codes: the trainer's own; 1 no rows; 2 bad input, or uv is not installed.
    """
    rows = ConvertOptions(
        format="prime-sft",
        min_reward=min_reward,
        include_errored=include_errored,
        redact=redact,
        expected_rows=expected_rows,
    )
    options = SftOptions(
        checkout=prime_rl_dir, work_dir=work_dir, source=path, data=data, config=config, output_dir=output_dir,
        model=model, max_steps=max_steps, seq_len=seq_len, batch_size=batch_size, micro_batch_size=micro_batch_size,
        lr=lr, overrides=override or [], uv_no_sync=uv_no_sync, convert=rows,
    )  # fmt: skip

    def warn(sentence: str) -> None:
        echo(sentence, err=True)

    try:
        with exit_on_signals():
            prepared = prepare(options, warn)
    except NothingWritten as error:
        for note in error.notes:
            warn(note)
        raise
    if prepared.converted is not None:
        result = prepared.converted
        warn(f"Converted {result.rows} row(s) from {result.rollouts} rollout(s) -> {result.out}")
        for note in result.notes:
            warn(note)
    if dry_run:
        typer.echo((work_dir / "command.txt").read_text(encoding="utf-8").rstrip("\n"))
        return
    code = launch(prepared, typer.echo)
    if code:
        warn(f"Prime-RL SFT failed with exit code {code}; see {prepared.manifest}")
    raise typer.Exit(code)
