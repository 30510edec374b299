"""SIGTERM and SIGHUP end a command as Ctrl-C does, so that its temporary files are removed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Within the block these signals raise `SystemExit` (128 + their number), so that `with` blocks clean up.

    One that is ignored (`nohup`) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():  # handlers can be set only there
        yield
        return
    handled = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, _exit) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
