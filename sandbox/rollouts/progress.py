"""What a job prints while it runs: one line per event, and on a terminal a progress bar below them.

Without a terminal the bar's counts are printed as a line after a while without output.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from typing import IO, Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from capture.command.terminal import printable
from proxy import ProxyError, ProxyThread
from sandbox.rollouts.result_files import outcome

REFRESH_SECONDS = 1.0
#: Without output for so long, the counts are printed as a line.
QUIET_SECONDS = 10.0


class Progress:
    """Lines go to `out`, status to standard error. With `live` there is a bar; without, plain lines only.

    Texts may be the agent's: what a terminal would act on is escaped.
    """

    def __init__(
        self, out: IO[str] | None = None, *, live: bool | None = None, quiet_seconds: float = QUIET_SECONDS,
        command: str = "bench run",
    ) -> None:  # fmt: skip
        self.quiet_seconds, self._command = quiet_seconds, command
        self._out = out  # None: standard output, which a live display may have wrapped
        self._console = Console(stderr=True, highlight=False)
        self._live_wanted = self._console.is_terminal if live is None else live
        self._lock = threading.RLock()
        self._live: Live | None = None
        self._bar = Bar(
            TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[counts]}"), auto_refresh=False,
        )  # fmt: skip
        self._task = self._bar.add_task("rollouts", total=None, counts="")
        self._kinds: Counter[str] = Counter()
        self._phases: dict[str, str] = {}
        self._sessions: dict[str, str] = {}
        self._tokens = self._calls = self._complete = 0
        self._proxy: ProxyThread | None = None
        self._total = 0
        self._last = time.monotonic()
        self._ended = threading.Event()

    def begin(self, total: int, proxy: ProxyThread | None) -> None:
        self._proxy, self._total, self._last = proxy, total, time.monotonic()
        self._bar.update(self._task, total=total)
        if self._live_wanted:
            self._live = Live(
                self._bar, console=self._console, transient=True, auto_refresh=False, redirect_stderr=False,
                redirect_stdout=sys.stdout.isatty(),
            )  # fmt: skip
            self._live.start()
        threading.Thread(target=self._refresh, name="progress", daemon=True).start()

    def end(self) -> None:
        self._ended.set()
        with self._lock:
            if self._live is not None:
                self._live.stop()
                self._live = None

    def line(self, text: str) -> None:
        """Prints a line of the run's output."""
        with self._lock:
            self._last = time.monotonic()
            print(printable(text), file=self._out or sys.stdout, flush=True)

    def status(self, text: str) -> None:
        """Prints a line about the run on standard error."""
        with self._lock:
            self._last = time.monotonic()
            with contextlib.suppress(OSError):  # a log on a full disk stops no rollout and no verdict
                self._console.print(f"{self._command}: {printable(text)}", markup=False, emoji=False, soft_wrap=True)

    def phase(self, rollout: str, phase: str) -> None:
        with self._lock:
            self._phases[rollout] = phase

    def session(self, rollout: str, session: str) -> None:
        with self._lock:
            self._sessions[rollout] = session

    def dropped(self, rollout: str) -> None:
        """A rollout was stopped."""
        with self._lock:
            self._phases.pop(rollout, None)
            self._sessions.pop(rollout, None)

    def done(self, result: dict[str, Any], *, final: bool) -> None:
        """A rollout ended; not `final` when another attempt follows."""
        with self._lock:
            self.dropped(result["rollout_name"])
            usage, capture = result["agent_result"], result["token_capture"]
            self._tokens += usage["total_tokens"] or 0
            self._calls += capture["calls"]
            self._complete += capture["complete_calls"]
            self.line(verdict(result) + ("" if final else "; trying again"))
            if final:
                self._kinds[outcome(result)] += 1
                self._bar.advance(self._task)

    def _refresh(self) -> None:
        while not self._ended.wait(min(REFRESH_SECONDS, self.quiet_seconds)):
            counts = self._counts()
            with self._lock:
                if self._live is not None:
                    self._bar.update(self._task, counts=counts)
                    self._live.refresh()
                elif time.monotonic() - self._last >= self.quiet_seconds and not self._ended.is_set():
                    self.status(f"{sum(self._kinds.values())} of {self._total} rollouts ended: {counts}")

    def _counts(self) -> str:
        tokens, calls, complete = self._tokens, self._calls, self._complete
        for session in list(self._sessions.values()):
            try:
                state = self._proxy.session_state(session) if self._proxy else {}
            except ProxyError:  # it has just been closed
                continue
            tokens += state.get("prompt_tokens", 0) + state.get("completion_tokens", 0)
            calls += state.get("calls", 0)
            complete += state.get("complete_calls", 0)
        passed, failed = self._kinds["passed"], self._kinds["failed"]
        errors = self._kinds["errored"] + self._kinds["verifier_errored"]
        phases = Counter(self._phases.values())
        running = ", ".join(f"{count} {phase}" for phase, count in sorted(phases.items()))
        coverage = f"{complete}/{calls} calls complete" if calls else "no calls yet"
        return f"{passed} passed, {failed} failed, {errors} errors · {tokens:,} tokens, {coverage} · {running}"


def verdict(result: dict[str, Any]) -> str:
    """`[PASS] write-number (reward=1.00, tools=1)`; without a reward, the error."""
    kind, name = outcome(result), result["task_name"]
    if kind in ("passed", "failed"):
        word = "PASS" if kind == "passed" else "FAIL"
        reward, tools = result["rewards"]["reward"], result["n_tool_calls"]
        more = f"; {_short(result['error'])}" if result["error"] else ""
        return f"[{word}] {name} (reward={reward:.2f}, tools={tools}){more}"
    category = result["error_category"] or result["verifier_error_category"]
    return f"[ERROR] {name} ({category}: {_short(result['error'] or result['verifier_error'] or 'unknown')})"


def _short(text: str, most: int = 300) -> str:
    """One line; `result.json` has the whole text."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."
