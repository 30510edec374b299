"""Which call continues which: the earlier call whose prompt and sampled ids are the longest beginning of this prompt.

Tokens decide, not tool names or message texts: side calls (titles, summaries, sub-agents) become threads of their own
and break nothing. Where two candidates are equally long the parent is reported as ambiguous, never guessed.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from capture.record import Ids


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a call stands. `parent` and `choice` name the call and the choice of it that this one continues.

    Both are None for a call that begins a thread, and for one whose parent is `ambiguous`: then the call numbers of all
    equally long candidates stand there. A choice of a call that sampled nothing counts as one of no ids.
    """

    call: int
    parent: int | None = None
    choice: int | None = None
    ambiguous: tuple[int, ...] = ()


@dataclass(order=True, slots=True)
class _Candidate:
    length: int
    call: int
    choice: int
    prompt: Ids = field(compare=False)
    sampled: Ids = field(compare=False)


class Threads:
    """Places calls one by one, in the order they began."""

    def __init__(self) -> None:
        self._candidates: list[_Candidate] = []
        self.placements: dict[int, Placement] = {}

    def place(self, call: int, prompt: Ids, sampled: Sequence[Ids]) -> Placement:
        """The place of call number `call`; `sampled` holds the ids of each of its choices. Costs no copy of the ids."""
        placement = self._find(call, prompt)
        self.placements[call] = placement
        for choice, ids in enumerate(sampled):
            # Every candidate that matters is a beginning of the same prompt, so the longer text has more ids.
            length = len(prompt.text) + len(ids.text) + (1 if prompt.text and ids.text else 0)
            insort(self._candidates, _Candidate(length, call, choice, prompt, ids))
        return placement

    def _find(self, call: int, prompt: Ids) -> Placement:
        found: list[_Candidate] = []
        for candidate in reversed(self._candidates):
            if found and candidate.length < found[0].length:
                break
            if candidate.length <= len(prompt.text) and extends(prompt, candidate.prompt, candidate.sampled):
                found.append(candidate)
        if not found:
            return Placement(call)
        if len(found) > 1:
            return Placement(call, ambiguous=tuple(sorted({one.call for one in found})))
        return Placement(call, found[0].call, found[0].choice)


def extends(prompt: Ids, before: Ids, sampled: Ids) -> bool:
    """Whether `prompt` begins with the ids `before` and then `sampled`: two memory comparisons."""
    if not prompt.startswith(before):
        return False
    if not sampled.text or not before.text:
        return prompt.startswith(before + sampled)
    start = len(before.text) + 1
    if not prompt.text.startswith(sampled.text, start):
        return False
    end = start + len(sampled.text)
    return len(prompt.text) == end or prompt.text[end : end + 1] == b","
