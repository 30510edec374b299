"""What an agent did, as it is told while it runs: `trajectory/acp_trajectory.jsonl`, one event a line.

Events are BenchFlow's: `user_message`, `agent_message`, `agent_thought`, `tool_call`, `agent_timeout`, `oracle`.
The file is replaced whole, so a reader never sees half an event.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from pathlib import Path
from typing import Any

from capture.errors import JournalError
from capture.journal.files import write_jsonl
from sandbox.errors import AgentError

#: Text beyond this is an agent gone wild, not a trajectory.
MOST_BYTES = 64 << 20
MERGED = ("agent_message", "agent_thought")


class Trajectory:
    """Collects events; `save` writes them, at most every two seconds unless it must."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: How it was learned: `acp`, or `scraped` from what a program said or wrote.
        self.source = "scraped"
        self.events: list[dict[str, Any]] = []
        self._calls: dict[str, dict[str, Any]] = {}
        self._texts: list[str] | None = None
        self._size = 0
        self._saved = 0.0
        self._lock = threading.Lock()

    @property
    def tool_calls(self) -> int:
        return len(self._calls)

    def text(self, kind: str, text: str) -> None:
        """A message or a thought; pieces that follow each other are one event."""
        self._grow(len(text))
        with self._lock:
            last = self.events[-1] if self.events else None
            if last is not None and last["type"] == kind and kind in MERGED and self._texts is not None:
                self._texts.append(text)
            else:
                self._settle()
                self.events.append({"type": kind, "text": "", "ts": _now()})
                self._texts = [text]
        self.save()

    def tool(self, call_id: str, **fields: Any) -> None:
        """A tool call, or what became of one: fields that are given replace what was known."""
        known = {name: value for name, value in fields.items() if value is not None}
        self._grow(sum(len(str(value)) for value in known.values()))
        with self._lock:
            call = self._calls.get(call_id)
            if call is None:
                self._settle()
                call = {"type": "tool_call", "tool_call_id": call_id, "kind": "other", "title": "", "status": "pending",
                        "content": [], "started_at": _now()}  # fmt: skip
                self._calls[call_id] = call
                self.events.append(call)
            call.update(known)
            if call["status"] in ("completed", "failed"):
                call["finished_at"] = _now()
        self.save()

    def add(self, kind: str, **fields: Any) -> None:
        with self._lock:
            self._settle()
            self.events.append({"type": kind, **fields, "ts": _now()})
        self.save(now=True)

    def pending(self) -> list[str]:
        """Ids of tool calls that did not end."""
        return [name for name, call in self._calls.items() if call["status"] not in ("completed", "failed")]

    def save(self, now: bool = False) -> None:
        """Writes the file, where two seconds passed or it must be. A full disk shows elsewhere, and louder."""
        if not now and time.monotonic() - self._saved < 2:
            return
        self._saved = time.monotonic()
        with self._lock:
            self._settle(keep_open=True)
            rows = [dict(event) for event in self.events]
        with contextlib.suppress(JournalError):
            write_jsonl(self.path, rows)

    def _settle(self, keep_open: bool = False) -> None:
        """Joins the pieces of the text that is open."""
        if self._texts is not None:
            text = "".join(self._texts)
            self.events[-1]["text"] = text
            self._texts = [text] if keep_open else None

    def _grow(self, by: int) -> None:
        self._size += by
        if self._size > MOST_BYTES:
            raise AgentError(f"the agent reported more than {MOST_BYTES >> 20} MB about itself", "acp_error")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat()
