"""Commands whose modules are loaded when they are used: `bench --help` needs none of them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from capture.command.edge import raise_on_ctrl_c


def add_lazy(app: typer.Typer, name: str, target: str, summary: str) -> None:
    """Adds a command to `app`. `target` is `module:name` of a function or of another `Typer`; `summary` is its help."""

    class Lazy(LazyCommand):
        loads = target

    @app.command(name, cls=Lazy, help=summary)
    def placeholder() -> None: ...


class LazyCommand(TyperCommand):
    """Stands for a command in lists and help texts; `load` gives the command itself."""

    loads: str

    def load(self) -> Any:
        module, _, name = self.loads.partition(":")
        found = getattr(import_module(module), name)
        if isinstance(found, typer.Typer):
            return get_command(found)
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(self.name)(found)
        return get_command(app)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        command = self.load()
        raise_on_ctrl_c()
        return command.make_context(info_name, args, parent=parent, **extra)
