"""`python -m train`: the same commands as `bench train`, and `view`."""

from __future__ import annotations

from capture.command.edge import run

TYPE_CHECKING = False  # typing takes milliseconds in which Ctrl-C is not handled yet
if TYPE_CHECKING:
    from typing import NoReturn

    import typer


def main() -> NoReturn:
    run("python -m train", commands)


def commands() -> typer.Typer:
    from train.cli import COMMANDS, VIEW, group

    return group((*COMMANDS, VIEW))


if __name__ == "__main__":
    main()
