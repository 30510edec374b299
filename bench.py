"""The `bench` command: joins the commands of the packages, each of which is loaded when it is used. No logic."""

from __future__ import annotations

from capture.command.edge import run

TYPE_CHECKING = False  # typing takes milliseconds in which Ctrl-C is not handled yet
if TYPE_CHECKING:
    from typing import NoReturn

    import typer


def main() -> NoReturn:
    run("bench", commands)


def commands() -> typer.Typer:
    """The command line of `bench`."""
    import typer  # not before Ctrl-C is handled

    from capture.command.lazy import add_lazy
    from train.cli import VIEW

    app = typer.Typer(
        name="bench",
        help="Run agents, capture exactly what their model sampled, and hand it to a trainer.",
        no_args_is_help=True,
        rich_markup_mode=None,  # its boxes cut the names of options and variables at 80 columns
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def options(
        version: bool = typer.Option(
            False, "--version", callback=print_version, is_eager=True, help="Print the version and stop."
        ),
    ) -> None: ...

    for name, target, summary in (
        (
            "proxy",
            "proxy.cli:proxy",
            "Proxy agents' calls to their engine, and record every token that was sampled.",
        ),
        ("run", "sandbox.cli:run_command", "Run agents on tasks in Docker sandboxes, and score them."),
        (
            "serve",
            "sandbox.service.cli:serve_command",
            "Offer rollouts over HTTP to a trainer: groups of one task, scored, with exact tokens and advantages.",
        ),
        ("doctor", "sandbox.doctor:doctor_command", "Check this machine: Docker, disk, network, engine, agents."),
        (
            "demo",
            "sandbox.cli:demo_command",
            "Run the whole loop on this machine: a real model, rollouts, rewards, and rows for a trainer.",
        ),
        VIEW,
        ("tasks", "sandbox.cli:tasks_app", "Check or create a task folder."),
        ("agents", "sandbox.cli:agents_app", "List agents, or build images with one installed."),
        ("train", "train.cli:app", "Turn logs into trainer input: coverage, streams, groups with advantages, rows."),
    ):
        add_lazy(app, name, target, summary)
    return app


def print_version(wanted: bool) -> None:
    if not wanted:
        return
    from importlib.metadata import PackageNotFoundError, version

    import typer

    try:
        typer.echo(f"bench {version('benchflow-sidecar')}")
    except PackageNotFoundError:
        typer.echo("bench (not installed)")
    raise typer.Exit


if __name__ == "__main__":
    main()
