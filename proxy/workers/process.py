"""A worker's process as the supervisor sees it: started, ready or failed, ended."""

from __future__ import annotations

import asyncio
import json
import pickle
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from proxy.sessions.placement import Placement
from proxy.sessions.policy import Policy
from proxy.settings import Settings
from proxy.workers.opened_sessions import OpenedSession

#: A worker that died this often within so many seconds will die again: the proxy ends.
DEATHS, WITHIN = 3, 60.0
#: What a worker's process runs: this package, wherever it was found, whatever lies in the current folder.
COMMAND = "import sys; sys.path[:] = {path!r}; from proxy.workers.worker import main; main()"


@dataclass(frozen=True, slots=True)
class Start:
    """What a worker's process reads from stdin. Keys are in it, so neither a file nor a command line has it."""

    settings: Settings
    placement: Placement
    sockets: tuple[int, ...]  # descriptors of its listening sockets
    admin: Path
    sessions: list[OpenedSession]
    policies: dict[str, Policy]
    paused: bool


class Worker:
    """One worker: its sockets, which outlive its processes, and the process that serves them now.

    While no process does, the kernel holds new connections, so that clients wait instead of being refused.
    """

    def __init__(self, placement: Placement, sockets: list[socket.socket], settings: Settings, admin: Path) -> None:
        self.index = placement.index
        self.placement = placement
        self.admin = admin
        #: Set while it has its sessions and accepts connections.
        self.ready = asyncio.Event()
        self._sockets = sockets
        self.settings = settings
        #: Whether the proxy's engines are paused.
        self.paused = False
        self._deaths: deque[float] = deque(maxlen=DEATHS)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(
        self, sessions: Sequence[OpenedSession] = (), policies: dict[str, Policy] | None = None
    ) -> str | None:
        """A new process, with these sessions opened again under their keys and ids; waits until it is ready.

        Returns None, or why it could not start: its own sentence, or an empty string where it died without one.
        """
        self.admin.unlink(missing_ok=True)
        descriptors = tuple(listening.fileno() for listening in self._sockets)
        command = COMMAND.format(path=sys.path)
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            pass_fds=descriptors,
            start_new_session=True,  # Ctrl-C in a terminal reaches the supervisor alone, which stops its workers
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        start = Start(
            self.settings, self.placement, descriptors, self.admin, list(sessions), policies or {}, self.paused
        )
        # stdin stays open: its end tells a worker that the supervisor is gone
        process.stdin.write(pickle.dumps(start))
        answer = await process.stdout.readline()
        if not answer:
            return ""
        failure: str | None = json.loads(answer)["failure"]
        if failure is None:
            self.ready.set()
        return failure

    async def ended(self) -> str:
        """Waits until its process is gone, and with it its hold on its journals; says how it ended."""
        code = 0 if self._process is None else await self._process.wait()
        self.ready.clear()
        if code >= 0:
            return f"exit code {code}"
        names = {number.value: number.name for number in signal.Signals}  # not every signal has a name
        return f"killed by {names.get(-code, f'signal {-code}')}"

    def died(self) -> bool:
        """Counts a death; whether it has died too often."""
        self._deaths.append(time.monotonic())
        return len(self._deaths) == DEATHS and self._deaths[-1] - self._deaths[0] < WITHIN

    def stop(self) -> None:
        """Lets its process finish calls in flight and end. Its port is closed here first: nobody waits at it."""
        for listening in self._sockets:
            listening.close()
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
