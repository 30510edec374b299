"""A trainer's rows beside what the engine sampled: which calls are trained, once and exactly, and what else is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Sampled:
    """One choice that the engine sampled: its prompt, its ids, and their logprobs. `gone`: its client left early."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    gone: bool = False


@dataclass(frozen=True)
class TrainedRow:
    """A row as a trainer gets it: whole sequence, mask and logprobs of one length; mask 1 is trained."""

    ids: list[int]
    mask: list[int]
    logprobs: list[float]


@dataclass
class Verdict:
    """`exact` of `wanted` choices are trained once, in their own context and with their own logprobs."""

    rows: int
    wanted: int
    exact: int = 0
    faults: list[str] = field(default_factory=list)

    def words(self) -> str:
        if not self.rows:
            return "nothing"
        rows = f"{self.rows} row{'s' * (self.rows != 1)}"
        return "; ".join([f"{rows}, {self.exact} of {self.wanted} calls exact", *self.faults])


def judge(rows: Sequence[TrainedRow], sampled: Sequence[Sampled], wanted: Sequence[int]) -> Verdict:
    """Looks for each choice in each row: where its prompt is the row's beginning and its ids follow, are they trained?

    `wanted` are the positions in `sampled` of the choices that an agent got and used.
    """
    verdict = Verdict(len(rows), len(wanted))
    unwanted = 0
    found = [[False] * len(row.ids) for row in rows]
    for position, choice in enumerate(sampled):
        begin, end = len(choice.prompt), len(choice.prompt) + len(choice.ids)
        times = 0
        for number, row in enumerate(rows):
            if row.ids[:end] != choice.prompt + choice.ids or not all(row.mask[begin:end]):
                continue
            times += 1
            found[number][begin:end] = [True] * (end - begin)
            if row.logprobs[begin:end] != choice.logprobs:
                verdict.faults.append(f"call {position + 1} with other logprobs")
        if position in wanted:
            verdict.exact += times == 1
            if times > 1:
                verdict.faults.append(f"call {position + 1} trained {times} times")
        elif times and choice.gone:
            verdict.faults.append("the reply that nobody got is trained")
        elif times:
            unwanted += 1
    if unwanted:
        verdict.faults.append(f"{unwanted} other calls trained" if unwanted > 1 else "1 other call trained")
    other = sum(
        mask and not known
        for row, seen in zip(rows, found, strict=True)
        for mask, known in zip(row.mask, seen, strict=True)
    )
    if other:
        verdict.faults.append(f"{other} trained ids are no sampled reply's")
    return verdict
