"""A plain folder of this machine in place of a sandbox, for `bench demo` without Docker. It isolates nothing.

A task's absolute paths (`/app`, `/logs`, ...) become paths below the folder: in commands, variables, files and in what
is written to a program. Only tasks and agents of this package run in it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from sandbox.containers.archives import extract
from sandbox.containers.base import STDERR, STDOUT, Installable, Sandbox
from sandbox.tasks.task import Task

PATHS = re.compile(rb"(?<![\w/.])/(app|logs|verifier|tests|opt/benchflow|instruction\.md)(?![\w-])")
WARNING = "no Docker engine answers here: the agent runs in a plain folder of this machine, which is not a sandbox"


class LocalSandbox:
    """One temporary folder, which `remove` removes."""

    isolates = False

    def __init__(self) -> None:
        # Short, because a small model has to spell it.
        self.root = Path(tempfile.mkdtemp(prefix="b", dir="/tmp"))
        self.workdir = "/app"
        self._running: list[subprocess.Popen[bytes]] = []
        #: Whose sandbox this is.
        self.rollout = ""
        for name in ("/app", "/logs/agent", "/logs/artifacts", "/opt/benchflow"):
            self.path(name).mkdir(parents=True, exist_ok=True)

    def mapped(self, data: bytes) -> bytes:
        """`data` with a task's absolute paths below `root`."""
        return PATHS.sub(lambda found: os.fsencode(self.root) + found.group(0), data)

    def path(self, name: str) -> Path:
        return Path(os.fsdecode(self.mapped(name.encode())))

    def open(
        self, argv: Sequence[str], *, user: str = "root", env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> LocalPipe:
        ours = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self.root)}
        variables = {"LANG": "C.UTF-8", **(env or {}), **ours}
        words = [os.fsdecode(self.mapped(word.encode())) for word in argv]
        if words[0] == "python3":
            words[0] = sys.executable
        child = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={name: os.fsdecode(self.mapped(value.encode())) for name, value in variables.items()},
            cwd=self.path(cwd) if cwd else self.root,
            start_new_session=True,
        )
        self._running.append(child)
        return LocalPipe(self, child)

    def put(self, archive: bytes, to: str) -> None:
        extract(archive, self.path(to), self.mapped)

    def get(self, path: str, limit: int) -> bytes | None:
        found = self.path(path)
        if not found.exists() or found.is_symlink():
            return None
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            tar.add(found, found.name)
        return buffer.getvalue()

    def end_processes(self) -> None:
        for child in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        self._running.clear()

    def cause_of_death(self, exit_code: int | None) -> tuple[str, str] | None:
        return None

    def remove(self) -> None:
        self.end_processes()
        shutil.rmtree(self.root, ignore_errors=True)


class LocalPipe:
    """Standard streams of a child process; paths in what is written to it are mapped."""

    def __init__(self, sandbox: LocalSandbox, child: subprocess.Popen[bytes]) -> None:
        self._sandbox, self._child = sandbox, child
        self._selector = selectors.DefaultSelector()
        for number, stream in ((STDOUT, child.stdout), (STDERR, child.stderr)):
            if stream is not None:
                self._selector.register(stream, selectors.EVENT_READ, number)

    def read(self, timeout: float) -> tuple[int, bytes] | None:
        deadline = time.monotonic() + timeout
        while self._selector.get_map():
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                if data:
                    return int(key.data), data
                self._selector.unregister(key.fileobj)
        return None

    def write(self, data: bytes) -> None:
        stdin = self._stdin()
        stdin.write(self._sandbox.mapped(data))
        stdin.flush()

    def close_stdin(self) -> None:
        with contextlib.suppress(OSError):
            self._stdin().close()

    def close(self) -> None:
        self.close_stdin()
        self._selector.close()
        for stream in (self._child.stdout, self._child.stderr):
            if stream is not None:
                stream.close()

    def exit_code(self) -> int:
        return self._child.wait()

    def _stdin(self) -> IO[bytes]:
        assert self._child.stdin is not None
        return self._child.stdin


class LocalPool:
    """Plain folders for a job: a `ContainerPool` without containers."""

    kind = "local"

    def __init__(self, job: str, tasks: Sequence[Task], report: Callable[[str], None]) -> None:
        self._live: list[LocalSandbox] = []

    def listen_addresses(self) -> list[str]:
        return ["127.0.0.1"]

    def close_host(self, open_ports: Sequence[int]) -> list[str]:
        return [WARNING]

    def proxy_address(self, task: Task) -> str:
        return "127.0.0.1"

    def sandbox(self, task: Task, agent: Installable, rollout: str) -> Sandbox:
        sandbox = self.verifier_sandbox(task, rollout)
        agent.install(sandbox)
        return sandbox

    def verifier_sandbox(self, task: Task, rollout: str) -> Sandbox:
        sandbox = LocalSandbox()
        sandbox.rollout = rollout
        self._live.append(sandbox)
        return sandbox

    def kill(self) -> None:
        for sandbox in list(self._live):
            sandbox.end_processes()

    def kill_rollout(self, rollout: str) -> None:
        for sandbox in list(self._live):
            if sandbox.rollout == rollout:
                sandbox.end_processes()

    def close(self) -> None:
        for sandbox in self._live:
            sandbox.remove()
        self._live.clear()
