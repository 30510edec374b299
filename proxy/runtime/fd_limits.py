"""Room for many calls: one in flight holds two connections, an open session its journal."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
from contextlib import suppress

log = logging.getLogger("proxy")

#: Shells give 1,024, which is not enough for 400 calls at once; more than this nobody needs, and some systems refuse.
MOST = 65_536
#: Seconds between two looks whether there are any left, and until it is said again that there are none.
LOOK, TELL_AGAIN = 2.0, 60.0


def raise_fd_limit() -> None:
    """As many descriptors as this process may have, up to `MOST`; never fewer than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def say_when_none_are_left() -> None:
    """On the running loop from now on. The loop itself waits for better times without a word (uvloop 0.23)."""
    loop = asyncio.get_running_loop()

    def look() -> None:
        again = LOOK
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                again = TELL_AGAIN
                log.error(
                    "no descriptor is left (%s): new connections wait or are closed, new journals cannot be opened; "
                    "raise the limit of open files (ulimit -n)", error.strerror,
                )  # fmt: skip
        loop.call_later(again, look)

    loop.call_later(LOOK, look)
