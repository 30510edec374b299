"""The proxy under test, a process of its own: started, asked by its admin routes, measured from outside, stopped."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from proxy.sessions.placement import Placement

ROOT = Path(__file__).parents[2]
ADMIN_KEY = "endurance-admin-key"
UPSTREAM_KEY = "sk-endurance-engine-key"


class Opened(NamedTuple):
    """A session that was opened; `port` is its worker's."""

    session: str
    key: str
    port: int


class ProxyProcess:
    """`python -m proxy` in front of `upstream`; its stderr goes to the file `log`."""

    def __init__(
        self, upstream: str, out: Path, *options: str, env: dict[str, str] | None = None, port: int = 0
    ) -> None:
        self.out = out
        self.log = out.with_name(out.name + ".log")
        command = [
            sys.executable, "-m", "proxy", "--upstream", upstream, "--upstream-key", UPSTREAM_KEY, "--out", str(out),
            "--port", str(port), "--no-probe", "--admin-port", "0", "--admin-key", ADMIN_KEY, *options,
        ]  # fmt: skip
        out.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._began = log.tell()
            self.process = subprocess.Popen(command, stderr=log, cwd=ROOT, env={**os.environ, **(env or {})})
        self.ports: list[int] = []
        self.admin_port = 0

    @property
    def port(self) -> int:
        """`--port`: the first worker's."""
        return self.ports[0]

    async def __aenter__(self) -> Self:
        async with asyncio.timeout(60):
            while not self.admin_port:
                if self.process.poll() is not None:
                    raise RuntimeError(f"the proxy did not start: {self.log_text()}")
                log = self.log_text()
                for port, others in re.findall(r"agents: http://127\.0\.0\.1:(\d+)/v1(?: .*on ports ([\d, ]+))?", log):
                    self.ports = [int(number) for number in (others or port).split(", ")]
                for port in re.findall(r"admin: http://127\.0\.0\.1:(\d+)", log):
                    self.admin_port = int(port)
                await asyncio.sleep(0.02)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.poll() is None:
            await self.stop()

    def log_text(self) -> str:
        """What this process wrote to stderr."""
        with self.log.open("rb") as log:
            log.seek(self._began)
            return log.read().decode("utf-8", "replace")

    def kill(self) -> None:
        """`kill -9`."""
        self.process.kill()
        self.process.wait()

    async def stop(self, seconds: float = 60) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.to_thread(self.process.wait, seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    # admin

    async def admin(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        data = b"" if body is None else json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.admin_port)
        head = f"{method} {path} HTTP/1.1\r\nhost: proxy\r\nauthorization: Bearer {ADMIN_KEY}\r\nconnection: close\r\n"
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        try:
            got = await reader.read()
        finally:
            writer.close()
        top, _, rest = got.partition(b"\r\n\r\n")
        return int(top.split(b" ")[1]), rest

    async def open(self, name: str, journal: Path) -> Opened:
        """A new session."""
        status, answer = await self.admin("POST", "/sessions", {"name": name, "journal": str(journal)})
        if status != 201:
            raise RuntimeError(f"no session {name}: HTTP {status} {answer!r}")
        fields = json.loads(answer)
        port = urlsplit(fields["base_url"]).port
        assert port is not None
        return Opened(fields["session"], fields["api_key"], port)

    def port_of(self, name: str) -> int:
        """The port of the worker that has the session which the address `/s/NAME/v1` names."""
        return self.ports[Placement(0, tuple(self.ports)).of_name(name)]

    async def close(self, session: str) -> dict[str, Any]:
        """Closes a session; returns its last state."""
        status, answer = await self.admin("DELETE", f"/sessions/{session}")
        if status != 200:
            raise RuntimeError(f"session {session} is not closed: HTTP {status} {answer!r}")
        state: dict[str, Any] = json.loads(answer)
        return state

    async def metrics(self) -> dict[str, float]:
        """Every figure of `GET /metrics`, under its name with its labels."""
        _, answer = await self.admin("GET", "/metrics")
        rows = [line.rsplit(" ", 1) for line in answer.decode().splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in rows}

    def workers(self) -> list[int]:
        """The processes of `--workers`, the oldest first."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return sorted(map(int, children))

    # measured from outside

    def memory(self) -> int:
        """Resident bytes that belong to this process alone."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"RssAnon:\s+(\d+) kB", status)[0]) << 10

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def seconds(self) -> float:
        """CPU time, in seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
