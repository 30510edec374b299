"""A rollout service in this process, and records for it to give: what the tests of trainers' adapters ask."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.train.build import conversation, make_job
from train.groups.groups import DEFAULT_BY, group_key
from train.rollouts.rollouts import find_rollouts
from train.stream.records import Encode, record
from train.tokens.rollout_tokens import read_log

PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
#: Two conversations in turn: an agent of two sequences.
TWO_THREADS = [
    call
    for number, call in enumerate(
        call for pair in zip(conversation(2, first=100), conversation(2, first=500), strict=True) for call in pair
    )
    if call["metadata"].update(call=number) is None
]


def records_of(folder: Path, rollouts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A record of each rollout (see `make_rollout`), with its chat, in the order given.

    A call that has the golden line's sampling is sent plain sampling instead, with what the key `sampling` adds.
    """
    golden = conversation(1)[0]["metadata"]["sampling"]
    specs = [
        {"name": f"write-number__{number:08x}", "calls": conversation(), **spec} for number, spec in enumerate(rollouts)
    ]
    for spec in specs:
        spec["calls"] = copy.deepcopy(spec["calls"])
        for call in spec["calls"] or ():
            if call["metadata"].get("sampling") == golden:
                call["metadata"]["sampling"]["sent"] = PLAIN | spec.get("sampling", {})
    job = make_job(folder, specs)
    found = sorted(find_rollouts(job), key=lambda rollout: rollout.name)
    return [
        record(rollout, read_log(rollout, chat=True), group_key(rollout, DEFAULT_BY), Encode(text=False))
        for rollout in found
    ]


class Stream(Iterator[dict[str, Any]]):
    def __init__(self, records: Sequence[dict[str, Any]], verdict: dict[str, Any]) -> None:
        self._records = iter(records)
        self.verdict = verdict

    def __next__(self) -> dict[str, Any]:
        return next(self._records)


class Service:
    """Gives `records`, the last first, to each group; `state` is every verdict's. It notes what it was asked."""

    def __init__(
        self,
        records: Sequence[dict[str, Any]],
        *,
        state: str = "complete",
        detail: str | None = None,
        error: Exception | None = None,
        block: bool = False,
    ) -> None:
        self.asked: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self.stopped = threading.Event()
        self._records = list(records)
        self._verdict = {"state": state, "detail": detail, "reason": None if state == "complete" else "unscored"}
        self._error = error
        self._block = block

    def group(self, **request: Any) -> Stream:
        self.asked.append(request)
        if self._error is not None:
            raise self._error
        if self._block:
            self.stopped.wait(30)
        records = self._records[: request["size"]]
        names = [row["rollout"] for row in records]
        return Stream(records[::-1], {**self._verdict, "rollouts": names})

    def tasks(self) -> list[dict[str, Any]]:
        return [{"name": "write-number", "prompt": "Write it."}, {"name": "count", "prompt": "Count them."}]

    def cancel(self, key: str) -> None:
        self.cancelled.append(key)
        self.stopped.set()
