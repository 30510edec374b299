"""Room for many calls: one in flight holds two connections, an open session its journal."""

from __future__ import annotations

import resource
from contextlib import suppress

#: Shells give 1,024, which is not enough for 400 calls at once; more than this nobody needs, and some systems refuse.
MOST = 65_536


def allow_many() -> None:
    """As many descriptors as this process may have, up to `MOST`; never fewer than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
