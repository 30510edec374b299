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
            straight = [one["first_ms"][number] for one in runs.get((case, "direct"), ())]
            for one in rounds:
                if straight:
                    one[name] = one["first_ms"][number] - statistics.median(straight)


def median(rounds: list[Figures], figure: str) -> float | None:
    values = [one[figure] for one in rounds if one.get(figure) is not None and one[figure] == one[figure]]
    return statistics.median(values) if values else None


def cell(rounds: list[Figures], figure: str) -> str:
    values = sorted(one[figure] for one in rounds if one.get(figure) is not None and one[figure] == one[figure])
    if not values:
        return "-"
    middle = statistics.median(values)
    shown = f"{middle:,.2f}" if abs(middle) < 10 else f"{middle:,.0f}"
    if len(values) > 1:
        ends = [f"{one:,.2f}" if abs(middle) < 10 else f"{one:,.0f}" for one in (values[0], values[-1])]
        shown += f" ({ends[0]}-{ends[1]})"
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
    only, one, other, figure, sign, bound = found.groups()
    good, seen = True, False
    for case in sorted({case for case, _ in runs}):
        value = median(runs.get((case, one), []), figure)
        if (only and case != only) or value is None:
            continue
        if other:
            beside = median(runs.get((case, other), []), figure)
            if beside is None:
                continue
            value = value / beside
        seen = True
        kept = value <= float(bound) if sign == "<=" else value >= float(bound)
        good &= kept
        whose = f"{one}/{other}" if other else one
        print(f"{'holds' if kept else 'FAILS'}: {case}: {whose} {figure} {value:.3g} {sign} {bound}")
    if not seen:
        print(f"FAILS: {text}: nothing was measured that it is about")
    return good and seen
