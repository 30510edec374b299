#!/bin/bash
cat > /app/stats.py <<'PY'
"""Small statistics."""


def median(values):
    """The middle value; of an even number of values the mean of the middle two."""
    if not values:
        raise ValueError("no values")
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
PY
