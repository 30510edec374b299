"""Removes what a dead run of ours left behind: containers, networks and their rules. Nothing else is touched.

Every container and network carries its owner: host, boot, process id and the process's start. Only an owner of this
host that is provably gone is cleaned up after; an unknown host's things are left alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import docker

from capture.lock import hostname, is_running, process_start
from sandbox.containers.docker import doing
from sandbox.containers.network import drop_rules

OWNER = "benchflow.owner"


def owner() -> str:
    """This process, in a way that no later process can be mistaken for."""
    return f"{hostname()}:{_boot()}:{os.getpid()}:{process_start(os.getpid())}"


def labels(**more: str) -> dict[str, str]:
    """Labels for whatever this process creates; `more` as `benchflow.<name>`."""
    return {OWNER: owner(), **{f"benchflow.{name}": value for name, value in more.items()}}


def reap(api: docker.APIClient, say: Callable[[str], None] = lambda _: None) -> int:
    """Removes what dead owners left; returns how many things that were. Raises `DockerError`."""
    gone = 0
    with doing("look for what an earlier run left"):
        containers = api.containers(all=True, filters={"label": OWNER})
        for found in containers:
            if is_dead(found["Labels"].get(OWNER, "")):
                with contextlib.suppress(docker.errors.APIError):  # another run may be faster
                    api.remove_container(found["Id"], force=True, v=True)
                    gone += 1
        for network in api.networks(filters={"label": OWNER}):
            if is_dead((network.get("Labels") or {}).get(OWNER, "")):
                with contextlib.suppress(docker.errors.APIError):
                    drop_rules(network["Id"])
                    api.remove_network(network["Id"])
                    gone += 1
    if gone:
        say(f"removed {gone} containers and networks that an earlier run left behind")
    return gone


def is_dead(label: str) -> bool:
    """True when the owner was a process of this host that is gone; anything doubtful is alive."""
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
