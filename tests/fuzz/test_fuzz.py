"""A moment of each target; what `make fuzz` has found stands below as tests of its own."""

from __future__ import annotations

import pytest

from tests.fuzz.targets import TARGETS, property_of

#: A job is written to disk and read by every command: an example takes twenty times as long as another's.
EXAMPLES = {"jobs": 15}


@pytest.mark.parametrize("name", sorted(TARGETS))
@pytest.mark.slow
def test_fuzz(name: str) -> None:
    property_of(name, max_examples=EXAMPLES.get(name, 150), database=None)()
