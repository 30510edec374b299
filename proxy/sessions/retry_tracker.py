"""Which failed call a call retries: the request is the same byte for byte, or has the same `x-client-request-id`.

An identical body alone is no retry: only a failed call can be retried. A client may send the same id with all calls of
a conversation (Codex does): there a retry also has as many messages as the failed call.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

#: Failed calls that are remembered; the oldest are dropped.
MOST = 1024


class Retries:
    """The failed calls of one session that no retry has answered yet."""

    def __init__(self) -> None:
        self._failed: OrderedDict[int, int] = OrderedDict()

    def of(self, raw: bytes, body: dict[str, Any], name: str | None) -> int | None:
        """The number of the failed call that this call retries; `name` is its `x-client-request-id`."""
        if not self._failed:
            return None
        return next((self._failed[key] for key in _keys(raw, body, name) if key in self._failed), None)

    def remember(self, raw: bytes, body: dict[str, Any], name: str | None, number: int, outcome: str) -> None:
        """An answered call ends the chain of retries; a failed call may be retried by the next."""
        if not self._failed and outcome == "ok":
            return
        for key in _keys(raw, body, name):
            if outcome == "ok":
                self._failed.pop(key, None)
            else:
                self._failed[key] = number
                self._failed.move_to_end(key)
        while len(self._failed) > MOST:
            self._failed.popitem(last=False)


def _keys(raw: bytes, body: dict[str, Any], name: str | None) -> list[int]:
    keys = [hash(raw)]
    if name:
        keys.append(hash((name, _turns(body))))  # a name may be as long as a request's headers
    return keys


def _turns(body: dict[str, Any]) -> int:
    messages = body.get("messages", body.get("input"))
    return len(messages) if isinstance(messages, list) else 0
