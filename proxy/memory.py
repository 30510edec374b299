"""What large answers took goes back to the operating system when they are over.

glibc keeps it otherwise: each large block that is freed raises the size up to which blocks come from its heaps, and a
heap is given back only from its end. After events of 8 MiB a proxy held several times what it used (glibc 2.36).
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

#: `malloc.h`: from this size on a block is a mapping of its own, and unmapped when it is freed.
M_MMAP_THRESHOLD = -3
LARGE = 1 << 20
#: Heaps besides the main one are for threads, and the proxy's few write journal lines.
M_ARENA_MAX = -8


def give_back() -> None:
    """For this process from now on. Does nothing where the C library has no `mallopt`."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, LARGE)
        mallopt(M_ARENA_MAX, 2)
