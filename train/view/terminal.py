"""`bench view --text`: a line a rollout, its calls as a tree, and its tokens coloured by how likely each was."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from capture.errors import CaptureError
from train.tokens.coverage import explain_break, line_of
from train.view.api import View
from train.view.rollout_cache import Reading
from train.view.token_strips import PROBABILITY, Strip, segment_strip, shown_token, step
from train.view.token_text import Part, plain

#: Backgrounds and foregrounds of the 256 colours of a terminal, from likely to unlikely.
_COLOURS: Final = ("", "48;5;229;38;5;16", "48;5;222;38;5;16", "48;5;215;38;5;16", "48;5;209;38;5;16",
                   "48;5;203;38;5;16", "48;5;161;38;5;231", "48;5;90;38;5;231")  # fmt: skip
_DIM, _BOLD, _END = "\x1b[2m", "\x1b[1m", "\x1b[0m"
#: Without colours a token less likely than this is followed by its probability.
UNLIKELY: Final = 0.05
ENDS: Final = ("90%", "60%", "35%", "15%", "5%", "1%", "0.1%", "")


def print_story(view: View, *, colour: bool) -> None:
    """Prints to standard output, a rollout at a time."""
    view.index.scan()
    for line in story(view, colour=colour):
        sys.stdout.write(line + "\n")
    for note in view.index.notes:
        sys.stderr.write(note + "\n")


def story(view: View, *, colour: bool) -> Iterator[str]:
    """Lines without their ends. Model text comes through `shown`: no escape of its own reaches the terminal."""
    entries = view.index.entries()
    if not entries:
        yield f"there is no rollout and no journal in {view.root}"
    elif colour:
        yield _legend()
    for entry in entries:
        rollout = entry.rollout
        try:
            reading = view.readings.once(rollout)
        except CaptureError as error:
            yield f"\n{_bold(rollout.rollout_path, colour)}\nno   {error}"
            continue
        reward = "–" if rollout.reward is None else f"{rollout.reward:g}"
        yield f"\n{_bold(rollout.rollout_path, colour)}  reward {reward}  {rollout.outcome}"
        yield line_of(rollout.name, reading.tokens.coverage)
        yield from _tree(reading)
        for number, one in enumerate(reading.tokens.segments):
            strip = segment_strip(reading, number)
            told = f"prompt {strip.prompt:,} tokens, {one.sampled:,} sampled"
            yield _dim(f"  sequence {number} ({one.kind}, {told})", colour)
            yield from _tokens(strip, colour)
        for broken in reading.tokens.breaks:
            yield from (f"  {line}" for line in explain_break(broken, reading.tokens.segments))


def _tree(reading: Reading) -> Iterator[str]:
    """A call a line below the call that it continues; a break begins a branch and says what it left."""
    children: dict[int | None, list[int]] = {}
    breaks = {break_.call: break_ for break_ in reading.tokens.breaks}
    for call in reading.tokens.calls:
        placement = reading.tokens.placements.get(call.number)
        children.setdefault(placement.parent if placement else None, []).append(call.number)

    def below(parent: int | None, deep: int) -> Iterator[str]:
        waiting = [(number, deep) for number in reversed(children.get(parent, ()))]
        while waiting:
            number, level = waiting.pop()
            call = reading.call(number)
            assert call is not None
            facts = reading.facts[call.line]
            words = [f"call {number}", call.kind]
            if call.capture is not None:
                prompt = call.capture.prompt_token_ids
                sampled = " + ".join(str(len(completion.token_ids or ())) for completion in call.capture.completions)
                words.append(f"{'?' if prompt is None else len(prompt)} → {sampled or '?'} tokens")
            words += [one for one in facts.finish if one]
            if facts.duration_ms is not None:
                words.append(f"{facts.duration_ms / 1000:.1f} s")
            if not call.complete:
                words.append("not complete" if call.outcome == "ok" else call.outcome)
            if number in breaks:
                words.append(f"breaks off from call {breaks[number].before}: {breaks[number].name}")
            yield f"  {'│ ' * level}{'⟂' if number in breaks else '●'} {'  '.join(words)}"
            following = children.get(number, ())
            # one that goes on alone stands straight below: a long conversation is no staircase
            waiting += [(one, level + (place > 0)) for place, one in reversed(list(enumerate(following)))]

    yield from below(None, 0)


def _tokens(strip: Strip, colour: bool) -> Iterator[str]:
    """The tokens after the first prompt. A line of the model is a line here; each begins and ends its own colours."""
    line = ""
    for at in range(strip.prompt, len(strip.ids)):
        token, text = strip.ids[at], strip.text(at)
        parts = shown_token(token, text) or [Part(str(text), 0)]
        stretch = strip.stretch(at)
        value = None
        if stretch is not None:
            values = stretch.completion.logprobs or ()
            offset = at - stretch.start
            value = values[offset] if offset < len(values) else None
        pieces = plain(parts).split("\n")
        for place, piece in enumerate(pieces):
            if place:
                yield f"    {line}"
                line = ""
            line += _painted(piece, value, stretch is not None, colour) if piece else ""
    if line:
        yield f"    {line}"


def _painted(text: str, logprob: Any, sampled: bool, colour: bool) -> str:
    chance = math.exp(min(float(logprob), 0.0)) if isinstance(logprob, int | float) else None
    if not colour:
        return f"{text}{{{chance:.1%}}}" if chance is not None and chance < UNLIKELY else text
    if not sampled:
        return _dim(text, True)
    code = _COLOURS[step(chance, PROBABILITY, falling=True)] if chance is not None else ""
    return f"\x1b[{code}m{text}{_END}" if code else text


def _legend() -> str:
    steps: Sequence[str] = [f"\x1b[{code}m {end} {_END}" for code, end in zip(_COLOURS[1:], ENDS, strict=False)]
    return f"probability below {''.join(steps)}"


def _dim(text: str, colour: bool) -> str:
    return f"{_DIM}{text}{_END}" if colour else text


def _bold(text: str, colour: bool) -> str:
    return f"{_BOLD}{text}{_END}" if colour else text
