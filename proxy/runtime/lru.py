"""What sessions remember of their calls: bounded for each of them, and for all of them together.

What is over a bound goes, what was used longest ago first: of a thousand conversations the last call of each is what
the next goes on from, and those before it are hardly asked for.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

import msgspec

#: Bytes that are remembered by all sessions of a process.
LARGEST = 1024 << 20
#: About how many bytes one more thing costs besides what it is: its name, and its places in two orders.
EACH = 400

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class MemoryBudget:
    """The bound over all memories of a process, in bytes."""

    def __init__(self, largest: int = LARGEST) -> None:
        self.largest = largest
        self.size = 0
        self._used: OrderedDict[_Entry, None] = OrderedDict()
        self._shrinking = False
        self._memories: dict[int, BoundedLRU[Any, Any]] = {}
        self._number = itertools.count()

    def enter(self, memory: BoundedLRU[Any, Any]) -> int:
        number = next(self._number)
        self._memories[number] = memory
        return number

    def leave(self, number: int) -> None:
        self._memories.pop(number, None)

    def add(self, entry: _Entry) -> None:
        self._used[entry] = None
        self.size += entry.size

    def use(self, entry: _Entry) -> None:
        self._used.move_to_end(entry)

    def drop(self, entry: _Entry) -> None:
        del self._used[entry]
        self.size -= entry.size

    def shrink(self) -> None:
        if self._shrinking:  # what is forgotten may leave a smaller thing behind
            return
        self._shrinking = True
        try:
            while self.size > self.largest and self._used:
                oldest = next(iter(self._used))
                self._memories[oldest.memory].forget(oldest.name)
        finally:
            self._shrinking = False


class BoundedLRU(Generic[K, V]):
    """Values by name, at most `most` of them and `largest` bytes; `forgets` is called with each that a bound takes."""

    def __init__(
        self, most: int, largest: int, whole: MemoryBudget | None = None, forgets: Callable[[V], None] | None = None
    ) -> None:
        self._most = most
        self._largest = largest
        self._whole = whole or MemoryBudget()
        self._forgets = forgets
        self._size = 0
        self._ended = False
        self._held: OrderedDict[K, _Entry] = OrderedDict()
        self._number = self._whole.enter(self)

    def __iter__(self) -> Iterator[V]:
        return iter([entry.value for entry in self._held.values()])

    def __len__(self) -> int:
        return len(self._held)

    def names(self) -> Iterator[K]:
        return iter(self._held)

    def get(self, name: K) -> V | None:
        """What has this name, which counts as a use of it."""
        entry = self._held.get(name)
        if entry is None:
            return None
        self._held.move_to_end(name)
        self._whole.use(entry)
        value: V = entry.value
        return value

    def keep(self, name: K, value: V, size: int) -> None:
        """`size` in bytes, without what each thing costs besides (`EACH`)."""
        if self._ended:
            return
        self._take_out(name)
        entry = self._held[name] = _Entry(self._number, name, value, size + EACH)
        self._size += entry.size
        self._whole.add(entry)
        while self._held and (len(self._held) > self._most or self._size > self._largest):
            self.forget(next(iter(self._held)))
        self._whole.shrink()

    def forget(self, name: K) -> None:
        entry = self._take_out(name)
        if entry is not None and self._forgets is not None:
            self._forgets(entry.value)

    def clear(self) -> None:
        for name in list(self._held):
            self._take_out(name)

    def end(self) -> None:
        """For good: what is kept from now on is not."""
        self._ended = True
        self.clear()
        self._whole.leave(self._number)

    def _take_out(self, name: K) -> _Entry | None:
        entry = self._held.pop(name, None)
        if entry is not None:
            self._size -= entry.size
            self._whole.drop(entry)
        return entry


class _Entry(msgspec.Struct, eq=False, gc=False):
    """Not looked at by the collector, for there are very many: so it refers to its memory by a number."""

    memory: int
    name: Any
    value: Any
    size: int
