"""Which failed call a call makes again: one that is repeated word for word, or that its client names the same.

An identical body alone is no retry: only a call that failed can be made again. A client may name all calls of a
conversation the same (Codex does): there the call made again also has as many messages as the one that failed.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

#: Failed calls that are remembered; the oldest are forgotten.
MOST = 1024


class Retries:
    """The failed calls of one session that nobody has answered yet."""

    def __init__(self) -> None:
        self._failed: OrderedDict[int, int] = OrderedDict()

    def of(self, raw: bytes, body: dict[str, Any], name: str | None) -> int | None:
        """The number of the failed call that this one makes again; `name` is its `x-client-request-id`."""
        if not self._failed:
            return None
        return next((self._failed[key] for key in _keys(raw, body, name) if key in self._failed), None)

    def remember(self, raw: bytes, body: dict[str, Any], name: str | None, number: int, outcome: str) -> None:
        """An answered call ends the chain of retries; one that failed is what the next may repeat."""
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
