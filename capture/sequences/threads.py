"""Which call continues which: the earlier call whose prompt and sampled ids are the longest beginning of this prompt.

Tokens decide, not tool names or message texts: side calls (titles, summaries, sub-agents) become threads of their own
and break nothing. A turn that was sampled twice with the same ids gives two such calls: `TellApart` decides between
them, else the parent is reported as ambiguous, never guessed.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from capture.record import Ids

#: Given a call and the `(call, choice)` pairs that it continues equally well, says which one it does; None where that
#: cannot be told.
TellApart = Callable[[int, Sequence[tuple[int, int]]], tuple[int, int] | None]


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a call. `parent` and `choice` name the call and the choice of it that this one continues.

    Both are None for a call that begins a thread, and for one whose parent is `ambiguous`, which then has the numbers
    of all equally long candidates. A choice that sampled nothing counts as one of no ids.
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

    def __init__(self, tell_apart: TellApart | None = None) -> None:
        self._candidates: list[_Candidate] = []
        self._tell_apart = tell_apart
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
            if candidate.length > len(prompt.text) or not extends(prompt, candidate.prompt, candidate.sampled):
                continue
            if candidate.sampled or len(candidate.prompt.text) < len(prompt.text):
                found.append(candidate)  # else: the same prompt again, after a reply of no ids
        if not found:
            return Placement(call)
        found = self._without_ancestors(found)
        if len(found) == 1 or not any(candidate.sampled for candidate in found):
            return Placement(call, found[0].call, found[0].choice)  # of several replies of no ids, the latest
        pairs = sorted((candidate.call, candidate.choice) for candidate in found)
        chosen = None if self._tell_apart is None else self._tell_apart(call, pairs)
        if chosen is None:
            return Placement(call, ambiguous=tuple(sorted({candidate.call for candidate in found})))
        return Placement(call, *chosen)

    def _without_ancestors(self, found: list[_Candidate]) -> list[_Candidate]:
        """Without those that another one of them continues: a call that continued a reply and sampled nothing has
        the same ids as it.
        """
        if len(found) == 1:
            return found
        ancestors: set[int | None] = set()
        for candidate in found:
            parent = self.placements[candidate.call].parent
            while parent is not None:
                ancestors.add(parent)
                parent = self.placements[parent].parent
        return [candidate for candidate in found if candidate.call not in ancestors]


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
