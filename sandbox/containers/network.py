"""A job's own network: from it sandboxes reach the proxy, no other port of this host, and not each other.

`--internal` alone is not enough: every port bound to 0.0.0.0 is still reachable at the network's gateway and at the
address of Docker's own bridge (seen with Docker 20.10). Two rules on the network's bridge close that.
"""

from __future__ import annotations

import ipaddress
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import docker

from sandbox.containers.docker import docker_errors


@dataclass
class Network:
    """One bridge network. `closed`: it leads nowhere but to the ports opened with `allow_only`."""

    api: docker.APIClient
    id: str
    name: str
    gateway: str
    closed: bool
    #: Why this host could not be closed to the network, None when it is.
    open_because: str | None = None
    _rules: list[list[str]] = field(default_factory=list)

    @classmethod
    def create(cls, api: docker.APIClient, labels: Mapping[str, str], *, closed: bool) -> Network:
        """Raises `DockerError`."""
        name = f"benchflow-{secrets.token_hex(4)}-{'closed' if closed else 'open'}"
        with docker_errors("create a network for the job (docker network prune frees unused addresses)"):
            made = api.create_network(
                name,
                driver="bridge",
                internal=closed,
                labels=dict(labels),
                options={"com.docker.network.bridge.enable_icc": "false"},
            )
            details = api.inspect_network(made["Id"])
        return cls(api, made["Id"], name, gateway_of(details), closed)

    @property
    def bridge(self) -> str:
        return bridge_of(self.id)

    def allow_only(self, ports: Sequence[int]) -> None:
        """Lets sandboxes reach `ports` of the gateway and nothing else of this host. Where the rights for that are
        missing, `open_because` says so."""
        rules = [["-i", self.bridge, "-d", self.gateway, "-p", "tcp", "--dport", str(p), "-j", "ACCEPT"] for p in ports]
        self._rules = [*rules, ["-i", self.bridge, "-j", "DROP"]]
        for rule in reversed(self._rules):
            self.open_because = _change("-I", "INPUT", *rule)
            if self.open_because:
                return

    def remove(self) -> None:
        """Removes the rules and the network. Raises `DockerError`."""
        drop_rules(self.id)
        with docker_errors(f"remove the network {self.name}"):
            try:
                self.api.remove_network(self.id)
            except docker.errors.NotFound:
                return


def gateway_of(details: Mapping[str, Any]) -> str:
    """The host's address on a network, from its `inspect`; "" when unknown.

    For Docker's own bridge, started without `--bip`, Docker reports the subnet only: the host has its first address.
    """
    config = ((details.get("IPAM") or {}).get("Config") or [{}])[0]
    if config.get("Gateway"):
        return str(config["Gateway"]).partition("/")[0]
    return str(next(ipaddress.ip_network(config["Subnet"]).hosts())) if config.get("Subnet") else ""


def bridge_of(network_id: str) -> str:
    """Docker's name of a network's interface on this host."""
    return f"br-{network_id[:12]}"


def drop_rules(network_id: str) -> None:
    """Removes every INPUT rule of a network, no matter which process added it."""
    listed = iptables(["-S", "INPUT"])
    for line in listed.stdout.splitlines() if listed and listed.returncode == 0 else []:
        words = line.split()
        if words[:2] == ["-A", "INPUT"] and bridge_of(network_id) in words:
            _change("-D", "INPUT", *words[2:])


def _change(*arguments: str) -> str | None:
    """None on success, else the reason for the failure."""
    done = iptables(list(arguments))
    if done is None:
        return "iptables is not installed"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["iptables failed"])[-1]


def iptables(arguments: list[str]) -> subprocess.CompletedProcess[str] | None:
    """Runs iptables; None where it is not installed."""
    program = shutil.which("iptables") or shutil.which("iptables", path="/usr/sbin:/sbin")
    if program is None:
        return None
    # `-w`: wait, another program may have locked the table.
    return subprocess.run([program, "-w", "5", *arguments], capture_output=True, text=True, timeout=30, check=False)
