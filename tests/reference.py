"""Writes docs/reference.md from the commands themselves: `make docs`. A test holds the file to it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from capture.command.lazy import LazyCommand

PREFACE = """\
# Reference

Every command and option of `bench`, written from the commands themselves by `make docs`.
`python -m proxy`, `python -m sandbox` and `python -m train` are the same commands.

Data goes to stdout, what a person reads while it runs to stderr. An error is one sentence. Exit codes: 0 for done, 2
for what could not be used (an option, a file, a machine without Docker), 70 for a bug of ours (`BENCH_DEBUG=1` shows
where), 130 after Ctrl-C; a command that has codes of its own says so below.
"""


def render() -> str:
    from bench import commands as load

    parts = [PREFACE]
    for path, command in commands(get_command(load()), "bench"):
        parts.append(f"## {path}\n")
        parts.append(inspect.cleandoc(command.help or "").replace("\b", "").strip() + "\n")
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        if arguments:
            parts.append(f"`{path} {' '.join(said_name(p) for p in arguments)}`\n")
        rows = [row(parameter) for parameter in command.params if shown(parameter)]
        if rows:
            parts.append(
                "\n".join(["| option | what it does | default | environment |", "|---|---|---|---|", *rows]) + "\n"
            )
    return "\n".join(parts)


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every command that does something, groups opened: `bench train stream`."""
    command = command.load() if isinstance(command, LazyCommand) else command
    below = getattr(command, "commands", {})
    if not below:
        yield path, command
    for name in below:
        if not below[name].hidden:
            yield from commands(below[name], f"{path} {name}")


def shown(parameter: Any) -> bool:
    return parameter.name != "help" and not getattr(parameter, "hidden", False)


def said_name(argument: Any) -> str:
    return str(argument.metavar or argument.name).upper()


def row(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if parameter.param_type_name == "argument":
        names = f"`{said_name(parameter)}`"
    what = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    default = parameter.default
    said = "" if default in (None, "", False, [], ()) or callable(default) else f"`{default}`"
    if parameter.required:
        said = "required"
    environment = parameter.envvar
    variables = [environment] if isinstance(environment, str) else list(environment or [])
    return f"| {names} | {what} | {said} | {', '.join(f'`{name}`' for name in variables)} |"


if __name__ == "__main__":
    sys.stdout.write(render())
