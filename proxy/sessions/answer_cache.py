"""What a session keeps in memory of its earlier answers, for dialects that refer to them (`EarlierAnswers`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from proxy.runtime.lru import BoundedLRU, MemoryBudget

#: Answers, or parts of them, that a session keeps; the least recently used are dropped first.
MOST = 2048
#: Bytes of all that it keeps: whole conversations are among it.
LARGEST = 32 << 20


class AnswerCache:
    """Texts, or bytes, by name; bounded, the least recently used are dropped."""

    def __init__(self, most: int = MOST, largest: int = LARGEST, budget: MemoryBudget | None = None) -> None:
        self._memory: BoundedLRU[str, str | bytes] = BoundedLRU(most, largest, budget)

    def get(self, name: str, /) -> str | bytes | None:
        return self._memory.get(name)

    def keep(self, values: Mapping[str, str | bytes]) -> None:
        for name, value in values.items():
            self._memory.put(name, value, sys.getsizeof(value))

    def end(self) -> None:
        """The session has ended: frees its memory."""
        self._memory.close()
