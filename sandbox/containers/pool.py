"""Where a job's sandboxes come from. `DockerPool` starts containers on the job's own networks."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import docker
import requests

from sandbox.containers import images, reaper
from sandbox.containers.base import Installable, Sandbox
from sandbox.containers.docker import Container, Limits, connect
from sandbox.containers.egress_proxy import EgressProxy
from sandbox.containers.network import Network
from sandbox.errors import DockerError, RolloutError, SandboxError
from sandbox.tasks.task import Task

CLOSED_NETWORKS = ("no-network", "allowlist")


class ContainerPool(Protocol):
    """The sandboxes of one job."""

    #: `docker` or `local`: the `environment` of the job's files.
    @property
    def kind(self) -> str: ...

    def listen_addresses(self) -> list[str]:
        """Addresses of this machine on which the proxy must listen for the sandboxes."""

    def close_host(self, open_ports: Sequence[int]) -> list[str]:
        """Closes this machine to the sandboxes except `open_ports`; warnings about what could not be closed."""

    def sandbox(self, task: Task, agent: Installable, rollout: str) -> Sandbox:
        """A sandbox from the task's image with the agent installed."""

    def verifier_sandbox(self, task: Task, rollout: str) -> Sandbox:
        """A sandbox from the task's image in which no agent has run."""

    def proxy_address(self, task: Task) -> str:
        """The address under which the task's sandboxes reach the proxy."""

    def kill(self) -> None:
        """Ends everything that runs, now."""

    def kill_rollout(self, rollout: str) -> None:
        """Ends what runs of one rollout, now. One that is still being started may come after it: call it again."""

    def close(self) -> None: ...


class PoolFactory(Protocol):
    """Makes a job's pool. `report` prints a status line; called with "" it raises `Stopped` once the job is stopped."""

    @property
    def kind(self) -> str: ...

    def __call__(self, job: str, tasks: Sequence[Task], report: Callable[[str], None]) -> ContainerPool: ...


class DockerPool:
    """The containers of one job. `close` must be called in any case."""

    kind = "docker"
    #: How often the sandboxes' disk use is measured.
    disk_watch_seconds = 5.0
    #: How long a restarted container may take until it is quiet.
    settle_seconds = 20.0

    def __init__(self, job: str, tasks: Sequence[Task], report: Callable[[str], None]) -> None:
        """Connects, removes what dead runs left, creates the networks that `tasks` need. Raises `DockerError`."""
        self.api = connect()
        self._report = report
        self._labels = reaper.labels(job=job)
        self._networks: dict[bool, Network] = {}
        self._live: dict[str, Container] = {}
        self._egress: EgressProxy | None = None
        self._own = [f"{name}={value}" for name, value in self._labels.items()]
        self._killing = threading.Event()
        self._closing = threading.Event()
        reaper.reap(self.api, report)
        try:
            for closed in sorted({is_closed(task) for task in tasks}):
                self._networks[closed] = Network.create(self.api, self._labels, closed=closed)
            if any(network_mode(task) == "allowlist" for task in tasks):
                self._egress = EgressProxy(self._networks[True].gateway)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._watch_disks, name="disk-watch", daemon=True).start()

    def listen_addresses(self) -> list[str]:
        return [network.gateway for network in self._networks.values()]

    def close_host(self, open_ports: Sequence[int]) -> list[str]:
        warnings = []
        for network in self._networks.values():
            egress = [self._egress.port] if self._egress and network.closed else []
            network.allow_only([*open_ports, *egress])
            if network.open_because:
                warnings.append(
                    f"the sandboxes' network cannot be closed to this host ({network.open_because}): they reach "
                    "every port bound to 0.0.0.0 or to Docker's bridge; run as root, or bind services to 127.0.0.1"
                )
        return warnings[:1]

    def proxy_address(self, task: Task) -> str:
        return self._networks[is_closed(task)].gateway

    def sandbox(self, task: Task, agent: Installable, rollout: str) -> Sandbox:
        image = images.ensure_task_image(self.api, task, self._report)
        if agent.version is not None:
            image = images.build_agent_image(
                self.api, image, key=agent.version, install=agent.install, labels=self._labels, report=self._report
            )
        sandbox = self._start(task, image, rollout, rollout)
        if agent.version is None:
            try:
                agent.install(sandbox)
            except BaseException:
                sandbox.remove()
                raise
        return sandbox

    def verifier_sandbox(self, task: Task, rollout: str) -> Sandbox:
        image = images.ensure_task_image(self.api, task, self._report)
        return self._start(task, image, rollout, f"{rollout}-verifier")

    def _start(self, task: Task, image: str, rollout: str, name: str) -> Container:
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
        sandbox.rollout = rollout
        self._live[sandbox.id] = sandbox
        sandbox.on_removed, sandbox.settle_seconds = self._forget, self.settle_seconds
        return sandbox

    def _forget(self, sandbox: Container) -> None:
        self._live.pop(sandbox.id, None)

    def _watch_disks(self) -> None:
        """Ends a container that writes more than its task allows. On most file systems the engine sets no limit."""
        while not self._closing.wait(self.disk_watch_seconds):
            for sandbox in list(self._live.values()):
                with contextlib.suppress(RolloutError):
                    if not sandbox.disk_full and sandbox.size_mb() > sandbox.limits.storage_mb:
                        sandbox.disk_full = True
                        sandbox.kill()

    def kill(self) -> None:
        """Repeated until the pool is closed: a container may be starting in this moment."""
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

    def kill_rollout(self, rollout: str) -> None:
        for sandbox in list(self._live.values()):
            if sandbox.rollout == rollout:
                with contextlib.suppress(RolloutError):
                    sandbox.kill()

    def close(self) -> None:
        """Removes what is left. What cannot be removed is reported: it ends no job, and a later run tries again."""
        self._closing.set()
        if self._egress is not None:
            self._egress.close()
        leftovers: list[Container | Network] = [*self._live.values(), *self._networks.values()]
        for leftover in leftovers:
            try:
                leftover.remove()
            except DockerError as error:
                with contextlib.suppress(SandboxError):
                    self._report(str(error))
        self._live.clear()
        self._networks.clear()
        with contextlib.suppress(Exception):
            self.api.close()


def network_mode(task: Task) -> str:
    return task.agent.network_mode or task.sandbox.network_mode


def is_closed(task: Task) -> bool:
    return network_mode(task) in CLOSED_NETWORKS
