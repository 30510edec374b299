"""A worker's process as the front sees it: started, heard of, and started again with its sessions when it dies."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from proxy.settings import Settings
from proxy.workers.fd_channel import Channel
from proxy.workers.session_index import Opened

#: A worker that died this often within so many seconds will die again: the proxy ends.
DEATHS, WITHIN = 3, 60.0
#: Seconds that a connection, or a question of the admin's, waits for its worker to be started again.
BACK_SECONDS = 60.0
#: What a worker's process runs: this package, wherever it was found, whatever lies in the current folder.
COMMAND = "import sys; sys.path[:] = {path!r}; from proxy.workers.worker import main; main({channel}, {boot})"


class Worker:
    """One worker. It is a process of its own from the start, not a copy of the front: copies of one with threads and an
    event loop are not to be trusted.
    """

    def __init__(self, index: int, port: int, settings: Settings, admin: Path) -> None:
        self.index = index
        self.port = port
        self.settings = settings
        self.admin = admin
        #: It has its sessions and takes connections.
        self.up = asyncio.Event()
        #: It is up, or it is gone.
        self.heard = asyncio.Event()
        self.failed: str | None = None
        self._deaths: deque[float] = deque(maxlen=DEATHS)
        self.channel: Channel
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self, sessions: Sequence[Opened] = (), versions: dict[str, str] | None = None) -> None:
        """A new process, with these sessions opened again under their keys and ids."""
        self.heard.clear()
        self.failed = None
        self.admin.unlink(missing_ok=True)
        boot = os.memfd_create("boot")  # keys are in it: neither the command line nor a file is the place for them
        end, theirs = Channel.pair()
        with theirs, os.fdopen(boot, "w+b") as file:
            pickle.dump((self.settings, self.index, self.port, self.admin, list(sessions), versions or {}), file)
            file.flush()
            file.seek(0)
            command = COMMAND.format(path=sys.path, channel=theirs.fileno(), boot=boot)
            self._process = subprocess.Popen(  # a group of its own: what a terminal ends is the front, which ends it
                [sys.executable, "-c", command], pass_fds=(theirs.fileno(), boot), process_group=0
            )
        self.channel = Channel(end)

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def ended(self) -> str:
        """Waits until its process is gone, and with it its hold on its journals; says how it went."""
        code = 0 if self._process is None else self._process.wait()
        if code >= 0:
            return f"exit code {code}"
        names = {one.value: one.name for one in signal.Signals}  # not all have one
        return f"killed by {names.get(-code, f'signal {-code}')}"

    def died(self) -> bool:
        """Counts a death; whether it has died too often."""
        self._deaths.append(time.monotonic())
        return len(self._deaths) == DEATHS and self._deaths[-1] - self._deaths[0] < WITHIN
