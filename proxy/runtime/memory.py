"""What large answers took goes back to the operating system when they are over.

glibc keeps it otherwise: each large block that is freed raises the size up to which blocks come from its heaps, and a
heap is given back only from its end. After events of 8 MiB a proxy held several times what it used (glibc 2.36).
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from contextlib import suppress

#: `malloc.h`: from this size on a block is a mapping of its own, and unmapped when it is freed.
M_MMAP_THRESHOLD = -3
LARGE = 1 << 20
#: Heaps besides the main one are for threads, and the proxy's few write journal lines.
M_ARENA_MAX = -8
#: Seconds between two collections of what calls left in circles. `tune_gc` makes the collector's own rare, and
#: what waits for it scatters the heap: without this a proxy grew by a fifth in a minute of calls that broke off.
TIDY = 30.0
#: Seconds between a collection's two parts, so that calls wait for neither longer than they must: what is new, which is
#: mostly garbage, and all. With 256 sessions either took 2 to 5 ms, however many calls they had made.
PARTS = 1.0


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
    """On the running loop from now on: every `TIDY` seconds some milliseconds go into giving memory back."""
    loop = asyncio.get_running_loop()

    def tidy() -> None:
        gc.collect(1)
        loop.call_later(PARTS, tidy_all)

    def tidy_all() -> None:
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        loop.call_later(TIDY, tidy)

    loop.call_later(TIDY, tidy)
