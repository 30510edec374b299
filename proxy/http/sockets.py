"""Listening sockets, bound before anything else starts, so that a taken port is an error of one sentence."""

from __future__ import annotations

import socket

from proxy.errors import SettingsError


def bind(hosts: list[str], port: int, option: str = "--port") -> list[socket.socket]:
    """One listening socket a host, all on the same port."""
    made: list[socket.socket] = []
    try:
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            one = socket.socket(family, socket.SOCK_STREAM)
            made.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((host.strip("[]"), port))
            one.set_inheritable(False)
            port = one.getsockname()[1]
    except (OSError, OverflowError, ValueError) as error:  # a port beyond 65535, a host that is no name at all
        for one in made:
            one.close()
        if isinstance(error, OverflowError):
            raise SettingsError(
                f"cannot listen on {host}:{port}: a port is 0 to 65535; give another {option}"
            ) from error
        what = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise SettingsError(
            f"cannot listen on {host}:{port}: {what}; free the port, or give another {option}"
        ) from error
    return made


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
