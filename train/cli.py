"""`bench train ...`: joins the commands of this package; each module beside it registers its own."""

from __future__ import annotations

import os
import sys

import typer

from capture.errors import CaptureError
from train.commands import audit, convert, coverage, sft, stream, validate
from train.errors import TrainError
from train.view import cli as view_cli

app = typer.Typer(
    help="From logs to trainers: coverage, streams, groups with advantages, rows.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _commands in (stream, coverage, convert, validate, audit, sft):
    _commands.register(app)


def register(bench: typer.Typer) -> None:
    """Adds `train` and its commands, and `view`, to `bench`."""
    bench.add_typer(app, name="train")
    view_cli.register(bench)


def main() -> None:
    """`python -m train`. Exit codes: a command's own; 2 for what it could not use; 70 for a bug; 130 for Ctrl-C."""
    view_cli.register(app)  # `bench view` stands beside `bench train`, and so it does here
    try:
        app(prog_name="python -m train")
    except (CaptureError, TrainError) as error:
        typer.echo(f"train: {error}", err=True)
        sys.exit(getattr(error, "exit_code", 2))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if os.environ.get("BENCH_DEBUG"):
            raise
        typer.echo(
            f"train: this should not have happened ({type(error).__name__}: {error}). "
            "Run it again with BENCH_DEBUG=1 and report what it prints.",
            err=True,
        )
        sys.exit(70)
