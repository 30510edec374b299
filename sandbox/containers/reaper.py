"""Removes what dead runs left behind: containers, networks and their rules.

Every container and network is labelled with its owner: host, boot, process id and start of the process. Only what an
owner of this host left that is provably gone is removed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import docker

from capture.lock import hostname, is_running, process_start
from sandbox.containers.docker import docker_errors
from sandbox.containers.network import drop_rules

OWNER = "benchflow.owner"


def owner() -> str:
    """Identifies this process; no later process has the same value."""
    return f"{hostname()}:{_boot()}:{os.getpid()}:{process_start(os.getpid())}"


def labels(**more: str) -> dict[str, str]:
    """Labels for what this process creates; `more` as `benchflow.<name>`."""
    return {OWNER: owner(), **{f"benchflow.{name}": value for name, value in more.items()}}


def reap(api: docker.APIClient, report: Callable[[str], None] = lambda _: None) -> int:
    """Removes what dead owners left; returns the number of containers and networks. Raises `DockerError`."""
    removed = 0
    with docker_errors("look for what an earlier run left"):
        containers = api.containers(all=True, filters={"label": OWNER})
        for found in containers:
            if is_dead(found["Labels"].get(OWNER, "")):
                with contextlib.suppress(docker.errors.APIError):  # another run may be faster
                    api.remove_container(found["Id"], force=True, v=True)
                    removed += 1
        for network in api.networks(filters={"label": OWNER}):
            if is_dead((network.get("Labels") or {}).get(OWNER, "")):
                with contextlib.suppress(docker.errors.APIError):
                    drop_rules(network["Id"])
                    api.remove_network(network["Id"])
                    removed += 1
    if removed:
        report(f"removed {removed} containers and networks that an earlier run left behind")
    return removed


def is_dead(label: str) -> bool:
    """True when the owner was a process of this host that is gone; in doubt it is alive."""
    try:
        host, boot, pid, ticks = label.rsplit(":", 3)
    except ValueError:
        return False
    if host != hostname() or not pid.isdigit():
        return False
    if boot != _boot():
        return True
    return not is_running(int(pid), ticks)


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return "unknown"
