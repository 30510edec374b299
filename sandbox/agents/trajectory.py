"""What an agent did, as it is reported during the run: `trajectory/acp_trajectory.jsonl`, one event per line.

Events are BenchFlow's: `user_message`, `agent_message`, `agent_thought`, `tool_call`, `agent_timeout`, `oracle`.
The file is replaced as a whole, so a reader never sees half an event.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from pathlib import Path
from typing import Any

from capture import json
from capture.errors import JournalError
from capture.journal.files import write_jsonl
from sandbox.errors import AgentError

MERGED = ("agent_message", "agent_thought")
SAVE_SECONDS = 2.0


class Trajectory:
    """Collects events; `save` writes them, at most every two seconds unless forced.

    What an agent reports may be any JSON. `max_bytes` bounds it: more is a runaway agent, not a trajectory.
    """

    def __init__(self, path: Path, *, max_bytes: int = 64 << 20) -> None:
        self.path = path
        self.max_bytes = max_bytes
        #: Where the events come from: `acp`, or `scraped` from a program's output or transcript.
        self.source = "scraped"
        self.events: list[dict[str, Any]] = []
        self._calls: dict[str, dict[str, Any]] = {}
        self._texts: list[str] | None = None
        self._size = 0
        self._saved_at = 0.0
        self._lock = threading.Lock()

    @property
    def tool_calls(self) -> int:
        return len(self._calls)

    def text(self, kind: str, text: str) -> None:
        """Adds a message or a thought; consecutive pieces of one kind become one event."""
        self._count(len(text))
        with self._lock:
            last = self.events[-1] if self.events else None
            if last is not None and last["type"] == kind and kind in MERGED and self._texts is not None:
                self._texts.append(text)
            else:
                self._join_texts()
                self.events.append({"type": kind, "text": "", "ts": _now()})
                self._texts = [text]
        self.save()

    def tool(self, call_id: object, **fields: Any) -> None:
        """Adds a tool call, or updates one: the given fields replace earlier values; None means not given."""
        name = _text(call_id)
        given = {field: value for field, value in fields.items() if value is not None}
        for field in ("kind", "title", "status"):
            if field in given:
                given[field] = _text(given[field])
        self._count(len(name) + len(json.dumps(given)))
        with self._lock:
            call = self._calls.get(name)
            if call is None:
                self._join_texts()
                call = {"type": "tool_call", "tool_call_id": name, "kind": "other", "title": "", "status": "pending",
                        "content": [], "started_at": _now()}  # fmt: skip
                self._calls[name] = call
                self.events.append(call)
            call.update(given)
            if call["status"] in ("completed", "failed"):
                call["finished_at"] = _now()
        self.save()

    def add(self, kind: str, **fields: Any) -> None:
        with self._lock:
            self._join_texts()
            self.events.append({"type": kind, **fields, "ts": _now()})
        self.save(now=True)

    def pending(self) -> list[str]:
        """Ids of tool calls that did not finish."""
        return [name for name, call in self._calls.items() if call["status"] not in ("completed", "failed")]

    def save(self, now: bool = False) -> None:
        """Writes the file if the last write was two seconds ago, or `now`. A full disk is reported by the journal."""
        if not now and time.monotonic() - self._saved_at < SAVE_SECONDS:
            return
        self._saved_at = time.monotonic()
        with self._lock:
            self._join_texts(keep_open=True)
            rows = [dict(event) for event in self.events]
        with contextlib.suppress(JournalError):
            write_jsonl(self.path, rows)

    def _join_texts(self, keep_open: bool = False) -> None:
        """Joins the pieces of the open text."""
        if self._texts is not None:
            text = "".join(self._texts)
            self.events[-1]["text"] = text
            self._texts = [text] if keep_open else None

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > self.max_bytes:
            raise AgentError(f"the agent reported more than {self.max_bytes >> 20} MB about itself", "acp_error")


def _text(value: object) -> str:
    """A text of the agent's; the JSON of what should have been one."""
    return value if isinstance(value, str) else json.dumps(value).decode()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat()
