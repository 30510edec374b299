"""`python -m proxy`: the same command as `bench proxy`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from capture.command.edge import raise_on_ctrl_c, run

if TYPE_CHECKING:
    import typer


def main() -> NoReturn:
    run("python -m proxy", command)


def command() -> typer.Typer:
    from proxy.cli import app

    raise_on_ctrl_c()
    return app


if __name__ == "__main__":
    main()
