"""`python -m train`: the same commands as `bench train`, and `view`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from capture.command.edge import run

if TYPE_CHECKING:
    import typer


def main() -> NoReturn:
    run("python -m train", commands)


def commands() -> typer.Typer:
    from train.cli import COMMANDS, VIEW, group

    return group((*COMMANDS, VIEW))


if __name__ == "__main__":
    main()
