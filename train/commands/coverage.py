"""`bench train token-coverage`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import orjson
import typer

from train.tokens.coverage import biased, coverage, total
from train.tokens.tokenizer import load_decoder


def token_coverage(
    path: Annotated[Path, typer.Argument(help="A job folder, a rollout, a proxy's output folder, or a journal.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with everything that is known.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="For each break: the token, both sides, the cause, what to change.")
    ] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A folder with tokenizer.json: breaks are shown, and judged, as text too.")
    ] = None,
) -> None:
    """Say for each rollout whether its log holds exactly what was sampled, as one token sequence.

    A rollout is training-grade when every call of the agent's own has its prompt ids, its sampled ids and one logprob
    each, and every prompt begins with the prompt and the sampled ids of the call it continues. That call may be any
    earlier one of the session, the longest that the prompt begins with: "the previous call" is the one before it in its
    own thread.

    Exit codes: 0, also where nothing is training-grade; 2 no such path.
    """
    decoder = load_decoder(tokenizer) if tokenizer is not None else None
    good = seen = 0
    biases: list[list[str]] = []
    opening = '{"per_rollout": ['
    for one in coverage(path, decoder=decoder, on_warning=lambda text: typer.echo(text, err=True), explained=explain):
        if as_json:
            told = one.to_json() | ({"explained": one.explained} if explain else {})
            typer.echo(f"{',' if seen else opening}\n{orjson.dumps(told).decode()}", nl=False)
        else:
            typer.echo(one.line)
            for line in one.explained if explain else ():
                typer.echo(f"     {line}")
        seen += 1
        good += one.training_grade
        biases += [one.biases] if one.biases else []
    if as_json:
        typer.echo(f'{"" if seen else opening}\n], "rollouts": {seen}, "training_grade_rollouts": {good}}}')
    else:
        typer.echo(total(good, seen))
        if biases and not explain:
            typer.echo(biased(len(biases), list(dict.fromkeys(word for words in biases for word in words))), err=True)
    if not seen:
        typer.echo(f"there is no rollout and no journal in {path}", err=True)
