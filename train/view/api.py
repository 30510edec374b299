"""What the page asks for, and the answers: one function per question, the same for the server and for a single file.

job?since=V                    the table, its groups, the state of the job
rollout?path=P                 its calls, their tree, its sequences and breaks
call?path=P&call=N             one call's messages, tools and parameters
strip?path=P&of=s0|c3.0        how a merged sequence, or a choice of a call, is laid out
slice?path=P&of=…&from=A       its tokens from A on
compare?a=P&b=P                where two rollouts part
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capture.errors import CaptureError
from capture.record import Ids
from train.errors import BadInput, NoSuchPath, TrainError
from train.groups.groups import GroupOptions
from train.view.calls import call_view, rollout_view
from train.view.groups import VIEW_BY
from train.view.id_text import Vocabulary
from train.view.rollout_cache import Reading, Readings
from train.view.rollout_index import Index
from train.view.token_strips import SLICE, Strip, call_strip, segment_strip

STRIPS = 8


class View:
    """Everything that a page can ask about what is at `root`."""

    def __init__(self, root: Path, *, tokenizer: Path | None = None, grouping: GroupOptions | None = None) -> None:
        """Raises `NoSuchPath`, `BadInput`."""
        if not root.exists():
            raise NoSuchPath(f"No such path: {root}")
        if root.is_file() and root.suffix != ".jsonl" and root.name != "result.json":
            raise BadInput(f"{root} is not a rollout; give a job folder, a rollout's folder, or a journal (.jsonl)")
        self.root = root
        self.readings = Readings(Vocabulary.load(tokenizer))
        self.index = Index(root, self.readings, grouping or GroupOptions(VIEW_BY))
        self._strips: OrderedDict[tuple[int, str], tuple[Reading, Strip]] = OrderedDict()

    def answer(self, question: str, words: Mapping[str, str]) -> dict[str, Any]:
        """Raises `TrainError` with a sentence for the page; `NoSuchPath` where what is asked about is not there."""
        try:
            match question:
                case "job":
                    return self.index.job(_number(words, "since", 0))
                case "rollout":
                    return rollout_view(self.reading(words.get("path", "")))
                case "call":
                    return call_view(self.reading(words.get("path", "")), _number(words, "call"))
                case "strip":
                    return self.strip(words.get("path", ""), words.get("of", "s0")).index
                case "slice":
                    start = _number(words, "from")
                    return self.strip(words.get("path", ""), words.get("of", "s0")).slice(start, start + SLICE)
                case "compare":
                    return compare(self.reading(words.get("a", "")), self.reading(words.get("b", "")))
        except CaptureError as error:
            raise BadInput(str(error)) from error
        raise NoSuchPath(f"nothing is known of {question!r}")

    def reading(self, path: str) -> Reading:
        entry = self.index.entry(path)
        if entry is None:
            raise NoSuchPath(f"there is no rollout {path!r} here")
        if entry.gone or not entry.rollout.path.exists():
            raise NoSuchPath(f"{entry.rollout.path} is gone: it was deleted or moved after this page had found it")
        return self.readings.of(entry.rollout)

    def strip(self, path: str, of: str) -> Strip:
        reading = self.reading(path)
        key = (id(reading), of)
        cached = self._strips.get(key)
        if cached is not None and cached[0] is reading:
            return cached[1]
        made = strip_of(reading, of)
        self._strips[key] = (reading, made)
        while len(self._strips) > STRIPS:
            self._strips.popitem(last=False)
        return made


def strip_of(reading: Reading, of: str) -> Strip:
    """`s0`: sequence 0; `c3.0`: choice 0 of call 3. Raises `BadInput`."""
    kind, _, choice = of.partition(".")
    try:
        if kind[:1] == "s":
            return segment_strip(reading, int(kind[1:]))
        if kind[:1] == "c":
            return call_strip(reading, int(kind[1:]), int(choice or 0))
    except ValueError:
        pass
    raise BadInput(f"{of!r} names no sequence and no call")


def compare(first: Reading, second: Reading) -> dict[str, Any]:
    """Where the first sequences of two rollouts part: `common` ids are the same, those after them are not."""
    sides = [side_of(reading) for reading in (first, second)]
    common = sides[0][1].common(sides[1][1])
    return {
        "common": common,
        "same": common == len(sides[0][1]) == len(sides[1][1]),
        "sides": [side | {"tokens": len(ids)} for side, ids in sides],
    }


def side_of(reading: Reading) -> tuple[dict[str, Any], Ids]:
    """What a comparison says of a rollout, and the ids of its first sequence; none where it has no sequence."""
    rollout, tokens = reading.rollout, reading.tokens
    side: dict[str, Any] = {
        "path": rollout.rollout_path,
        "name": rollout.name,
        "reward": rollout.reward,
        "outcome": rollout.outcome,
        "grade": tokens.training_grade,
        "reason": tokens.reason,
        "of": None,
        "prompt": 0,
    }
    if tokens.segments:
        first = tokens.segments[0]
        return side | {"of": "s0", "prompt": len(first.prompt_ids)}, first.prompt_ids + first.completion_ids
    return side, Ids(b"")


def _number(words: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = words.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.isascii() or not value.isdigit() or len(value) > 12:
        raise BadInput(f"{name} must be a number")
    return int(value)


__all__ = ["TrainError", "View"]
