"""File descriptors for many calls: a call in flight takes two connections, an open session its journal."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
from contextlib import suppress

log = logging.getLogger("proxy")

#: Shells give 1,024, too few for 400 calls at once. Nobody needs more than this, and some systems refuse it.
MOST = 65_536
#: Seconds between two checks whether any descriptor is left, and between two log lines that none is.
CHECK_SECONDS, LOG_SECONDS = 2.0, 60.0


def raise_fd_limit() -> None:
    """Raises the soft limit of this process to its hard limit, or to `MOST` where that is higher."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def log_when_none_are_left() -> None:
    """Checks from now on, on the running loop; the loop itself waits for descriptors silently (uvloop 0.23)."""
    loop = asyncio.get_running_loop()

    def check() -> None:
        again = CHECK_SECONDS
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                again = LOG_SECONDS
                log.error(
                    "no descriptor is left (%s): new connections wait or are closed, new journals cannot be opened; "
                    "raise the limit of open files (ulimit -n)", error.strerror,
                )  # fmt: skip
        loop.call_later(again, check)

    loop.call_later(CHECK_SECONDS, check)
