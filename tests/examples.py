"""How many examples hypothesis tries: a fifth of them in `make test-fast`, under the profile `fast`."""

from __future__ import annotations

from hypothesis import settings

FAST = "fast"


def examples(number: int) -> settings:
    """`@examples(300)`: 300 examples, however long each takes."""
    fast = settings.get_current_profile_name() == FAST
    return settings(max_examples=max(20, number // 5) if fast else number, deadline=None)
