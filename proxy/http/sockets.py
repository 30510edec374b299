"""Listening sockets, bound before anything else starts, so that a taken port is an error of one sentence."""

from __future__ import annotations

import socket

from proxy.errors import SettingsError


def bind(hosts: list[str], port: int, option: str = "--port") -> list[socket.socket]:
    """One bound socket per host, all on the same port; 0 takes a free one. Raises `SettingsError`."""
    bound: list[socket.socket] = []
    try:
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.socket(family, socket.SOCK_STREAM)
            bound.append(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host.strip("[]"), port))
            listening.set_inheritable(False)
            port = listening.getsockname()[1]
    except (OSError, OverflowError, ValueError) as error:  # a port beyond 65535, a host that is no name at all
        for listening in bound:
            listening.close()
        if isinstance(error, OverflowError):
            raise SettingsError(
                f"cannot listen on {host}:{port}: a port is 0 to 65535; give another {option}"
            ) from error
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise SettingsError(
            f"cannot listen on {host}:{port}: {reason}; free the port, or give another {option}"
        ) from error
    return bound


def in_url(host: str) -> str:
    """A host as it is written in a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
