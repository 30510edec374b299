"""`bench train audit`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import orjson
import typer

from capture.command.terminal import echo
from train.tokens.audit import BINS, Audit, audit, load_score

BAR = 40
LISTED = 10


def audit_command(
    path: Annotated[Path, typer.Argument(help="A job folder, a rollout, a proxy's output folder, or a journal.")],
    model: Annotated[Path, typer.Option(help="The policy's Hugging Face folder (config.json and weights).")],
    tolerance: Annotated[float, typer.Option(min=0.0, help="The largest allowed difference of a token.")] = 1e-3,
    limit: Annotated[int | None, typer.Option(min=1, help="Compute at most this many calls.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with every number.")] = False,
) -> None:
    """Recompute the logprobs of captured calls with transformers, and compare.

    One forward pass per token sequence, float32, on the CPU. Run it before training to see whether the engine and the
    trainer agree on the policy.

    Exit codes: 0 every call is within the tolerance; 1 some are not; 2 bad input, or the extra is missing.
    """
    found = audit(
        path, load_score(model), tolerance=tolerance, limit=limit, on_warning=lambda text: echo(text, err=True)
    )
    if as_json:
        typer.echo(orjson.dumps(found.to_json(), option=orjson.OPT_INDENT_2).decode())
    else:
        for line in report(found):
            echo(line)
    raise typer.Exit(1 if found.beyond else 0)


def report(found: Audit) -> Iterator[str]:
    """The numbers, for people."""
    if not found.calls:
        yield "no captured call was found: nothing to compare"
        return
    yield (
        f"{len(found.calls)} calls, {found.tokens} sampled tokens: largest difference {found.largest:.2g}, "
        f"mean {found.mean:.2g}"
    )
    most = max(found.histogram)
    below = 0.0
    for end, number in zip(BINS, found.histogram, strict=True):
        if number:
            name = f"{below:g} to {end:g}" if math.isfinite(end) else f"{below:g} and more"
            yield f"  {name:<16} {number:>8}  {'█' * max(1, round(BAR * number / most))}"
        below = end
    if found.skipped:
        yield f"{found.skipped} calls are not complete and were not compared"
    if found.cut:
        yield f"{found.cut} calls have logprobs after top_k, top_p or min_p and were not compared"
    beyond = found.beyond
    yield f"{len(beyond)} of {len(found.calls)} calls are beyond the tolerance of {found.tolerance:g}"
    for call in beyond[:LISTED]:
        yield (
            f"  {call.rollout} call {call.call} (line {call.line}): {call.largest:.2g} at sampled token {call.at} "
            f"(id {call.token_id}), mean {call.mean:.2g} over {call.tokens}"
        )
    if len(beyond) > LISTED:
        yield f"  and {len(beyond) - LISTED} more; --json lists all"
    yield from found.sampling
