"""`bench train ...`: joins the commands of this package; each module beside it registers its own."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import typer

from capture.errors import CaptureError
from train.errors import TrainError

app = typer.Typer(
    help="From logs to trainers: coverage, streams, groups with advantages, rows.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

#: Each has `register(app)`, which adds its commands.
MODULES = ("stream_cli", "coverage_cli", "convert_cli", "validate_cli", "audit_cli", "sft_cli")

for _name in MODULES:
    if importlib.util.find_spec(f"train.{_name}") is not None:
        importlib.import_module(f"train.{_name}").register(app)


def register(bench: typer.Typer) -> None:
    """Adds `train` and its commands to `bench`."""
    bench.add_typer(app, name="train")


def main() -> None:
    """`python -m train`. Exit codes: a command's own; 2 for what it could not use; 130 for Ctrl-C."""
    try:
        app(prog_name="train")
    except (CaptureError, TrainError) as error:
        typer.echo(f"train: {error}", err=True)
        sys.exit(getattr(error, "exit_code", 2))
    except KeyboardInterrupt:
        sys.exit(130)
