"""The way out for `network_mode: allowlist`: an HTTP proxy on the job's closed network that knows each rollout's hosts.

A sandbox names itself with a password that only it has. HTTPS goes through as it is (`CONNECT`), so nothing is read or
changed; a host outside the list, or one that resolves to this machine, gets 403.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import secrets
import select
import socket
import socketserver
import threading
from collections.abc import Sequence
from urllib.parse import urlsplit

LONGEST_HEAD = 64 << 10
IDLE_SECONDS = 300.0
PORTS = (80, 443)


class EgressProxy:
    """One forward proxy for a job. `env` gives a sandbox its way out."""

    def __init__(self, host: str) -> None:
        self._allowed: dict[str, tuple[str, ...]] = {}
        self._host = host
        handler = type("Handler", (_Handler,), {"egress": self})
        self._server = socketserver.ThreadingTCPServer((host, 0), handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="egress", daemon=True).start()

    def env(self, hosts: Sequence[str]) -> dict[str, str]:
        """Variables that point a sandbox's programs here, with a password for `hosts`."""
        password = secrets.token_urlsafe(16)
        self._allowed[password] = tuple(host.lower().removeprefix("*") for host in hosts)
        url = f"http://sandbox:{password}@{self._host}:{self.port}"
        away = f"{self._host},127.0.0.1,localhost"
        names = {"HTTP_PROXY": url, "HTTPS_PROXY": url, "NO_PROXY": away}
        return {**names, **{name.lower(): value for name, value in names.items()}}

    def allows(self, password: str, host: str) -> bool:
        """`.example.org` and `*.example.org` stand for every host below it; anything else for itself."""
        host = host.lower().rstrip(".")
        return any(host.endswith(a) if a.startswith(".") else host == a for a in self._allowed.get(password, ()))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(socketserver.BaseRequestHandler):
    egress: EgressProxy
    request: socket.socket

    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.request.settimeout(30)
            head, rest = self._head()
            method, target, *_ = head[0].split(" ")
            host, port, path = _target(method, target)
            if not self.egress.allows(_password(head), host) or port not in PORTS:
                self._answer(403, f"{host} is not in this task's allowed_hosts")
                return
            try:
                there = _connect(host, port)
            except OSError as error:
                self._answer(502, f"{host} cannot be reached: {error}")
                return
            with there:
                if method == "CONNECT":
                    self.request.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    there.sendall(rest)
                else:
                    there.sendall(_plain_request(method, path, head) + rest)
                _pump(self.request, there)

    def _head(self) -> tuple[list[str], bytes]:
        data = b""
        while b"\r\n\r\n" not in data:
            piece = self.request.recv(8192)
            if not piece or len(data) > LONGEST_HEAD:
                raise ValueError("no request")
            data += piece
        head, _, rest = data.partition(b"\r\n\r\n")
        return head.decode("latin-1").split("\r\n"), rest

    def _answer(self, status: int, words: str) -> None:
        body = f"{words}\n".encode()
        head = f"HTTP/1.1 {status} Refused\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
        self.request.sendall(f"{head}Connection: close\r\n\r\n".encode() + body)


def _target(method: str, target: str) -> tuple[str, int, str]:
    parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
    if not parts.hostname:
        raise ValueError("no host")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return parts.hostname, parts.port or (443 if method == "CONNECT" else 80), path


def _password(head: list[str]) -> str:
    for line in head[1:]:
        name, _, value = line.partition(":")
        if name.lower() == "proxy-authorization" and value.strip().lower().startswith("basic "):
            return base64.b64decode(value.strip()[6:]).decode("latin-1").partition(":")[2]
    return ""


def _plain_request(method: str, path: str, head: list[str]) -> bytes:
    """The request as the server itself wants it; one a connection, so that no second one slips by unchecked."""
    drop = ("proxy-authorization", "proxy-connection", "connection")
    kept = [line for line in head[1:] if line.partition(":")[0].lower() not in drop]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *kept, "Connection: close", "", ""]).encode("latin-1")


def _connect(host: str, port: int) -> socket.socket:
    """Connects to the first address of `host` that is not this machine's own."""
    for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        ip = ipaddress.ip_address(address[0])
        if ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast or _is_ours(str(ip)):
            continue
        return socket.create_connection((str(ip), port), timeout=30)
    raise OSError("it has no address outside this machine")


def _is_ours(address: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _pump(one: socket.socket, other: socket.socket) -> None:
    """Copies both ways until either side ends."""
    to = {one: other, other: one}
    for end in to:
        end.settimeout(IDLE_SECONDS)
    while True:
        ready, _, _ = select.select(list(to), [], [], IDLE_SECONDS)
        if not ready:
            return
        for end in ready:
            data = end.recv(1 << 16)
            if not data:
                return
            to[end].sendall(data)
