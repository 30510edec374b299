"""The way out for `network_mode: allowlist`: a forward proxy on the job's closed network that knows each task's hosts.

A sandbox identifies itself with a password that only it has. HTTPS passes through as it is (`CONNECT`); of plain HTTP
one request per connection is forwarded, its Host set to the host that was checked.

Threat model. The client is a malicious agent. It must reach no host outside its own list, no address of this machine,
no link-local address (cloud metadata), no port but 80 and 443, and must not slow down other sandboxes: heads, their
time and the number of connections per sandbox are bounded. Addresses are checked after the name is resolved, and the
connection goes to the address that was checked. Not covered: what a host on the list passes on (a mirror, a CDN that
serves several hosts behind one TLS address), and data hidden in allowed requests.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import ipaddress
import re
import secrets
import select
import socket
import socketserver
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

MAX_HEAD = 64 << 10
HEAD_SECONDS = 30.0
IDLE_SECONDS = 300.0
#: Connections of one sandbox at a time.
MAX_CONNECTIONS = 64
PORTS = (80, 443)
REQUEST_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([\x21-\x7e]+) HTTP/1\.[01]")
HEADER_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e\x80-\xff\t]*)")
#: Headers that are the proxy's business, or that we set.
OWN_HEADERS = ("proxy-authorization", "proxy-connection", "connection", "keep-alive", "host")


class BadRequest(ValueError):
    """A head that is not one plain HTTP/1 request."""


@dataclass(frozen=True)
class EgressRequest:
    """One request of a sandbox."""

    host: str
    port: int
    password: str
    #: What the server is sent; None for CONNECT, which is passed through.
    forwarded: bytes | None


def read_request(head: bytes) -> EgressRequest:
    """Reads a request's head, without the empty line at its end. Raises `BadRequest`.

    Anything that servers read in different ways is refused: folded lines, bare CR or LF, spaces before a colon.
    """
    request_line, *lines = head.decode("latin-1").split("\r\n")
    if (match := REQUEST_LINE.fullmatch(request_line)) is None:
        raise BadRequest("not an HTTP/1 request")
    method, target = match.groups()
    headers = []
    for line in lines:
        if (header := HEADER_LINE.fullmatch(line)) is None:
            raise BadRequest("a header that cannot be read")
        headers.append((header[1], header[2].strip()))
    host, port, path = _target(method, target)
    forwarded = None
    if method != "CONNECT":
        authority = f"[{host}]" if ":" in host else host
        ours = [f"Host: {authority}" if port == 80 else f"Host: {authority}:{port}", "Connection: close"]
        passed = [f"{name}: {value}" for name, value in headers if name.lower() not in OWN_HEADERS]
        forwarded = "\r\n".join([f"{method} {path} HTTP/1.1", *ours, *passed, "", ""]).encode("latin-1")
    return EgressRequest(host, port, _password(headers), forwarded)


def _target(method: str, target: str) -> tuple[str, int, str]:
    """Host, port and path of a request's target."""
    if method != "CONNECT" and not target.lower().startswith("http://"):
        raise BadRequest("the target is no http:// address")
    try:
        parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BadRequest(f"the target cannot be read: {error}") from error
    if not host or "@" in parts.netloc or "%" in host:
        raise BadRequest("the target names no host")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not path.startswith("/"):
        raise BadRequest("the target's path is relative")
    return host.lower().rstrip("."), port or (443 if method == "CONNECT" else 80), path


def _password(headers: Sequence[tuple[str, str]]) -> str:
    for name, value in headers:
        if name.lower() == "proxy-authorization" and value.lower().startswith("basic "):
            with contextlib.suppress(binascii.Error):
                return base64.b64decode(value[6:]).decode("latin-1").partition(":")[2]
    return ""


@dataclass
class _Client:
    """A sandbox: the hosts that it may reach, and room for its connections."""

    hosts: tuple[str, ...]
    slots: threading.Semaphore


