"""`bench view`."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

import typer

from capture.command.terminal import echo
from train.errors import BadInput
from train.groups.groups import GroupOptions, parse_group_by
from train.view.groups import VIEW_BY


def view(
    path: Annotated[Path, typer.Argument(help="A job folder, a rollout, a proxy's output folder, or a journal.")],
    html: Annotated[
        Path | None, typer.Option(help="Write a single file that needs no network, and serve nothing.")
    ] = None,
    max_mb: Annotated[
        int, typer.Option("--max-mb", help="How large that file may be; it says what it leaves out.")
    ] = 40,
    text: Annotated[bool, typer.Option("--text", help="Print it in the terminal, and serve nothing.")] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A folder with tokenizer.json: every id has a text then, prompts too."),
    ] = None,
    group_by: Annotated[
        str, typer.Option("--group-by", help="What rollouts have in common that are shown together.")
    ] = ",".join(VIEW_BY),
    group_size: Annotated[
        int | None, typer.Option("--group-size", min=1, help="Rollouts per group. Default: all with the same key.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    host: Annotated[str, typer.Option(help="Where to listen; beyond this machine only with --allow-network.")] = (
        "127.0.0.1"
    ),
    allow_network: Annotated[
        bool, typer.Option("--allow-network", help="Listen beyond this machine: whoever reaches it reads everything.")
    ] = False,
    no_open: Annotated[bool, typer.Option("--no-open", help="Open no browser.")] = False,
) -> None:
    """See the tokens: what was sampled, how sure the model was, what trains, where and why a sequence breaks.

    Serves a page on this machine until Ctrl-C. Reads the logs and changes nothing.

    Exit codes: 0 done; 2 what was given cannot be used: no such path, a port that is taken.
    """
    from train.view.api import View

    def say(message: str) -> None:
        echo(message, err=True)

    if html is not None and text:
        raise BadInput("give either --html or --text")
    if not is_loopback(host) and not allow_network:
        raise BadInput(
            f"--host {host} is beyond this machine, and there is no password: whoever reaches it reads every prompt "
            "and reply; add --allow-network if that is meant"
        )
    shown = View(path, tokenizer=tokenizer, grouping=GroupOptions(parse_group_by(group_by), group_size))
    if text:
        from rich.console import Console

        from train.view.terminal import print_story

        print_story(shown, Console(highlight=False), Console(highlight=False, stderr=True))
    elif html is not None:
        from train.view.export import write_html

        for line in write_html(shown, html, most=max_mb << 20):
            say(line)
    else:
        from train.view.server import serve

        serve(shown, host=host, port=port, open_browser=not no_open, say=say)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
