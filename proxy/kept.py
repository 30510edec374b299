"""What a session keeps in memory of its earlier answers, for dialects that refer to them (`Earlier`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

#: Answers, or parts of them, that a session keeps; the oldest go first.
MOST = 2048
#: Characters, or bytes, of all that it keeps: whole conversations are among it.
LARGEST = 32 << 20


class Kept:
    """Texts, or bytes, by name; bounded, the latest stay."""

    def __init__(self, most: int = MOST, largest: int = LARGEST) -> None:
        self._most = most
        self._largest = largest
        self._size = 0
        self._held: OrderedDict[str, str | bytes] = OrderedDict()

    def get(self, name: str, /) -> str | bytes | None:
        return self._held.get(name)

    def keep(self, values: Mapping[str, str | bytes]) -> None:
        for name, value in values.items():
            self._size -= len(self._held.pop(name, ""))
            self._held[name] = value
            self._size += len(value)
        while len(self._held) > self._most or self._size > self._largest:
            self._size -= len(self._held.popitem(last=False)[1])
