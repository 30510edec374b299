"""The page as a single file that holds its own data: for a mail, a ticket, a machine without network.

Each rollout is a compressed block, opened only when it is looked at. The page names the rollouts that did not fit.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from train.errors import BadInput, TrainError
from train.rows.atomic_file import AtomicFile
from train.view import page
from train.view.api import View, side_of, strip_of
from train.view.calls import call_view, rollout_view
from train.view.rollout_cache import Reading
from train.view.server import dumps
from train.view.token_strips import SLICE

#: Tokens up to which a file holds each call of a rollout besides its sequences: prompts repeat in calls.
ALONE: Final = 100_000
#: Bytes for the page itself and its table, roughly.
PAGE: Final = 1 << 20


def write_html(view: View, path: Path, *, most: int) -> Iterator[str]:
    """Writes the file, of at most about `most` bytes; yields sentences for the person who waits. Raises `BadInput`."""
    if path.is_dir():
        raise BadInput(f"--html {path} is a folder; give a file's name")
    view.index.scan()
    entries = view.index.entries()
    if not entries:
        raise BadInput(f"there is no rollout and no journal in {view.root}: nothing to write")
    where: dict[str, str] = {}
    left_out: dict[str, str] = {}
    blocks: list[str] = []
    room = most - PAGE
    for entry in entries:
        name = entry.rollout.rollout_path
        reading = view.index.read_one(entry)
        if reading is None:
            left_out[name] = f"Its log could not be read: {entry.summary.get('reason')}"
            continue
        block = base64.b64encode(gzip.compress(dumps(answers(reading)), 6, mtime=0)).decode()
        if len(block) > room:
            left_out[name] = (
                f"This file holds no more than {most >> 20} MB, and this rollout was left out: bench view {view.root} "
                "shows it, and --max-mb makes the file larger."
            )
            continue
        room -= len(block)
        where[name] = f"b{len(blocks)}"
        blocks.append(block)
    job = view.index.job()
    if left_out:
        job["left_out_note"] = (
            f"This file holds {len(where)} of {len(entries)} rollouts whole; of the others only their rows. "
            f"bench view {view.root} shows all of it."
        )
    with AtomicFile(path) as file:
        file.write(document(job, where, left_out, blocks).encode())
        file.commit()
    yield f"{len(where)} of {len(entries)} rollout(s) written to {path} ({path.stat().st_size / (1 << 20):.1f} MB)"
    if left_out:
        yield f"{len(left_out)} left out, each says why in the page (--max-mb {most >> 20})"


def answers(reading: Reading) -> dict[str, Any]:
    """Everything that the page can ask about a rollout, by question."""
    replies: dict[str, Any] = {"rollout": rollout_view(reading), "side": _side(reading)}
    for call in reading.tokens.calls:
        replies[f"call?call={call.number}"] = _or_error(partial(call_view, reading, call.number))
    for of in _strips(reading):
        strip = strip_of(reading, of)
        replies[f"strip?of={of}"] = strip.index
        for start in range(0, len(strip.ids), SLICE):
            replies[f"slice?of={of}&from={start}"] = strip.slice(start, start + SLICE)
    return replies


def document(job: dict[str, Any], where: dict[str, str], left_out: dict[str, str], blocks: list[str]) -> str:
    """The text of the file. Text of models is only in compressed blocks and in escaped JSON."""
    style = page.style()
    index = dumps({"job": job, "where": where, "left_out": left_out}).decode().replace("<", "\\u003c")
    data = f'<script type="application/json" id="index">{index}</script>\n'
    data += "".join(
        f'<script type="text/plain" id="b{number}">{block}</script>\n' for number, block in enumerate(blocks)
    )
    return page.html(
        style_tag=f"<style>{style}</style>",
        data_tags=data,
        scripts=page.scripts(inline=True),
        csp=(
            f"default-src 'none'; script-src {page.script_policy(inline=True)}; style-src {page.hash_of(style)}; "
            "img-src data:; base-uri 'none'; form-action 'none'"
        ),
        title=f"{job['name']} - bench view",
    )


def _strips(reading: Reading) -> list[str]:
    """The sequences; and calls alone where that is little, or where no sequence holds what they sampled."""
    sampled_in_sequences = {
        (stretch.call, stretch.choice)
        for number in range(len(reading.tokens.segments))
        for stretch in strip_of(reading, f"s{number}").stretches
    }
    alone: list[tuple[bool, str, int]] = []
    for call in reading.tokens.calls:
        for position, choice in enumerate(call.capture.completions if call.capture is not None else ()):
            prompt = len((call.capture.prompt_token_ids if call.capture else None) or ())
            tokens = prompt + len(choice.token_ids or choice.tokens or ())
            alone.append(((call.number, position) in sampled_in_sequences, f"c{call.number}.{position}", tokens))
    few = sum(tokens for _, _, tokens in alone) <= ALONE
    return [f"s{number}" for number in range(len(reading.tokens.segments))] + [
        of for elsewhere, of, _ in alone if few or not elsewhere
    ]


def _side(reading: Reading) -> dict[str, Any]:
    side, ids = side_of(reading)
    return side | {"ids": ids.tolist()}


def _or_error(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return make()
    except TrainError as error:
        return {"error": str(error)}
