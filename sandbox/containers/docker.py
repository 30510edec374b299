"""The life of one container: create it with limits, run commands in it, end its processes for certain, remove it.

Docker behavior that this module works around (engine 20.10, API 1.41): the frames of a command's output do not align
with lines; a client's timeout does not end the command; command lines are visible in `docker events`, so secrets are
passed in the environment only; an out-of-memory kill inside an exec leaves `State.OOMKilled` false; a tree thousands of
folders deep makes a container that cannot be removed.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import docker
import requests
from docker.types import LogConfig, Ulimit
from docker.utils import kwargs_from_env

from sandbox.containers.base import STDERR, STDOUT, run
from sandbox.errors import AgentError, BrokenSandbox, DockerError, RolloutError

#: What root needs to prepare the sandbox and to verify. The agent is not root and has none of these.
CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETUID", "SETGID", "KILL"]
KEEP_ALIVE = ["sleep", "2147483647"]
#: What Docker says of a container that cannot run its first process, or whose init ended because it could not.
_NOTHING_STARTS = ("unable to start container process", "is not running")
#: By number: an agent that is root may have taken the names away (`/etc/passwd`).
ROOT = "0"
#: Levels of folders below `/` that stay. Trees of thousands of levels outlive the container: the engine opens a file
#: descriptor per level to remove them.
MAX_DEPTH = 128
REMOVE_DEEP_TREES = f"find / -xdev -mindepth {MAX_DEPTH} -maxdepth {MAX_DEPTH} -type d -prune -execdir rm -rf -- {{}} +"


def connect(timeout: float = 600.0) -> docker.APIClient:
    """A client of the engine that `DOCKER_HOST` or the default socket names; `timeout` is seconds per request.

    Raises `DockerError` with the fix.
    """
    try:
        api = docker.APIClient(**kwargs_from_env(), version="auto", timeout=int(timeout), max_pool_size=128)
        api.ping()
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        raise DockerError(_why_no_engine(str(error))) from error
    return api


def _why_no_engine(text: str) -> str:
    where = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if "ermission denied" in text:
        return (
            f"this user may not use the Docker engine at {where}; add it to the group docker "
            "(sudo usermod -aG docker $USER), then log in again"
        )
    return f"no Docker engine answers at {where}; install Docker and start it (sudo systemctl start docker)"


@contextlib.contextmanager
def docker_errors(action: str) -> Iterator[None]:
    """Turns the SDK's errors into a `DockerError`: "Docker could not <action>: ..."."""
    try:
        yield
    except docker.errors.APIError as error:
        raise DockerError(f"Docker could not {action}: {error.explanation or error}") from error
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
        raise DockerError(f"Docker could not {action}: {error}; is the engine still running?") from error


def inspect_image(api: docker.APIClient, image: str) -> dict[str, Any]:
    found: dict[str, Any] = api.inspect_image(image)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class Limits:
    """The most that a container may use."""

    cpus: float = 1.0
    memory_mb: int = 2048
    storage_mb: int = 10240
    pids: int = 512


