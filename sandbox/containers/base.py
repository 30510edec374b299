"""What every sandbox can do: run commands, talk to a running one, move files in and out, end everything.

`docker.py` is the real implementation. `local.py` has the same shape for machines without Docker and isolates nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sandbox.containers.streams import HeadTail, LineSplitter

STDOUT, STDERR = 1, 2
OUTPUT_LIMIT = 1 << 20


@dataclass(frozen=True)
class CommandResult:
    """How a command ended. `exit_code` is None after a timeout: the command may still be running."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    #: Bytes of output beyond the limit, discarded.
    dropped: int = 0

    @property
    def timed_out(self) -> bool:
        return self.exit_code is None

    @property
    def output(self) -> str:
        return (self.stdout + self.stderr).decode(errors="replace")

    def tail(self, characters: int = 300) -> str:
        """The end of the output on one line, for an error message."""
        return " / ".join(line.strip() for line in self.output.splitlines() if line.strip())[-characters:]


class Pipe(Protocol):
    """The standard streams of a running command."""

    def read(self, timeout: float) -> tuple[int, bytes] | None:
        """`(STDOUT | STDERR, bytes)`, None at the end. Raises `TimeoutError` after `timeout` seconds without data."""

    def write(self, data: bytes) -> None:
        """Raises `OSError` when the command no longer reads."""

    def close_stdin(self) -> None: ...

    def close(self) -> None: ...

    def exit_code(self) -> int:
        """The exit code, once `read` has returned None; -1 when it is unknown."""


class Sandbox(Protocol):
    """One sandbox. Commands are argument lists; `env` is added to the sandbox's own and is on no command line."""

    workdir: str
    #: False for a plain folder of this machine, whose users and system folders are left alone.
    isolates: bool

    def open(
        self, argv: Sequence[str], *, user: str = "root", env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> Pipe: ...

    def put(self, archive: bytes, to: str) -> None:
        """Unpacks a tar archive into the folder `to`, with the archive's owners and modes."""

    def get(self, path: str, limit: int) -> bytes | None:
        """A tar archive of `path`, None when it is missing or a link.

        Raises `AgentError` for more than `limit` bytes, or for a folder that cannot be archived.
        """

    def end_processes(self) -> None:
        """Ends every process in the sandbox and proves it; files stay. Raises `DockerError` without proof."""

    def cause_of_death(self, exit_code: int | None) -> tuple[str, str] | None:
        """`(category, words)` when the agent hit the sandbox's limits or stopped the sandbox itself, else None."""

    def remove(self) -> None:
        """Raises `DockerError` when something is left."""


class Installable(Protocol):
    """What a pool installs in a sandbox. With a `version` the result is kept as an image under that version."""

    @property
    def version(self) -> str | None: ...

    def install(self, sandbox: Sandbox) -> None: ...


def run(
    sandbox: Sandbox,
    argv: Sequence[str],
    *,
    user: str = "root",
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdin: bytes = b"",
    timeout: float = 60.0,
    limit: int = OUTPUT_LIMIT,
    on_line: Callable[[bytes], None] | None = None,
) -> CommandResult:
    """Runs a command until it ends or `timeout` seconds have passed.

    `on_line` gets each line of standard output. Of each stream the first and the last `limit / 2` bytes are returned.
    """
    pipe = sandbox.open(argv, user=user, env=env, cwd=cwd)
    output = {STDOUT: HeadTail(limit), STDERR: HeadTail(limit)}
    lines = LineSplitter(on_line) if on_line else None
    deadline = time.monotonic() + timeout
    try:
        if stdin:
            pipe.write(stdin)
        pipe.close_stdin()
        while True:
            try:
                piece = pipe.read(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                code: int | None = None
                break
            if piece is None:
                code = pipe.exit_code()
                break
            output[piece[0]].add(piece[1])
            if lines and piece[0] == STDOUT:
                lines.feed(piece[1])
    finally:
        pipe.close()
    if lines:
        lines.flush()
    stdout, stderr = output[STDOUT], output[STDERR]
    return CommandResult(code, stdout.value(), stderr.value(), stdout.dropped + stderr.dropped)
