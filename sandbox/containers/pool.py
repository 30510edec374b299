"""Where a job's sandboxes come from. `DockerHouse` gives containers on the job's own networks."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Protocol

import docker
import requests

from sandbox.agents.base import Agent
from sandbox.containers import images, reaper
from sandbox.containers.base import Sandbox
from sandbox.containers.docker import Container, Limits, connect
from sandbox.containers.egress_proxy import Egress
from sandbox.containers.network import Network
from sandbox.errors import DockerError, RolloutError
from sandbox.tasks.task import Task

DISK_WATCH_SECONDS = 5.0
CLOSED = ("no-network", "allowlist")


class ContainerPool(Protocol):
    """Gives sandboxes, and the address under which they reach the proxy."""

    kind: str

    def hosts(self) -> list[str]:
        """Addresses of this machine on which the proxy must listen."""

    def guard(self, ports: list[int]) -> list[str]:
        """Closes everything of this machine but `ports`; sentences about what could not be closed."""

    def sandbox(self, task: Task, agent: Agent, rollout: str) -> Sandbox: ...

    def fresh(self, task: Task, rollout: str) -> Sandbox:
        """A box from the task's image in which no agent ever was."""

    def host_for(self, task: Task) -> str: ...

    def kill(self) -> None:
        """Ends everything that runs, now."""

    def close(self) -> None: ...


class DockerPool:
    """Containers of one job. Use `close` whatever happens."""

    kind = "docker"

    def __init__(self, job: str, tasks: list[Task], say: Callable[[str], None]) -> None:
        """Connects, removes what dead runs left, makes the networks that `tasks` need. Raises `DockerError`."""
        self.api = connect()
        self._say = say
        self._labels = reaper.labels(job=job)
        self._networks: dict[bool, Network] = {}
        self._live: dict[str, Container] = {}
        self._egress: Egress | None = None
        self._own = [f"{name}={value}" for name, value in self._labels.items()]
        self._killing = threading.Event()
        self._closing = threading.Event()
        reaper.reap(self.api, say)
        try:
            for closed in sorted({is_closed(task) for task in tasks}):
                self._networks[closed] = Network.create(self.api, self._labels, closed=closed)
            if any(network_mode(task) == "allowlist" for task in tasks):
                self._egress = Egress(self._networks[True].gateway)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._watch_disks, name="disk-watch", daemon=True).start()

    def hosts(self) -> list[str]:
        return [network.gateway for network in self._networks.values()]

    def guard(self, ports: list[int]) -> list[str]:
        said = []
        for network in self._networks.values():
            egress = [self._egress.port] if self._egress and network.closed else []
            network.only([*ports, *egress])
            if network.unguarded:
                said.append(
                    f"the sandboxes' network cannot be closed towards this host ({network.unguarded}): they reach "
                    "every port bound to 0.0.0.0 or to Docker's bridge; run as root, or bind services to 127.0.0.1"
                )
        return said[:1]

    def host_for(self, task: Task) -> str:
        return self._networks[is_closed(task)].gateway

    def sandbox(self, task: Task, agent: Agent, rollout: str) -> Sandbox:
        image = images.task_image(self.api, task, self._say)
        if agent.version is not None:
            image = images.baked(
                self.api, image, key=agent.version, install=agent.install, labels=self._labels, say=self._say
            )
        sandbox = self._start(task, image, rollout)
        if agent.version is None:
            try:
                agent.install(sandbox)
            except BaseException:
                sandbox.remove()
                raise
        return sandbox

    def fresh(self, task: Task, rollout: str) -> Sandbox:
        return self._start(task, images.task_image(self.api, task, self._say), f"{rollout}-verifier")

    def _start(self, task: Task, image: str, name: str) -> Container:
        spec, env = task.sandbox, dict(task.sandbox.env)
        if self._egress and network_mode(task) == "allowlist":
            env |= self._egress.env(task.agent.allowed_hosts or spec.allowed_hosts)
        sandbox = Container.start(
            self.api,
            image,
            name=f"benchflow-{name}-{os.urandom(2).hex()}",
            limits=Limits(spec.cpus, spec.memory_mb, spec.storage_mb, spec.pids),
            labels={**self._labels, "benchflow.rollout": name},
            network=self._networks[is_closed(task)].name,
            env=env,
            workdir=spec.workdir,
        )
        self._live[sandbox.id] = sandbox
        sandbox.on_remove = self._forget
        return sandbox

    def _forget(self, sandbox: Container) -> None:
        self._live.pop(sandbox.id, None)

    def _watch_disks(self) -> None:
        """Ends a container that writes more than its task allows. The engine has no limit of its own on most disks."""
        while not self._closing.wait(DISK_WATCH_SECONDS):
            for sandbox in list(self._live.values()):
                with contextlib.suppress(RolloutError):
                    if not sandbox.disk_full and sandbox.size_mb() > sandbox.limits.storage_mb:
                        sandbox.disk_full = True
                        sandbox.kill()

    def kill(self) -> None:
        """Again and again until the house is closed: a container may be on its way up just now."""
        if not self._killing.is_set():
            self._killing.set()
            threading.Thread(target=self._kill_until_closed, name="stopping", daemon=True).start()

    def _kill_until_closed(self) -> None:
        while True:
            with contextlib.suppress(docker.errors.DockerException, requests.exceptions.RequestException):
                for found in self.api.containers(filters={"label": self._own}):
                    with contextlib.suppress(docker.errors.APIError):
                        self.api.kill(found["Id"])
            if self._closing.wait(0.3):
                return

    def close(self) -> None:
        """Removes what is left. Everything is tried before the first failure is raised."""
        self._closing.set()
        if self._egress is not None:
            self._egress.close()
        failed: DockerError | None = None
        things: list[Container | Network] = [*self._live.values(), *self._networks.values()]
        for thing in things:
            try:
                thing.remove()
            except DockerError as error:
                failed = failed or error
        self._live.clear()
        self._networks.clear()
        with contextlib.suppress(Exception):
            self.api.close()
        if failed is not None:
            raise failed


def network_mode(task: Task) -> str:
    return task.agent.network_mode or task.sandbox.network_mode


def is_closed(task: Task) -> bool:
    return network_mode(task) in CLOSED
