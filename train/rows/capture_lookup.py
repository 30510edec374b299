"""What was captured for a row: the call that it ends with, looked up in the journal that the row names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capture.errors import CaptureError
from capture.journal.call import Call
from capture.journal.journal import JournalReader
from capture.journal.layout import RolloutDir


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """A call's prompt ids and the sampled ids of each choice."""

    prompt: list[int]
    choices: list[list[int]]


class CaptureLookup:
    """Looks up captured calls. The rows of a rollout are consecutive, so one journal at a time is read forward."""

    def __init__(self, jobs: Path | None = None) -> None:
        """`jobs`: the folder that was converted, if it is no longer where the rows say."""
        self._jobs = jobs
        self._path: Path | None = None
        self._calls: Iterator[Call] = iter(())
        self._at = -1

    def of(self, row: Mapping[str, Any]) -> CapturedCall | None:
        """The capture of the call that a row ends with; None where there is none, or not a complete one."""
        extra = row.get("extra")
        origin = row if not isinstance(extra, dict) else extra
        lines = origin.get("lines")
        line = lines[-1] if isinstance(lines, list) and lines else origin.get("exchange_index")
        path = self._journal(origin)
        if path is None or not isinstance(line, int):
            return None
        call = self._call(path, line)
        try:
            capture = call.capture if call is not None else None
        except CaptureError:
            return None
        if capture is None or not capture.complete or capture.prompt_token_ids is None:
            return None
        choices = [choice.token_ids.tolist() for choice in capture.completions if choice.token_ids is not None]
        return CapturedCall(capture.prompt_token_ids.tolist(), choices)

    def _journal(self, origin: Mapping[str, Any]) -> Path | None:
        folder, path = origin.get("source_rollout_dir"), origin.get("source_path")
        candidates = []
        if self._jobs is not None and isinstance(folder, str):
            candidates += [RolloutDir(self._jobs / folder).journal, RolloutDir(self._jobs).journal, self._jobs]
        elif isinstance(path, str):
            candidates.append(Path(path))
        return next((path for path in candidates if path.is_file()), None)

    def _call(self, path: Path, line: int) -> Call | None:
        if path != self._path or line <= self._at:
            self._path, self._calls, self._at = path, iter(JournalReader(path)), -1
        try:
            for call in self._calls:
                self._at = call.line
                if call.line == line:
                    return call
                if call.line > line:
                    return None
        except CaptureError:
            return None
        return None
