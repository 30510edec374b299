"""Where a session lives: in which worker, and at which address.

A worker is one process with a port of its own. `default` lives in worker 0, whose port is `--port`. A session that an
address names (`/s/NAME/v1`) lives where its name hashes to. A session that the admin routes opened lives in the worker
whose number is in its key. So every process finds the same worker without asking another.
"""

from __future__ import annotations

import re
import secrets
import zlib
from dataclasses import dataclass
from urllib.parse import urlsplit

from proxy.errors import Refusal
from proxy.http.headers import Headers
from proxy.http.sockets import in_url
from proxy.sessions.keys import KEY

_WORKER_OF_KEY = re.compile(re.escape(KEY) + r"w([0-9]{1,2})-")


@dataclass(frozen=True, slots=True)
class Placement:
    """The view of one worker: `index` is its own number, `ports` those of all workers in order."""

    index: int
    ports: tuple[int, ...]

    def new_key(self) -> str:
        """A key for a session of this worker; it has the worker's number for the other workers."""
        mark = f"w{self.index}-" if len(self.ports) > 1 else ""
        return KEY + mark + secrets.token_urlsafe(24)

    def of_key(self, key: str) -> int:
        """The worker of the session with this key; this worker where the key names none."""
        found = _WORKER_OF_KEY.match(key) if len(self.ports) > 1 else None
        worker = int(found[1]) if found else self.index
        return worker if worker < len(self.ports) else self.index

    def of_name(self, name: str | None) -> int:
        """The worker of the session that an address names; None is the default session."""
        if name is None or name == "default":
            return 0
        return zlib.crc32(name.encode("utf-8", "replace")) % len(self.ports)

    def refuse_others(self, worker: int, headers: Headers, name: str | None) -> None:
        """Raises `Refusal` (421) with the right address for a session that lives in another worker.

        The address has the host that the client used, which may be a name that only its network knows.
        """
        if worker == self.index:
            return
        used = next((value.decode("latin-1") for header, value in headers if header == b"host"), "")
        try:
            host = urlsplit(f"//{used}").hostname or "127.0.0.1"
        except ValueError:
            host = "127.0.0.1"
        path = "" if name is None else f"/s/{name}"
        address = f"http://{in_url(host)}:{self.ports[worker]}{path}/v1"
        raise Refusal(421, f"this session lives in another worker of the proxy; send its calls to {address}")