@dataclass
class Container:
    """A started container, which is a `Sandbox`.

    `settle_seconds`: how long a restarted container may still show the engine's own starter process.
    """

    api: docker.APIClient
    id: str
    name: str
    workdir: str
    limits: Limits
    image: str
    isolates: bool = True
    #: Whose container this is.
    rollout: str = ""
    #: Set by the disk watch before it ends the container.
    disk_full: bool = False
    on_removed: Callable[[Container], None] = lambda _: None
    settle_seconds: float = 20.0
    _killed: bool = False
    _created_at: float = field(default_factory=time.time)

    @classmethod
    def start(
        cls,
        api: docker.APIClient,
        image: str,
        *,
        name: str,
        limits: Limits,
        labels: Mapping[str, str],
        network: str,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
    ) -> Container:
        """Creates and starts a container that runs `KEEP_ALIVE`. Raises `DockerError`."""
        with docker_errors(f"start a container from {image}"):
            config = inspect_image(api, image)["Config"] or {}
            cwd = workdir or (config.get("WorkingDir") or "").rstrip("/") or "/app"
            memory = limits.memory_mb << 20
            host = api.create_host_config(
                mem_limit=memory,
                memswap_limit=memory,
                nano_cpus=int(min(limits.cpus, os.cpu_count() or 1) * 1e9),
                pids_limit=limits.pids,
                cap_drop=["ALL"],
                cap_add=CAPABILITIES,
                security_opt=["no-new-privileges:true"],
                init=True,
                network_mode=network,
                log_config=LogConfig(type="json-file", config={"max-size": "1m"}),
                ulimits=[
                    Ulimit(name="fsize", soft=limits.storage_mb << 20, hard=limits.storage_mb << 20),
                    Ulimit(name="core", soft=0, hard=0),
                ],
            )
            created = api.create_container(
                image,
                entrypoint=KEEP_ALIVE[:1],
                command=KEEP_ALIVE[1:],
                name=name,
                labels=dict(labels),
                environment=dict(env or {}),
                working_dir="/",  # the engine would create a missing folder as root; `hardening.prepare` creates it
                host_config=host,
                user=ROOT,
                stop_signal="SIGKILL",
                healthcheck={"test": ["NONE"]},
            )
            sandbox = cls(api, created["Id"], name, cwd, limits, image)
            try:
                api.start(sandbox.id)
            except BaseException:
                sandbox.remove()
                raise
        return sandbox

    def open(
        self, argv: Sequence[str], *, user: str = "root", env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> ExecPipe:
        with docker_errors(f"run {argv[0]} in the sandbox"):
            command = self.api.exec_create(
                self.id,
                list(argv),
                stdin=True,
                user=ROOT if user == "root" else user,
                environment=dict(env or {}),
                workdir=cwd,
            )
            sock = self.api.exec_start(command["Id"], socket=True)
        return ExecPipe(self.api, command["Id"], sock)

    def put(self, archive: bytes, to: str) -> None:
        with docker_errors(f"copy files into {to} of the sandbox"):
            self.api.put_archive(self.id, to, archive)

    def get(self, path: str, limit: int) -> bytes | None:
        data = bytearray()
        try:
            pieces, stat = self.api.get_archive(self.id, path)
            with contextlib.closing(pieces):
                # Docker follows a link that is named; its `stat` still says that it is one.
                if stat.get("linkTarget"):
                    return None
                for piece in pieces:
                    data += piece
                    if len(data) > limit:
                        raise AgentError(f"{path} in the sandbox is larger than {limit >> 20} MB", "disk_full")
        except docker.errors.NotFound:
            return None
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
            with docker_errors(f"copy {path} out of the sandbox"):
                self.api.ping()
            # The engine works; what the agent left in the folder cannot be archived.
            raise AgentError(f"{path} in the sandbox cannot be copied: {error}", "agent_error") from error
        return bytes(data)

    def end_processes(self) -> None:
        """Kills the container and starts it again: the kernel ends every process of a PID namespace with its first,
        so none survives, whatever its user and however many there are. Files stay as they are."""
        with docker_errors("end the agent's processes"):
            before = self.api.inspect_container(self.id)["State"]
            if before["Running"]:
                with contextlib.suppress(docker.errors.APIError):  # it may end by itself in this moment
                    self.api.kill(self.id)
                self.api.wait(self.id)
            stopped = self.api.inspect_container(self.id)["State"]
            if stopped["Running"] or stopped["Pid"]:
                raise DockerError("the agent's processes could not be ended; nothing it did can be trusted")
            try:
                self.api.start(self.id)
                after = self.api.inspect_container(self.id)["State"]
                others = self._other_processes()
            except docker.errors.APIError as error:
                if not any(words in str(error.explanation) for words in _NOTHING_STARTS):
                    raise
                raise BrokenSandbox("the agent left a sandbox in which no process can be started") from error
        if after["Pid"] == before["Pid"] or others:
            example = f" ({others[0]})" if others else ""
            raise DockerError(
                f"processes of the agent are still in the sandbox{example}; nothing it did can be trusted"
            )

    def _other_processes(self) -> list[str]:
        """What runs in a restarted container besides its own `KEEP_ALIVE`.

        The engine's starter process is listed until it becomes that, which takes a moment on a busy machine.
        """
        deadline = time.monotonic() + self.settle_seconds
        while True:
            rows = (" ".join(row) for row in self.api.top(self.id)["Processes"])
            others = [row for row in rows if KEEP_ALIVE[1] not in row]
            if not others or time.monotonic() > deadline:
                return others
            time.sleep(0.1)

    def size_mb(self) -> float:
        """Mebibytes written on top of the image."""
        with docker_errors("measure the sandbox"):
            found = self.api.containers(all=True, size=True, filters={"id": self.id})
        return float(found[0].get("SizeRw") or 0) / (1 << 20) if found else 0.0

    def cause_of_death(self, exit_code: int | None) -> tuple[str, str] | None:
        if self.disk_full:
            return "disk_full", f"wrote more than the sandbox's {self.limits.storage_mb} MB of disk"
        ended = not self._killed and not self._is_running()
        if (exit_code == 137 or ended) and self._memory_ran_out():
            return "out_of_memory", f"needed more than the sandbox's {self.limits.memory_mb} MB of memory (exit 137)"
        return ("agent_error", "ended its own sandbox") if ended else None

    def _is_running(self) -> bool:
        """True also where the engine does not answer."""
        with contextlib.suppress(docker.errors.DockerException, requests.exceptions.RequestException):
            return bool(self.api.inspect_container(self.id)["State"]["Running"])
        return True

    def _memory_ran_out(self) -> bool:
        with contextlib.suppress(docker.errors.DockerException, requests.exceptions.RequestException):
            # Until a second from now: the event of a kill may come after the exit of the killed process.
            events = self.api.events(
                since=int(self._created_at) - 1,
                until=int(time.time()) + 1,
                filters={"container": self.id, "event": "oom"},
                decode=True,
            )
            return any(True for _ in events)
        return False

    def kill(self) -> None:
        """Ends all commands at once; whoever waits for one sees its end."""
        self._killed = True
        with contextlib.suppress(docker.errors.DockerException, requests.exceptions.RequestException):
            self.api.kill(self.id)

    def remove(self) -> None:
        """Removes the container and its volumes; tries twice, for a busy engine. Raises `DockerError`."""
        if self._is_running():
            with contextlib.suppress(RolloutError):
                run(self, ["sh", "-c", REMOVE_DEEP_TREES], timeout=600)
        for last in (False, True):
            try:
                self.api.remove_container(self.id, force=True, v=True)
                break
            except docker.errors.NotFound:
                break
            except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
                if "already in progress" in str(error):
                    break
                if last:
                    raise DockerError(f"Docker could not remove the container {self.name}: {error}") from error
                time.sleep(1)
        self.on_removed(self)


class ExecPipe:
    """Standard streams of a `docker exec`, demultiplexed: each frame starts with a stream number and a length."""

    def __init__(self, api: docker.APIClient, exec_id: str, sock: Any) -> None:
        self._api = api
        self._exec = exec_id
        self._file = sock
        self._sock: socket.socket = getattr(sock, "_sock", sock)
        self._buffer = bytearray()
        self._left, self._stream = 0, STDOUT
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)

    def read(self, timeout: float) -> tuple[int, bytes] | None:
        deadline = time.monotonic() + timeout
        while True:
            if self._left and self._buffer:
                piece = bytes(self._buffer[: self._left])
                del self._buffer[: len(piece)]
                self._left -= len(piece)
                return self._stream, piece
            if not self._left and len(self._buffer) >= 8:
                kind, self._left = struct.unpack(">BxxxL", self._buffer[:8])
                self._stream = STDERR if kind == 2 else STDOUT
                del self._buffer[:8]
                continue
            if not self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            try:
                data = self._sock.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                return None
            self._buffer += data

    def write(self, data: bytes) -> None:
        self._sock.sendall(data)

    def close_stdin(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes the HTTP response before its socket: the other way round Python 3.13 reports an unraisable error
        ("I/O operation on closed file") when the response is collected."""
        for part in (getattr(self._file, "_response", None), self._file, self._sock):
            if part is not None:
                with contextlib.suppress(OSError, ValueError):
                    part.close()

    def exit_code(self) -> int:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:  # the streams may end a moment before the engine knows the code
            with docker_errors("ask how a command ended"):
                code = self._api.exec_inspect(self._exec)["ExitCode"]
            if code is not None:
                return int(code)
            time.sleep(0.02)
        return -1
