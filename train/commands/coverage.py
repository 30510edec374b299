"""`bench train token-coverage`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import orjson
import typer

from capture.command.terminal import echo
from train.tokens.coverage import biased, coverage, total
from train.tokens.tokenizer import load_decoder


def token_coverage(
    path: Annotated[Path, typer.Argument(help="A job folder, a rollout, a proxy's output folder, or a journal.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with everything that is known.")
    ] = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Print for each break the token, both sides, the cause and what to change."),
    ] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A folder with tokenizer.json: breaks are diagnosed and shown as text too.")
    ] = None,
) -> None:
    """Show for each rollout whether its log has exactly what was sampled, as one token sequence.

    A rollout is training-grade when each of the agent's own calls has its prompt ids, its sampled ids and one logprob
    per sampled id, and each prompt begins with the prompt and the sampled ids of the call it continues. That call may
    be any earlier one of the session, the longest that the prompt begins with: "the previous call" is the one before it
    in its own thread.

    Exit codes: 0, even if nothing is training-grade; 2 no such path.
    """
    decoder = load_decoder(tokenizer) if tokenizer is not None else None
    good = seen = 0
    biases: list[list[str]] = []
    opening = '{"per_rollout": ['
    for rollout in coverage(path, decoder=decoder, on_warning=lambda text: echo(text, err=True), explained=explain):
        if as_json:
            entry = rollout.to_json() | ({"explained": rollout.explained} if explain else {})
            typer.echo(f"{',' if seen else opening}\n{orjson.dumps(entry).decode()}", nl=False)
        else:
            echo(rollout.line)
            for line in rollout.explained if explain else ():
                echo(f"     {line}")
        seen += 1
        good += rollout.training_grade
        biases += [rollout.biases] if rollout.biases else []
    if as_json:
        typer.echo(f'{"" if seen else opening}\n], "rollouts": {seen}, "training_grade_rollouts": {good}}}')
    else:
        typer.echo(total(good, seen))
        if biases and not explain:
            typer.echo(biased(len(biases), list(dict.fromkeys(word for words in biases for word in words))), err=True)
    if not seen:
        echo(f"there is no rollout and no journal in {path}", err=True)
