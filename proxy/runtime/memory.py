"""Memory of a long-lived process: what large replies took goes back to the operating system after them.

glibc keeps it otherwise. Each large block that is freed raises the size from which on blocks are mappings of their own;
smaller ones come from heaps, and a heap is given back only from its end. After events of 8 MiB a proxy kept several
times what it used (glibc 2.36).
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from contextlib import suppress

#: `malloc.h`: from this size on a block is a mapping of its own, which is unmapped when it is freed.
M_MMAP_THRESHOLD = -3
LARGE = 1 << 20
#: Heaps besides the main one are for threads, and the proxy's few threads write journal lines.
M_ARENA_MAX = -8
#: Seconds between two collections of reference cycles. `tune_gc` makes the collector's own runs rare, and garbage that
#: waits for them fragments the heap: without this timer a proxy grew by a fifth in a minute of calls that broke off.
INTERVAL = 30.0
#: Seconds between the two parts of a collection, young objects and all, so that calls wait for neither for long. With
#: 256 sessions either took 2 to 5 ms, however many calls they had made.
PART_INTERVAL = 1.0


def trim_malloc() -> None:
    """For this process from now on. Does nothing where the C library has no `mallopt`."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, LARGE)
        mallopt(M_ARENA_MAX, 2)


def tune_gc() -> None:
    """For a process that is a proxy and nothing else.

    What was imported lives as long as the process, and most of what a call makes is gone when the call ends. Scanning
    all of it every 700 objects (CPython's default) was a tenth of the cost of a call.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


def start_gc_timer() -> None:
    """Collects garbage and trims the heap every `INTERVAL` seconds, on the running loop; it takes some milliseconds."""
    loop = asyncio.get_running_loop()

    def collect_young() -> None:
        gc.collect(1)
        loop.call_later(PART_INTERVAL, collect_all)

    def collect_all() -> None:
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        loop.call_later(INTERVAL, collect_young)

    loop.call_later(INTERVAL, collect_young)
