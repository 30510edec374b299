"""`bench view --text`: a line per rollout, its calls as a tree, and its tokens colored by their probability."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from capture.command.terminal import printable
from capture.errors import CaptureError
from train.tokens.coverage import explain_break, line_of
from train.view.api import View
from train.view.rollout_cache import Reading
from train.view.token_strips import PROBABILITY, Strip, segment_strip, shown_token, step
from train.view.token_text import Part, plain, shown

#: Colors from likely to unlikely; the first step has none.
_STYLES: Final = ("", "color(16) on color(229)", "color(16) on color(222)", "color(16) on color(215)",
                  "color(16) on color(209)", "color(16) on color(203)", "color(231) on color(161)",
                  "color(231) on color(90)")  # fmt: skip
#: The upper end of each step that has a color.
_ENDS: Final = ("90%", "60%", "35%", "15%", "5%", "1%", "0.1%")
#: Without colors a token less likely than this is followed by its probability.
UNLIKELY: Final = 0.05


def print_story(view: View, console: Console, errors: Console) -> None:
    """Prints a rollout at a time; what could not be read goes to `errors`."""
    view.index.scan()
    color = console.is_terminal and not console.no_color
    for line in story(view, color=color):
        console.print(line, soft_wrap=True, no_wrap=True)
    for note in view.index.notes:
        errors.print(Text(printable(note)), soft_wrap=True)


def story(view: View, *, color: bool) -> Iterator[Text]:
    """Lines without their ends. Control characters in what a model or an agent wrote are shown as symbols."""
    entries = view.index.entries()
    if not entries:
        yield Text(f"there is no rollout and no journal in {view.root}")
    elif color:
        yield _legend()
    for entry in entries:
        rollout = entry.rollout
        name = Text(printable(rollout.rollout_path), "bold")
        yield Text()
        try:
            reading = view.readings.once(rollout)
        except CaptureError as error:
            yield name
            yield Text(f"no   {printable(str(error))}")
            continue
        reward = "–" if rollout.reward is None else f"{rollout.reward:g}"
        yield name.append(f"  reward {reward}  {printable(str(rollout.outcome))}", "not bold")
        yield Text(printable(line_of(rollout.name, reading.tokens.coverage)))
        yield from map(Text, _tree(reading))
        for number, segment in enumerate(reading.tokens.segments):
            strip = segment_strip(reading, number)
            size = f"prompt {strip.prompt:,} tokens, {segment.sampled:,} sampled"
            yield Text(f"  sequence {number} ({segment.kind}, {size})", "dim")
            yield from _tokens(strip, color)
        for broken in reading.tokens.breaks:
            yield from (Text(f"  {_visible(line)}") for line in explain_break(broken, reading.tokens.segments))


def _visible(text: str) -> str:
    return plain(shown(text))


def _tree(reading: Reading) -> Iterator[str]:
    """A line per call, below the call that it continues; a break starts a branch and names what it left."""
    children: dict[int | None, list[int]] = {}
    breaks = {broken.call: broken for broken in reading.tokens.breaks}
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
            words += [_visible(reason) for reason in facts.finish if reason]
            if facts.duration_ms is not None:
                words.append(f"{facts.duration_ms / 1000:.1f} s")
            if not call.complete:
                words.append("not complete" if call.outcome == "ok" else call.outcome)
            if number in breaks:
                words.append(f"breaks off from call {breaks[number].before}: {breaks[number].name}")
            yield f"  {'│ ' * level}{'⟂' if number in breaks else '●'} {'  '.join(words)}"
            following = children.get(number, ())
            # The first is not indented: a long conversation must not become a staircase.
            waiting += [(other, level + (place > 0)) for place, other in reversed(list(enumerate(following)))]

    yield from below(None, 0)


def _tokens(strip: Strip, color: bool) -> Iterator[Text]:
    """The tokens after the first prompt. A line of the model's is a line here."""
    line = Text("    ")
    for at in range(strip.prompt, len(strip.ids)):
        token, text = strip.ids[at], strip.text(at)
        parts = shown_token(token, text) or [Part(str(text), 0)]
        stretch = strip.stretch(at)
        logprob = None
        if stretch is not None:
            logprobs = stretch.completion.logprobs or ()
            offset = at - stretch.start
            logprob = logprobs[offset] if offset < len(logprobs) else None
        for place, piece in enumerate(plain(parts).split("\n")):
            if place:
                yield line
                line = Text("    ")
            if piece:
                _append(line, piece, logprob, stretch is not None, color)
    if line.plain.strip():
        yield line


def _append(line: Text, text: str, logprob: Any, sampled: bool, color: bool) -> None:
    probability = math.exp(min(float(logprob), 0.0)) if isinstance(logprob, int | float) else None
    if not color:
        line.append(text)
        if probability is not None and probability < UNLIKELY:
            line.append(f"{{{probability:.1%}}}")
    elif not sampled:
        line.append(text, "dim")
    else:
        line.append(text, "" if probability is None else _STYLES[step(probability, PROBABILITY, falling=True)])


def _legend() -> Text:
    steps = [(f" {end} ", style) for style, end in zip(_STYLES[1:], _ENDS, strict=True)]
    return Text.assemble("probability below ", *steps)
