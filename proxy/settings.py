"""Every setting of the proxy, documented where it is declared. `python -m proxy` makes its options from these."""

from __future__ import annotations

import ipaddress
import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from capture.token_in.bridge import MODES
from proxy.errors import SettingsError

ENGINES = ("auto", "vllm", "sglang", "llamacpp", "other")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds: to connect, to the head of the answer, between two pieces of its body."""

    connect: float = 10.0
    first_byte: float = 600.0
    idle: float = 300.0


@dataclass(slots=True)
class Settings:
    """How one proxy runs. Times are seconds, sizes mebibytes where the name says `mb`."""

    #: Engines to call, `http://HOST:PORT/v1`; several are replicas of one model. Sessions may name their own.
    upstream: list[str] = field(default_factory=list)
    #: The engine's API key. It reaches no agent, no record and no error.
    upstream_key: str | None = None
    #: Which engine answers: `auto` asks it; `other` is any OpenAI-compatible API, recorded without tokens.
    engine: str = "auto"
    #: Send this model name upstream whatever the agent asked for.
    model: str | None = None

    #: Where agents reach the proxy. Beyond loopback every call needs a key.
    host: str = "127.0.0.1"
    #: Further addresses to listen on, the same port: a sandbox network's gateway, say.
    more_hosts: list[str] = field(default_factory=list)
    #: 0 takes a free port.
    port: int = 0
    #: The key of the stand-alone session. Without one the proxy is open, on loopback only.
    key: str | None = None

    #: Where `/sessions` and `/metrics` listen; None leaves them out, 0 takes a free port.
    admin_port: int | None = None
    admin_host: str = "127.0.0.1"
    #: Key of the admin routes; beyond loopback it must be given.
    admin_key: str | None = None

    #: Stand-alone: the folder for journals, `OUT/default/trajectory/llm_trajectory.jsonl`. None: sessions are opened.
    out: Path | None = None

    #: Ask the engine for ids and logprobs. Off, calls are journalled as they are.
    capture: bool = True
    #: Also record this many alternatives a token.
    top_logprobs: int | None = None
    #: Call the engine unstreamed and stream its answer to the agent, for engines that lose ids in streams.
    buffered: bool = False
    #: Return from writing a line only when it is on the disk.
    fsync: bool = False
    #: Make one tiny call at start, to say what the engine captures.
    probe: bool = True
    #: The weights' version that is stamped on each call.
    policy_version: str | None = None
    #: Continue conversations by token ids: `off`, `auto` where it can be done, `require` or the call is refused.
    token_in: str = "off"
    #: Sampling parameters for calls that do not set them, such as `{"temperature": 1.0}`.
    sampling: dict[str, object] = field(default_factory=dict)

    #: A session that its address made (`/s/NAME/v1`) ends after so long without a call; the next opens it again, on the
    #: same journal. 0: never. Sessions that were opened with a key end when they are closed.
    session_idle: float = 3600.0
    #: What all sessions together remember of their calls (token-in, `previous_response_id`), those of all workers; what
    #: was used longest ago goes first.
    history_mb: int = 1024

    #: A request body larger than this gets 413.
    max_body_mb: int = 256
    connect_timeout: float = 10.0
    #: Until the first byte of an answer; an unstreamed answer comes only when all of it is sampled.
    first_byte_timeout: float = 1800.0
    #: Between two pieces of a streamed answer.
    idle_timeout: float = 300.0
    #: While the engine is called unstreamed for an agent that streams, a comment goes out this often.
    keepalive: float = 10.0
    #: How long a stop, or the closing of a session, waits for calls in flight.
    grace: float = 30.0

    #: Processes that share the agents' port, each with sessions of its own. Only `bench proxy` starts more than one.
    workers: int = 1

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts(self.connect_timeout, self.first_byte_timeout, self.idle_timeout)

    def check(self) -> None:
        """Raises `SettingsError` with one sentence for the first thing that cannot be used."""
        check_engine(self.engine)
        for url in self.upstream:
            upstream_base(url)
        check_top_logprobs(self.top_logprobs)
        check_token_in(self.token_in, self.capture)
        if self.out is not None and not self.upstream:
            raise SettingsError("--upstream is missing: give the engine's address, such as http://127.0.0.1:8000/v1")
        for host in (self.host, *self.more_hosts):
            if self.out is not None and self.key is None and not is_loopback(host):
                raise SettingsError(
                    f"refusing to listen on {host} without a key: anybody who reaches the port could use the engine; "
                    "give --key (or CAPTURE_KEY), or listen on 127.0.0.1"
                )
        if self.admin_port is not None and self.admin_key is None and not is_loopback(self.admin_host):
            raise SettingsError(
                f"refusing to open the admin routes on {self.admin_host} without a key; give --admin-key, or keep "
                "--admin-host 127.0.0.1"
            )
        for key in (self.key, self.admin_key, self.upstream_key):
            check_key(key)
        if not 1 <= self.workers <= 64:
            raise SettingsError("--workers must be between 1 and 64")
        if self.workers > 1 and not sys.platform.startswith("linux"):
            raise SettingsError("--workers passes open connections between processes, which needs Linux; leave it out")
        if self.max_body_mb <= 0:
            raise SettingsError("--max-body-mb must be at least 1")
        if self.history_mb <= 0:
            raise SettingsError(f"--history-mb must be at least 1 (MiB), not {self.history_mb}")
        if not math.isfinite(self.session_idle) or self.session_idle < 0:
            raise SettingsError(
                f"--session-idle must be a number of seconds, or 0 for never, not {self.session_idle:g}"
            )
        for name in ("connect_timeout", "first_byte_timeout", "idle_timeout", "keepalive", "grace"):
            seconds = getattr(self, name)
            if not math.isfinite(seconds) or seconds < 0 or (seconds == 0 and name != "grace"):
                raise SettingsError(f"--{name.replace('_', '-')} must be a number of seconds above 0, not {seconds:g}")


def check_engine(name: str) -> None:
    if name not in ENGINES:
        raise SettingsError(f"--engine must be one of {', '.join(ENGINES)}, not {name!r}")


def check_top_logprobs(number: int | None) -> None:
    if number is not None and not 0 <= number <= 1000:
        raise SettingsError("BENCHFLOW_CAPTURE_TOP_LOGPROBS must be between 0 and what the engine allows (vLLM: 20)")


def check_token_in(mode: str, capture: bool) -> None:
    if mode not in MODES:
        raise SettingsError(f"--token-in must be one of {', '.join(MODES)}, not {mode!r}")
    if mode != "off" and not capture:
        raise SettingsError(
            "--token-in needs the captured ids: set BENCHFLOW_CAPTURE_TOKEN_LOGPROBS=1, or --token-in off"
        )


def check_key(key: str | None) -> None:
    if key is not None and not re.fullmatch(r"[!-~]+", key):
        raise SettingsError("a key must be printable ASCII without spaces")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def upstream_base(url: str) -> str:
    """An engine's address without `/v1` and slashes: `http://h:8000/v1/` -> `http://h:8000`. Raises `SettingsError`."""
    try:
        parts = urlsplit(url.strip())
    except ValueError as error:
        raise SettingsError(f"--upstream {url!r} is no address ({error})") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(f"--upstream {url!r} is not an http address; it looks like http://127.0.0.1:8000/v1")
    try:
        port = parts.port
    except ValueError as error:
        raise SettingsError(f"--upstream {url!r} has an impossible port") from error
    if parts.username or parts.password:
        raise SettingsError("--upstream must not hold a user or password; give the key with --upstream-key")
    segments = [part for part in parts.path.split("/") if part]
    while segments and segments[-1] == "v1":
        segments.pop()
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if not re.fullmatch(r"[A-Za-z0-9._:\[\]%-]+", host) or not re.fullmatch(r"[!-~]*", parts.path):
        raise SettingsError(f"--upstream {url!r} is no address; it looks like http://127.0.0.1:8000/v1")
    netloc = host if port is None else f"{host}:{port}"
    return f"{parts.scheme}://{netloc}" + "".join("/" + part for part in segments)
