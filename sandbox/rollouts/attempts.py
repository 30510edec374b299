"""One task until its result is final: a rollout, and others while infrastructure fails and retries are left."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any

from sandbox.errors import Stopped
from sandbox.rollouts.result_files import to_be_retried
from sandbox.rollouts.rollout import Rollout

#: `(rollout's name, the failed attempt that it replaces)` -> the rollout, which has not begun.
Prepare = Callable[[str, str | None], Rollout]


def run_attempts(
    task: str,
    prepare: Prepare,
    retries: int,
    stop: threading.Event,
    on_end: Callable[[dict[str, Any], bool], None],
    on_stop: Callable[[str], None],
    retry_of: str | None = None,
) -> dict[str, Any] | None:
    """The final result; None where it was stopped before one.

    `on_end(result, final)` is called after each attempt, `on_stop(name)` for a rollout that was stopped.
    """
    for attempt in range(retries + 1):
        if stop.is_set() or (attempt and stop.wait(min(30.0, 2.0 ** (attempt - 1)))):
            return None
        name = f"{task}__{secrets.token_hex(4)}"
        try:
            result = prepare(name, retry_of).run()
        except Stopped:
            on_stop(name)
            return None
        final = not to_be_retried(result) or attempt == retries
        on_end(result, final)
        if final:
            return result
        retry_of = name
    return None
