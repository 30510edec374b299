"""SIGTERM and SIGHUP end a command as Ctrl-C does: what it wrote beside its place is taken away before it goes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def taken_away_on_signals() -> Iterator[None]:
    """While the block lasts these signals raise `SystemExit` (128 + their number), so that `with` blocks run out.

    One that is ignored (`nohup`) stays so.
    """
    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield
        return
    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, _leave) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
