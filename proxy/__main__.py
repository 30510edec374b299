"""`python -m proxy`: the same command as `bench proxy`."""

from __future__ import annotations

from capture.command.edge import raise_on_ctrl_c, run

TYPE_CHECKING = False  # typing takes milliseconds in which Ctrl-C is not handled yet
if TYPE_CHECKING:
    from typing import NoReturn

    import typer


def main() -> NoReturn:
    run("python -m proxy", command)


def command() -> typer.Typer:
    from proxy.cli import app

    raise_on_ctrl_c()
    return app


if __name__ == "__main__":
    main()
