"""A job's own network: the proxy can be reached from it, no port of this host can, and no sandbox reaches another.

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

from sandbox.containers.docker import doing


@dataclass
class Network:
    """One bridge network. `closed`: no way out but the ports that were opened with `only`."""

    api: docker.APIClient
    id: str
    name: str
    gateway: str
    closed: bool
    #: Why the rules could not be set, None when they stand.
    unguarded: str | None = None
    _rules: list[list[str]] = field(default_factory=list)

    @classmethod
    def create(cls, api: docker.APIClient, labels: Mapping[str, str], *, closed: bool) -> Network:
        """Raises `DockerError`."""
        name = f"benchflow-{secrets.token_hex(4)}-{'closed' if closed else 'open'}"
        with doing("create a network for the job (docker network prune frees addresses that nobody uses)"):
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

    def only(self, ports: Sequence[int]) -> None:
        """Lets sandboxes reach `ports` of the gateway, and nothing else of this host. Where that needs rights we do
        not have, `unguarded` says so."""
        rules = [["-i", self.bridge, "-d", self.gateway, "-p", "tcp", "--dport", str(p), "-j", "ACCEPT"] for p in ports]
        self._rules = [*rules, ["-i", self.bridge, "-j", "DROP"]]
        for rule in reversed(self._rules):
            self.unguarded = _change("-I", "INPUT", *rule)
            if self.unguarded:
                return

    def remove(self) -> None:
        """Takes the rules and the network away. Raises `DockerError`."""
        drop_rules(self.id)
        with doing(f"remove the network {self.name}"):
            try:
                self.api.remove_network(self.id)
            except docker.errors.NotFound:
                return


def gateway_of(details: Mapping[str, Any]) -> str:
    """The host's address on a network, from its `inspect`; "" where none is told.

    Docker's own bridge tells its subnet only, after a start without `--bip`: the host is then the first of it.
    """
    config = ((details.get("IPAM") or {}).get("Config") or [{}])[0]
    if config.get("Gateway"):
        return str(config["Gateway"]).partition("/")[0]
    return str(next(ipaddress.ip_network(config["Subnet"]).hosts())) if config.get("Subnet") else ""


def bridge_of(network_id: str) -> str:
    """Docker's name of a network's interface on this host."""
    return f"br-{network_id[:12]}"


def drop_rules(network_id: str) -> None:
    """Removes every INPUT rule of a network, whoever set it."""
    listed = iptables(["-S", "INPUT"])
    for line in listed.stdout.splitlines() if listed and listed.returncode == 0 else []:
        words = line.split()
        if words[:2] == ["-A", "INPUT"] and bridge_of(network_id) in words:
            _change("-D", "INPUT", *words[2:])


def _change(*arguments: str) -> str | None:
    """None when it worked, else why it did not."""
    done = iptables(list(arguments))
    if done is None:
        return "iptables is not installed"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["iptables failed"])[-1]


def iptables(arguments: list[str]) -> subprocess.CompletedProcess[str] | None:
    """Runs iptables; None where there is none."""
    program = shutil.which("iptables") or shutil.which("iptables", path="/usr/sbin:/sbin")
    if program is None:
        return None
    # `-w`: another program may hold the table's lock just now.
    return subprocess.run([program, "-w", "5", *arguments], capture_output=True, text=True, timeout=30, check=False)
