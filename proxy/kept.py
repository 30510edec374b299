"""What a session keeps in memory of its earlier answers, for dialects that refer to them (`Earlier`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

#: Answers, or parts of them, that a session keeps; the oldest go first.
MOST = 2048


class Kept:
    """Values by name; bounded, the latest stay."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._held: OrderedDict[str, Any] = OrderedDict()

    def get(self, name: str, /) -> Any:
        return self._held.get(name)

    def keep(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self._held[name] = value
            self._held.move_to_end(name)
        while len(self._held) > self._most:
            self._held.popitem(last=False)
