"""`bench train ...`: the commands of this package, each of which is loaded when it is used."""

from __future__ import annotations

from collections.abc import Iterable

import typer

from capture.command.lazy import add_lazy

#: Name, function or group, and help of each command of `bench train`.
COMMANDS = (
    (
        "stream",
        "train.commands.stream:stream_command",
        "Print one JSON line per finished rollout, and keep watching until the job ends.",
    ),
    (
        "token-coverage",
        "train.commands.coverage:token_coverage",
        "Show for each rollout whether its log has exactly what was sampled, as one token sequence.",
    ),
    (
        "convert",
        "train.commands.convert:convert_command",
        "Write finished rollouts as rows that a trainer loads.",
    ),
    (
        "validate",
        "train.commands.validate:validate_command",
        "Check a file of rows; with a tokenizer, render each and compare it with the ids that were captured.",
    ),
    (
        "audit",
        "train.commands.audit:audit_command",
        "Recompute the logprobs of captured calls with transformers, and compare.",
    ),
    (
        "run",
        "train.commands.sft:run_app",
        "Start your own trainer on finished rollouts.",
    ),
)
#: `bench view`, next to `bench train`.
VIEW = (
    "view",
    "train.view.cli:view",
    "See the tokens: what was sampled, how sure the model was, what trains, where and why a sequence breaks.",
)


def group(commands: Iterable[tuple[str, str, str]]) -> typer.Typer:
    """A command line of these commands."""
    app = typer.Typer(
        help="Turn logs into trainer input: coverage, streams, groups with advantages, rows.",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name, target, summary in commands:
        add_lazy(app, name, target, summary)
    return app


app = group(COMMANDS)
