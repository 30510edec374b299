"""Least-recently-used caches of a session's earlier calls, each with a bound, and one bound over all of them.

The entries that were used longest ago are evicted first: of a thousand conversations the last call of each is what the
next continues, and those before it are hardly asked for.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

import msgspec

#: Bytes in all caches of a process.
MAX_BYTES = 1024 << 20
#: About how many bytes an entry costs besides its value: its key, and its places in two orders.
EACH = 400

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class MemoryBudget:
    """The bound over all caches of a process, in bytes."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.size = 0
        self._order: OrderedDict[_Entry, None] = OrderedDict()
        self._shrinking = False
        self._caches: dict[int, BoundedLRU[Any, Any]] = {}
        self._numbers = itertools.count()

    def register(self, cache: BoundedLRU[Any, Any]) -> int:
        number = next(self._numbers)
        self._caches[number] = cache
        return number

    def unregister(self, number: int) -> None:
        self._caches.pop(number, None)

    def add(self, entry: _Entry) -> None:
        self._order[entry] = None
        self.size += entry.size

    def touch(self, entry: _Entry) -> None:
        self._order.move_to_end(entry)

    def remove(self, entry: _Entry) -> None:
        del self._order[entry]
        self.size -= entry.size

    def shrink(self) -> None:
        """Evicts until the bound holds."""
        if self._shrinking:  # an eviction may put a smaller entry in its place
            return
        self._shrinking = True
        try:
            while self.size > self.max_bytes and self._order:
                oldest = next(iter(self._order))
                self._caches[oldest.cache].evict(oldest.key)
        finally:
            self._shrinking = False


class BoundedLRU(Generic[K, V]):
    """At most `max_entries` values and `max_bytes` bytes; `on_evict` is called with each value that a bound evicts."""

    def __init__(
        self,
        max_entries: int,
        max_bytes: int,
        budget: MemoryBudget | None = None,
        on_evict: Callable[[V], None] | None = None,
    ) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._budget = budget or MemoryBudget()
        self._on_evict = on_evict
        self._size = 0
        self._closed = False
        self._entries: OrderedDict[K, _Entry] = OrderedDict()
        self._number = self._budget.register(self)

    def __iter__(self) -> Iterator[V]:
        return iter([entry.value for entry in self._entries.values()])

    def __len__(self) -> int:
        return len(self._entries)

    def keys(self) -> Iterator[K]:
        return iter(self._entries)

    def get(self, key: K) -> V | None:
        """The value of a key, which counts as a use of it."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        self._budget.touch(entry)
        value: V = entry.value
        return value

    def put(self, key: K, value: V, size: int) -> None:
        """`size`: the bytes of the value, without what each entry costs besides (`EACH`)."""
        if self._closed:
            return
        self._pop(key)
        entry = self._entries[key] = _Entry(self._number, key, value, size + EACH)
        self._size += entry.size
        self._budget.add(entry)
        while self._entries and (len(self._entries) > self._max_entries or self._size > self._max_bytes):
            self.evict(next(iter(self._entries)))
        self._budget.shrink()

    def evict(self, key: K) -> None:
        entry = self._pop(key)
        if entry is not None and self._on_evict is not None:
            self._on_evict(entry.value)

    def clear(self) -> None:
        for key in list(self._entries):
            self._pop(key)

    def close(self) -> None:
        """Drops all entries; what is put from now on is dropped at once."""
        self._closed = True
        self.clear()
        self._budget.unregister(self._number)

    def _pop(self, key: K) -> _Entry | None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._size -= entry.size
            self._budget.remove(entry)
        return entry


class _Entry(msgspec.Struct, eq=False, gc=False):
    """The garbage collector does not track it, for there are very many: so it refers to its cache by a number."""

    cache: int
    key: Any
    value: Any
    size: int