class EgressProxy:
    """One forward proxy for a job. `env` gives a sandbox its way out."""

    def __init__(self, host: str) -> None:
        self._clients: dict[str, _Client] = {}
        self._host = host
        handler = type("Handler", (_Handler,), {"egress": self})
        self._server = socketserver.ThreadingTCPServer((host, 0), handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="egress", daemon=True).start()

    def env(self, hosts: Sequence[str]) -> dict[str, str]:
        """Variables that point a sandbox's programs to this proxy, with a password for `hosts`."""
        password = secrets.token_urlsafe(16)
        names = tuple(host.lower().removeprefix("*") for host in hosts)
        self._clients[password] = _Client(names, threading.Semaphore(MAX_CONNECTIONS))
        url = f"http://sandbox:{password}@{self._host}:{self.port}"
        no_proxy = f"{self._host},127.0.0.1,localhost"
        variables = {"HTTP_PROXY": url, "HTTPS_PROXY": url, "NO_PROXY": no_proxy}
        return {**variables, **{name.lower(): value for name, value in variables.items()}}

    def allows(self, password: str, host: str) -> bool:
        """`.example.org` and `*.example.org` stand for every host below it; anything else for itself."""
        client = self._clients.get(password)
        host = host.lower().rstrip(".")
        return client is not None and any(host.endswith(a) if a.startswith(".") else host == a for a in client.hosts)

    def connection_slot(self, password: str) -> threading.Semaphore:
        """Of a sandbox whose request was allowed."""
        return self._clients[password].slots

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(socketserver.BaseRequestHandler):
    egress: EgressProxy
    request: socket.socket

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            try:
                head, rest = self._head()
                request = read_request(head)
            except BadRequest as error:
                self._answer(400, str(error))
                return
            if not self.egress.allows(request.password, request.host) or request.port not in PORTS:
                self._answer(403, f"{request.host} is not in this task's allowed_hosts")
                return
            slot = self.egress.connection_slot(request.password)
            if not slot.acquire(blocking=False):
                self._answer(503, f"more than {MAX_CONNECTIONS} connections at a time")
                return
            try:
                self._forward(request, rest)
            finally:
                slot.release()

    def _forward(self, request: EgressRequest, rest: bytes) -> None:
        try:
            server = _connect(request.host, request.port)
        except (OSError, UnicodeError) as error:
            self._answer(502, f"{request.host} cannot be reached: {error}")
            return
        with server:
            if request.forwarded is None:
                self.request.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            server.sendall((request.forwarded or b"") + rest)
            _pump(self.request, server)

    def _head(self) -> tuple[bytes, bytes]:
        """The head of the request, and what came after it. Raises `BadRequest` or `OSError`."""
        data = b""
        deadline = time.monotonic() + HEAD_SECONDS
        while b"\r\n\r\n" not in data:
            self.request.settimeout(max(0.001, deadline - time.monotonic()))
            piece = self.request.recv(8192)
            if not piece:
                raise ConnectionError
            data += piece
            if len(data) > MAX_HEAD:
                raise BadRequest(f"a head of more than {MAX_HEAD >> 10} KB")
        head, _, rest = data.partition(b"\r\n\r\n")
        return head, rest

    def _answer(self, status: int, sentence: str) -> None:
        body = f"{sentence}\n".encode()
        head = f"HTTP/1.1 {status} Refused\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
        self.request.sendall(f"{head}Connection: close\r\n\r\n".encode() + body)


def _connect(host: str, port: int) -> socket.socket:
    """Connects to the first address of `host` that a sandbox may reach."""
    for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if is_outside(str(address[0])):
            return socket.create_connection((str(address[0]), port), timeout=30)
    raise OSError("it has no address outside this machine")


def is_outside(address: str) -> bool:
    """Whether an address is neither this machine's nor link-local, also when it is wrapped in an IPv6 address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip.sixtofour or ip
    if ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast:
        return False
    return not _is_bindable(str(ip))


def _is_bindable(address: str) -> bool:
    """Only addresses of this machine can be bound to."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _pump(client: socket.socket, server: socket.socket) -> None:
    """Copies both ways until either side ends."""
    other = {client: server, server: client}
    for side in other:
        side.settimeout(IDLE_SECONDS)
    while True:
        ready, _, _ = select.select(list(other), [], [], IDLE_SECONDS)
        if not ready:
            return
        for side in ready:
            data = side.recv(1 << 16)
            if not data:
                return
            other[side].sendall(data)
