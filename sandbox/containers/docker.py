"""One container's life: created with limits, commands run in it, its processes ended and proved gone, removed.

Traps this answers to (Docker engine 20.10, API 1.41): a command's frames do not align to lines; a client's time-out
ends no command; a command line stands in `docker events`, so secrets go by environment only; a memory kill inside an
exec leaves `State.OOMKilled` false.
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

from sandbox.containers.base import STDERR, STDOUT
from sandbox.errors import AgentError, DockerError

#: What root needs to prepare and to judge. The agent is not root and holds none of these.
CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETUID", "SETGID", "KILL"]
FOREVER = ["sleep", "2147483647"]
#: Seconds until a container that was started again runs that and nothing else.
SETTLES = 20.0


def connect(timeout: float = 120.0) -> docker.APIClient:
    """A client of the engine that `DOCKER_HOST` or the default socket names. Raises `DockerError` with the fix."""
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
def doing(what: str) -> Iterator[None]:
    """Turns the SDK's errors into one `DockerError` that says what could not be done."""
    try:
        yield
    except docker.errors.APIError as error:
        raise DockerError(f"Docker could not {what}: {error.explanation or error}") from error
    except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
        raise DockerError(f"Docker could not {what}: {error}; is the engine still running?") from error


def inspect_image(api: docker.APIClient, image: str) -> dict[str, Any]:
    found: dict[str, Any] = api.inspect_image(image)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class Limits:
    """What a container may use at most."""

    cpus: float = 1.0
    memory_mb: int = 2048
    storage_mb: int = 10240
    pids: int = 512


