"""Every setting of the proxy and of its sessions, declared and documented once.

The options of `bench proxy` (`proxy/cli.py`) and the JSON fields of `POST /sessions` are made from these.
"""

from __future__ import annotations

import ipaddress
import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from capture.engines import NAMES as ENGINE_NAMES
from capture.token_in.bridge import MODES, MODES_HELP
from proxy.errors import SettingsError
from proxy.http.limits import Limits
from proxy.sampling import check_forced

#: Headers of one connection, and those with which the proxy frames, encodes and authorizes its own requests.
NEVER_FORWARDED = frozenset(
    "host connection keep-alive proxy-connection transfer-encoding te trailer upgrade content-length content-encoding "
    "content-type accept-encoding expect authorization proxy-authorization cookie".split()
)
ENGINES = ("auto", *ENGINE_NAMES)
GRAMMARS = ("flag", "refuse")
LONGEST_VERSION = 200
PURPOSES = ("train", "eval")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds: to connect, to the head of the answer, between two pieces of its body."""

    connect: float = 10.0
    first_byte: float = 600.0
    idle: float = 300.0


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """Bytes that one answer of an engine may have."""

    #: The whole answer: a compressed answer of a few MiB could otherwise take all memory.
    size: int = 1 << 30
    #: One event of a stream: ten times a prompt of a million ids.
    event: int = 64 << 20


def option(default: Any, help: str, **cli_default: Any) -> Any:
    """A setting that is an option of `bench proxy` too; `default` there may be another: `option(0, "…", cli=8100)`."""
    return field(default=default, metadata={"help": help, "default": cli_default.get("cli", default)})


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What a session may have of its own. The JSON fields of `POST /sessions` and the options of `bench proxy` and
    `bench run` that concern sessions follow from these."""

    #: Engines to call; several are replicas of one model.
    upstream: list[str] = field(
        default_factory=list,
        metadata={"help": "The engine, http://HOST:PORT/v1. Repeat for each replica.", "default": None},
    )
    #: It reaches no agent, no record and no error.
    upstream_key: str | None = option(None, "The engine's API key; never shown to agents.")
    #: `auto` asks the engine; `other` is any OpenAI-compatible API, recorded without tokens.
    engine: str = option("auto", f"{', '.join(ENGINES[:-1])}, or other (text and usage only).")
    model: str | None = option(None, "Model name to send, whatever the agent asks for.")
    #: Ask the engine for ids and logprobs. Off, calls are recorded as they are.
    capture: bool = True
    #: Also record this many alternatives per token.
    top_logprobs: int | None = None
    #: `off`, `auto` where it can be done, `require` or the call is refused.
    token_in: str = option("off", MODES_HELP)
    policy_version: str | None = option(None, "Version of the weights, recorded with each call.")
    sampling: dict[str, object] = field(
        default_factory=dict,
        metadata={"help": 'Defaults for calls that set none, as JSON: {"temperature": 1.0}.', "default": None},
    )

    #: These win over what the agent sends, where `sampling` fills what it leaves out.
    force_sampling: dict[str, object] = field(
        default_factory=dict,
        metadata={
            "help": 'Sampling that replaces what calls set, as JSON: {"top_p": 1.0, "top_k": -1}.',
            "default": None,
        },
    )
    max_output_tokens: int | None = option(
        None, "Tokens that a call may sample at most; a call that asks for more, or does not say, gets this limit."
    )
    grammars: str = option(
        "flag",
        "Calls with a grammar (response_format, a forced tool choice), which biases logprobs: flag them, or refuse "
        "them with 400.",
    )
    max_calls: int | None = option(
        None, "Calls of a session that the engine answers; the proxy ends the calls after them."
    )
    #: Each choice counts. The call that reaches it is cut there.
    max_sampled_tokens: int | None = option(None, "Tokens that all calls of a session may sample; then it ends.")
    #: A call that runs then is not cut.
    max_seconds: float | None = option(None, "Seconds after a session's first call from which on it ends its calls.")
    purpose: str = option("train", "train, or eval: recorded with each call, and left out of training rows.")

    def check(self) -> None:
        """Raises `SettingsError` for the first option that cannot be used."""
        for name in ("max_calls", "max_sampled_tokens", "max_output_tokens"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise SettingsError(f"--{name.replace('_', '-')} must be at least 1, not {number}")
        if self.max_seconds is not None and not (math.isfinite(self.max_seconds) and self.max_seconds > 0):
            raise SettingsError(f"--max-seconds must be a number of seconds above 0, not {self.max_seconds:g}")
        if self.grammars not in GRAMMARS:
            raise SettingsError(f"--grammars must be {' or '.join(GRAMMARS)}, not {self.grammars!r}")
        if self.purpose not in PURPOSES:
            raise SettingsError(f"--purpose must be {' or '.join(PURPOSES)}, not {self.purpose!r}")
        check_forced(self.force_sampling)
        check_version(self.policy_version)
        if self.engine not in ENGINES:
            raise SettingsError(f"--engine must be one of {', '.join(ENGINES)}, not {self.engine!r}")
        for url in self.upstream:
            upstream_base(url)
        check_key(self.upstream_key)
        check_top_logprobs(self.top_logprobs)
        if self.token_in not in MODES:
            raise SettingsError(f"--token-in must be one of {', '.join(MODES)}, not {self.token_in!r}")
        if self.token_in != "off" and not self.capture:
            raise SettingsError(
                "--token-in needs the captured ids: set BENCHFLOW_CAPTURE_TOKEN_LOGPROBS=1, or --token-in off"
            )

    def session_options(self, given: Mapping[str, Any] | None = None) -> SessionOptions:
        """These options, with those of `given` that are not None in their place. Raises `SettingsError`."""
        own = {name: value for name, value in (given or {}).items() if value is not None}
        for name, value in own.items():
            if name not in SESSION_TYPES:
                raise SettingsError(f"unknown field {name!r}; known are {', '.join(sorted(SESSION_TYPES))}")
            if type(value) not in SESSION_TYPES[name]:
                raise SettingsError(f"`{name}` is of the wrong type")
        if isinstance(own.get("upstream"), str):
            own["upstream"] = [own["upstream"]]
        if not all(isinstance(url, str) for url in own.get("upstream", ())):
            raise SettingsError("`upstream` must be an address, or a list of addresses")
        if "upstream" in own:
            own.setdefault("upstream_key", None)  # the key of the proxy's engine is for that engine
        if own.get("capture") is False:
            own.setdefault("token_in", "off")
        options = SessionOptions(
            **{declared.name: getattr(self, declared.name) for declared in fields(SessionOptions)} | own
        )
        options.check()
        return options


def option_help(name: str) -> str:
    """The help text of a session option, for commands that have it too."""
    return next(str(declared.metadata["help"]) for declared in fields(SessionOptions) if declared.name == name)


#: The types of each session option's JSON value.
SESSION_TYPES: dict[str, tuple[type, ...]] = {
    name: tuple(get_origin(kind) or kind for kind in (get_args(hint) if isinstance(hint, UnionType) else (hint,)))
    for name, hint in get_type_hints(SessionOptions).items()
}
SESSION_TYPES["upstream"] = (str, list)
SESSION_TYPES["max_seconds"] = (float, int)


@dataclass(frozen=True, slots=True)
class Settings(SessionOptions):
    """How one proxy runs, and what its sessions have unless they say otherwise.

    Times are seconds, sizes mebibytes where the name says `mb`.
    """

    #: None: no default session; sessions are opened through the admin routes or `open_session`.
    out: Path | None = option(None, "Folder for journals: OUT/default/trajectory/llm_trajectory.jsonl.", cli="captures")  # noqa: RUF009
    #: Beyond loopback every call needs a key.
    host: str = option("127.0.0.1", "Address to listen on.")
    #: Further addresses to listen on, the same port: a sandbox network's gateway, say.
    more_hosts: list[str] = field(default_factory=list)
    port: int = option(0, "Port to listen on; 0 picks a free one.", cli=8100)
    #: The key of the default session. Without one the proxy is open, on loopback only.
    key: str | None = option(None, "Key that agents must send; required beyond loopback.")

    probe: bool = option(
        True, "Make a few tiny calls at the start: report what is captured, measure what logprobs mean."
    )
    #: Measure what the engines' logprobs mean, by three calls of one token (`capture.engines.meaning`).
    #: `probe` does that too.
    measure_logprobs: bool = False
    buffered: bool = option(False, "Call the engine without streaming; agents still get a stream.")
    fsync: bool = option(False, "Sync each line to disk before the reply ends.")

    admin_host: str = option("127.0.0.1", "Address of the admin routes.")
    #: None leaves the admin routes out.
    admin_port: int | None = option(None, "Open /sessions and /metrics on this port.")
    #: Beyond loopback it must be given.
    admin_key: str | None = option(None, "Key of the admin routes; generated and logged if not given.")

    #: Only `bench proxy` starts more than one.
    workers: int = option(1, "Processes, on --port and the ports after it; each session lives in one.")
    #: Sessions that were opened with a key end when they are closed.
    session_idle: float = option(
        3600.0,
        "Seconds without a call after which a session by address (/s/NAME/v1) ends; its next call reopens it on "
        "the same journal. 0: never.",
    )
    #: Of all workers together; what was used longest ago goes first.
    history_mb: int = option(
        1024,
        "Memory for what all sessions remember of their calls (last prompts, token-in, previous_response_id), in MiB.",
    )
    #: Beyond those of `proxy.calls.forwarded_headers.ALLOWED`.
    forward_header: list[str] = field(
        default_factory=list,
        metadata={"help": "Also send this header of the agent's on to the engine. Repeat for each.", "default": None},
    )
    max_body_mb: int = option(256, "Larger request bodies get 413.")
    connect_timeout: float = option(10.0, "Seconds to reach the engine.")
    #: An answer that does not stream comes only when all of it is sampled.
    first_byte_timeout: float = option(1800.0, "Seconds until the engine's answer begins.")
    idle_timeout: float = option(300.0, "Seconds between two pieces of an answer.")
    grace: float = option(30.0, "Seconds to wait for calls in flight when stopping.")
    #: A comment goes out this often to an agent that streams while the engine is called without streaming.
    keepalive: float = 10.0
    #: What one client's connection may cost.
    limits: Limits = Limits()  # noqa: RUF009 (frozen)
    #: What one answer of an engine may cost.
    answer_limits: AnswerLimits = AnswerLimits()

    @classmethod
    def of(cls, session: SessionOptions, **own: Any) -> Settings:
        """A proxy whose sessions all have these options; `own` are the settings of the proxy itself."""
        return cls(**{declared.name: getattr(session, declared.name) for declared in fields(SessionOptions)}, **own)

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts(self.connect_timeout, self.first_byte_timeout, self.idle_timeout)

    def with_admin_key(self) -> Settings:
        """The same, with a new admin key where the admin routes are open and none was given."""
        if self.admin_port is None or self.admin_key is not None:
            return self
        return replace(self, admin_key=secrets.token_urlsafe(24))

    def check(self) -> None:
        """Raises `SettingsError` with one sentence for the first thing that cannot be used."""
        SessionOptions.check(self)
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
        for key in (self.key, self.admin_key):
            check_key(key)
        for name in self.forward_header:
            check_forwarded(name)
        if not 1 <= self.workers <= 64:
            raise SettingsError("--workers must be between 1 and 64")
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


def check_top_logprobs(number: int | None) -> None:
    if number is not None and not 0 <= number <= 1000:
        raise SettingsError("BENCHFLOW_CAPTURE_TOP_LOGPROBS must be between 0 and what the engine allows (vLLM: 20)")


def check_key(key: str | None) -> None:
    if key is not None and not re.fullmatch(r"[!-~]+", key):
        raise SettingsError("a key must be printable ASCII without spaces")


def check_version(version: str | None) -> None:
    """It is in every record of a call, and in lines for people."""
    if version is not None and not (0 < len(version) <= LONGEST_VERSION and version.isprintable()):
        raise SettingsError(f"a policy version must be 1 to {LONGEST_VERSION} printable characters, such as step-120")


def check_forwarded(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name):
        raise SettingsError(f"--forward-header {name!r} is no header's name")
    if name.lower() in NEVER_FORWARDED:
        raise SettingsError(f"--forward-header {name}: the proxy sets this header itself; leave it out")


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
