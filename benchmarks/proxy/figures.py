"""Figures over rounds: medians with their range, the table, and what is required of them."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any

#: The figures of one round of one target under one case, by name.
Figures = dict[str, Any]
#: All rounds, by case and target.
Runs = dict[tuple[str, str], list[Figures]]


def add_first_token(runs: Runs) -> None:
    """`ttft_ms` and `ttft_p99_ms`: what a target adds to the median round of `direct`."""
    for (case, _), rounds in runs.items():
        for number, name in enumerate(("ttft_ms", "ttft_p99_ms")):
            straight = [row["first_ms"][number] for row in runs.get((case, "direct"), ())]
            for row in rounds:
                if straight:
                    row[name] = row["first_ms"][number] - statistics.median(straight)


def median(rounds: list[Figures], figure: str) -> float | None:
    values = [row[figure] for row in rounds if row.get(figure) is not None and row[figure] == row[figure]]
    return statistics.median(values) if values else None


def cell(rounds: list[Figures], figure: str) -> str:
    values = sorted(row[figure] for row in rounds if row.get(figure) is not None and row[figure] == row[figure])
    if not values:
        return "-"
    middle = statistics.median(values)
    shown = f"{middle:,.2f}" if abs(middle) < 10 else f"{middle:,.0f}"
    if len(values) > 1:
        extremes = [f"{value:,.2f}" if abs(middle) < 10 else f"{value:,.0f}" for value in (values[0], values[-1])]
        shown += f" ({extremes[0]}-{extremes[1]})"
    return shown


COLUMNS = (
    ("us/chunk", "cpu_us_chunk"), ("us/request", "cpu_us_request"), ("ttft p50 ms", "ttft_ms"),
    ("ttft p99 ms", "ttft_p99_ms"), ("chunks/s", "chunks_s"), ("peak MB", "peak_mb"),
)  # fmt: skip


def table(cases: Sequence[str], names: Sequence[str], runs: Runs) -> str:
    """One Markdown table, one line per case and target."""
    head = ["case", "target", *(title for title, _ in COLUMNS), "ids and logprobs"]
    lines = [head, ["-"] * len(head)]
    for case in cases:
        for name in names:
            rounds = runs.get((case, name))
            if rounds:
                delivered = rounds[-1]["delivered"]
                if rounds[-1]["failed"]:
                    delivered += f"; {rounds[-1]['failed']} calls failed"
                lines.append([case, name, *(cell(rounds, figure) for _, figure in COLUMNS), delivered])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


_REQUIRE = re.compile(r"(?:([\w.]+):\s*)?(\w+)(?:/(\w+))?\s+(\w+)\s*(<=|>=)\s*([0-9.]+)")


def holds(text: str, runs: Runs) -> bool:
    """Whether a requirement holds in each case that it is about; prints what it found. Raises `ValueError`."""
    found = _REQUIRE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"--require {text!r}: it looks like 'paced64: ours/rllm cpu_us_chunk<=0.33'")
    only, target, other, figure, sign, bound = found.groups()
    good, seen = True, False
    for case in sorted({case for case, _ in runs}):
        value = median(runs.get((case, target), []), figure)
        if (only and case != only) or value is None:
            continue
        if other:
            reference = median(runs.get((case, other), []), figure)
            if reference is None:
                continue
            value = value / reference
        seen = True
        satisfied = value <= float(bound) if sign == "<=" else value >= float(bound)
        good &= satisfied
        whose = f"{target}/{other}" if other else target
        print(f"{'holds' if satisfied else 'FAILS'}: {case}: {whose} {figure} {value:.3g} {sign} {bound}")
    if not seen:
        print(f"FAILS: {text}: nothing was measured that it is about")
    return good and seen