@dataclass
class Container:
    """A started container. It is a `Box`."""

    api: docker.APIClient
    id: str
    name: str
    workdir: str
    limits: Limits
    image: str
    isolates: bool = True
    #: Set by the disk watch before it ends the container.
    disk_full: bool = False
    on_remove: Callable[[Container], None] = lambda _: None
    _born: float = field(default_factory=time.time)

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
        """Creates and starts a container that waits. Raises `DockerError`."""
        with doing(f"start a container from {image}"):
            config = inspect_image(api, image)["Config"] or {}
            where = workdir or (config.get("WorkingDir") or "").rstrip("/") or "/app"
            bytes_ = limits.memory_mb << 20
            host = api.create_host_config(
                mem_limit=bytes_,
                memswap_limit=bytes_,
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
                entrypoint=FOREVER[:1],
                command=FOREVER[1:],
                name=name,
                labels=dict(labels),
                environment=dict(env or {}),
                working_dir="/",  # the engine would create a missing one as root; ours is made with the right owner
                host_config=host,
                user="root",
                stop_signal="SIGKILL",
                healthcheck={"test": ["NONE"]},
            )
            sandbox = cls(api, created["Id"], name, where, limits, image)
            try:
                api.start(sandbox.id)
            except BaseException:
                sandbox.remove()
                raise
        return sandbox

    def open(
        self, argv: Sequence[str], *, user: str = "root", env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> ExecPipe:
        with doing(f"run {argv[0]} in the sandbox"):
            command = self.api.exec_create(
                self.id, list(argv), stdin=True, user=user, environment=dict(env or {}), workdir=cwd
            )
            sock = self.api.exec_start(command["Id"], socket=True)
        return ExecPipe(self.api, command["Id"], sock)

    def put(self, archive: bytes, to: str) -> None:
        with doing(f"copy files into {to} of the sandbox"):
            self.api.put_archive(self.id, to, archive)

    def get(self, path: str, limit: int) -> bytes | None:
        with doing(f"copy {path} out of the sandbox"):
            try:
                pieces, stat = self.api.get_archive(self.id, path)
            except docker.errors.NotFound:
                return None
            # Docker follows a link that is named; its `stat` still says that it was one.
            if stat.get("linkTarget"):
                return None
            data = bytearray()
            for piece in pieces:
                data += piece
                if len(data) > limit:
                    raise AgentError(f"{path} in the sandbox holds more than {limit >> 20} MB", "disk_full")
        return bytes(data)

    def end_processes(self) -> None:
        """Kills the container and starts it again: the kernel ends every process of a PID namespace with its first,
        so nothing survives, whichever user it ran as and however many there were. Files stay as they are."""
        with doing("end the agent's processes"):
            before = self.api.inspect_container(self.id)["State"]
            if before["Running"]:
                with contextlib.suppress(docker.errors.APIError):  # it may end by itself just now
                    self.api.kill(self.id)
                self.api.wait(self.id, timeout=60)
            stopped = self.api.inspect_container(self.id)["State"]
            if stopped["Running"] or stopped["Pid"]:
                raise DockerError("the agent's processes could not be ended; nothing it did can be trusted")
            self.api.start(self.id)
            after = self.api.inspect_container(self.id)["State"]
            others = self._others()
        if after["Pid"] == before["Pid"] or others:
            told = f" ({others[0]})" if others else ""
            raise DockerError(f"processes of the agent are still in the sandbox{told}; nothing it did can be trusted")

    def _others(self) -> list[str]:
        """What runs in a container that was just started besides its own `FOREVER`.

        The engine's own starter is listed until it becomes that, which takes a moment on a busy machine.
        """
        deadline = time.monotonic() + SETTLES
        while True:
            rows = (" ".join(row) for row in self.api.top(self.id)["Processes"])
            others = [row for row in rows if FOREVER[1] not in row]
            if not others or time.monotonic() > deadline:
                return others
            time.sleep(0.1)

    def size_mb(self) -> float:
        """Mebibytes written since the image was made."""
        with doing("measure the sandbox"):
            found = self.api.containers(all=True, size=True, filters={"id": self.id})
        return float(found[0].get("SizeRw") or 0) / (1 << 20) if found else 0.0

    def cause_of_death(self, exit_code: int | None) -> tuple[str, str] | None:
        if self.disk_full:
            return "disk_full", f"wrote more than the sandbox's {self.limits.storage_mb} MB of disk"
        if exit_code == 137 and self._memory_ran_out():
            return "out_of_memory", f"needed more than the sandbox's {self.limits.memory_mb} MB of memory (exit 137)"
        return None

    def _memory_ran_out(self) -> bool:
        with contextlib.suppress(docker.errors.DockerException, requests.exceptions.RequestException):
            # Until a second from now: the event of a kill may come after the exit of what was killed.
            events = self.api.events(
                since=int(self._born) - 1,
                until=int(time.time()) + 1,
                filters={"container": self.id, "event": "oom"},
                decode=True,
            )
            return any(True for _ in events)
        return False

    def kill(self) -> None:
        """Ends all commands at once; those who wait for them see the end."""
        with contextlib.suppress(docker.errors.DockerException, requests.exceptions.RequestException):
            self.api.kill(self.id)

    def remove(self) -> None:
        """Removes the container and its volumes; a second try where the engine is busy. Raises `DockerError`."""
        self.on_remove(self)
        for last in (False, True):
            try:
                self.api.remove_container(self.id, force=True, v=True)
                return
            except docker.errors.NotFound:
                return
            except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
                if "already in progress" in str(error):
                    return
                if last:
                    raise DockerError(f"Docker could not remove the container {self.name}: {error}") from error
                time.sleep(1)


class ExecPipe:
    """Standard streams of a `docker exec`, demultiplexed: each frame has a stream number and a length."""

    def __init__(self, api: docker.APIClient, exec_id: str, sock: Any) -> None:
        self._api = api
        self._exec = exec_id
        self._held = sock  # closing it closes the connection
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
        with contextlib.suppress(OSError):
            self._held.close()
        with contextlib.suppress(OSError):
            self._sock.close()

    def exit_code(self) -> int:
        for _ in range(50):  # the streams may end a moment before the engine knows the code
            with doing("ask how a command ended"):
                code = self._api.exec_inspect(self._exec)["ExitCode"]
            if code is not None:
                return int(code)
            time.sleep(0.02)
        return -1
