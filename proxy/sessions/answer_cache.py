"""What a session keeps in memory of its earlier answers, for dialects that refer to them (`EarlierAnswers`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from proxy.runtime.lru import BoundedLRU, MemoryBudget

#: Answers, or parts of them, that a session keeps; those that were used longest ago go first.
MOST = 2048
#: Bytes of all that it keeps: whole conversations are among it.
LARGEST = 32 << 20


class AnswerCache:
    """Texts, or bytes, by name; bounded, the latest stay."""

    def __init__(self, most: int = MOST, largest: int = LARGEST, whole: MemoryBudget | None = None) -> None:
        self._memory: BoundedLRU[str, str | bytes] = BoundedLRU(most, largest, whole)

    def get(self, name: str, /) -> str | bytes | None:
        return self._memory.get(name)

    def keep(self, values: Mapping[str, str | bytes]) -> None:
        for name, value in values.items():
            self._memory.put(name, value, sys.getsizeof(value))

    def end(self) -> None:
        """The session is over, and what it kept is given up."""
        self._memory.close()
