"""The `bench` command: joins the commands of the packages below and says their errors in one sentence. No logic."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version

import typer

from capture.errors import CaptureError
from proxy.cli import register as register_proxy
from proxy.errors import ProxyError
from sandbox.cli import register as register_sandbox
from sandbox.errors import SandboxError
from train.cli import register as register_train
from train.errors import TrainError

app = typer.Typer(
    name="bench",
    help="Run agents, capture exactly what their model sampled, and hand it to a trainer.",
    no_args_is_help=True,
    rich_markup_mode=None,  # its boxes cut the names of options and variables at 80 columns
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Exit codes: a command's own; 2 for what it could not use; 70 for a bug of ours; 130 for Ctrl-C."""
    try:
        app(prog_name="bench")
    except (CaptureError, ProxyError, SandboxError, TrainError) as error:
        print(f"bench: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(getattr(error, "exit_code", 2))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if os.environ.get("BENCH_DEBUG"):
            raise
        print(  # noqa: T201
            f"bench: this should not have happened ({type(error).__name__}: {error}). "
            "Run it again with BENCH_DEBUG=1 and report what it prints.",
            file=sys.stderr,
        )
        sys.exit(70)


def print_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        typer.echo(f"bench {version('benchflow-sidecar')}")
    except PackageNotFoundError:
        typer.echo("bench (not installed)")
    raise typer.Exit


@app.callback()
def options(
    show_version: bool = typer.Option(
        False, "--version", callback=print_version, is_eager=True, help="Print the version and stop."
    ),
) -> None:
    """Run agents, capture exactly what their model sampled, and hand it to a trainer."""


register_proxy(app)
register_sandbox(app)
register_train(app)

if __name__ == "__main__":
    main()
