"""The sections of a task's configuration, each key documented where it is declared, and their reader."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from sandbox.errors import TaskError

USER = re.compile(r"^[a-z_][a-z0-9_-]*$")
NETWORKS = ("public", "no-network", "allowlist")


@dataclass(frozen=True)
class SandboxSpec:
    """`sandbox:` (in task.toml `[environment]`): the machine the agent works on."""

    #: Image to start from. With `environment/Dockerfile` and no image the Dockerfile is built.
    docker_image: str | None = None
    #: Where the agent works; the image's own WORKDIR where it is not given, `/app` where that is `/`.
    workdir: str | None = None
    #: `public`: the internet but no port of this host; `no-network`: the model and nothing else; `allowlist`: the model
    #: and `allowed_hosts`, by HTTP and HTTPS through our proxy.
    network_mode: str = "public"
    allowed_hosts: list[str] = field(default_factory=list)
    build_timeout_sec: float = 600.0
    cpus: float = 1.0
    memory_mb: int = 2048
    storage_mb: int = 10240
    #: The most processes and threads.
    pids: int = 512
    #: Environment variables of agent and verifier; no secrets, the agent sees them.
    env: dict[str, str] = field(default_factory=dict)
    #: Shell commands run as root, in `workdir`, before the agent starts.
    setup_commands: list[str] = field(default_factory=list)
    #: Known to BenchFlow, without effect here.
    os: str | None = None
    gpu_types: list[str] | None = None
    #: Known to BenchFlow and refused here when set, because ignoring them would change the task.
    gpus: int = 0
    mcp_servers: list[Any] = field(default_factory=list)
    blocked_urls: list[str] = field(default_factory=list)
    blocked_hosts: list[str] = field(default_factory=list)
    skills_dir: str | None = None
    healthcheck: dict[str, Any] | None = None

    refused: ClassVar[tuple[str, ...]] = (
        "gpus", "mcp_servers", "blocked_urls", "blocked_hosts", "skills_dir", "healthcheck",
    )  # fmt: skip


@dataclass(frozen=True)
class AgentSpec:
    """`agent:` settings for any agent that does the task."""

    #: Wall clock of the prompt in seconds; None: the run's, 900.
    timeout_sec: float | None = None
    #: The agent's user in the sandbox; None: `agent`. `root` is possible, and weakens the hardening.
    user: str | None = None
    prompt_prefix: str | None = None
    #: Overrides `sandbox.network_mode`.
    network_mode: str | None = None
    allowed_hosts: list[str] = field(default_factory=list)

    refused: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class VerifierSpec:
    """`verifier:` how the work is judged."""

    type: str = "test-script"
    timeout_sec: float = 600.0
    #: `${NAME}` is filled from the environment of `bench run`; the agent never sees these.
    env: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    service: str = "main"
    #: Lowest and highest reward; may only widen [0, 1].
    reward_range: list[float] = field(default_factory=lambda: [0.0, 1.0])
    #: `shared`: in the agent's container, after it is cleaned; `separate`: in a fresh one that gets only the workspace.
    sandbox_mode: str | None = None
    #: `cleanup_conftests: false` keeps conftest.py files of the agent; `safe_path: false` lets Python import from the
    #: working directory, which is the agent's, as `python -m` does by default.
    hardening: dict[str, bool] = field(default_factory=dict)
    pytest_plugins: list[str] = field(default_factory=list)
    judge: dict[str, Any] | None = None
    memory: dict[str, Any] | None = None

    refused: ClassVar[tuple[str, ...]] = ("judge", "memory")


@dataclass(frozen=True)
class OracleSpec:
    """`oracle:` (in task.toml `[solution]`): the reference solution."""

    timeout_sec: float | None = None
    env: dict[str, str] = field(default_factory=dict)

    refused: ClassVar[tuple[str, ...]] = ()


class Spec(Protocol):
    refused: ClassVar[tuple[str, ...]]
    __dataclass_fields__: ClassVar[dict[str, Any]]


S = TypeVar("S", bound=Spec)


def read_section(kind: type[S], given: dict[str, Any], where: str, section: str) -> S:
    """`given` as a checked `kind`. Raises `TaskError` that names file, section and key."""
    given = _modern(dict(given), where, section)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    check_keys(given, fields, where, section, strict=True)
    values = {
        name: _typed(str(fields[name].type), value, f"{where}: {section}.{name}")
        for name, value in given.items()
        if value is not None
    }
    for name in kind.refused:
        if values.get(name):
            raise TaskError(f"{where}: {section}.{name} is not supported here; remove it, or run the task elsewhere")
    spec = kind(**values)
    _check_values(spec, f"{where}: {section}")
    return spec


def check_keys(given: dict[str, Any], known: Iterable[str], where: str, section: str, *, strict: bool) -> list[str]:
    """Refuses unknown keys and names the closest known one. Not strict: refuses near misses only and returns a warning
    for each of the rest."""
    names, warnings = list(known), []
    for key in given:
        if key in names:
            continue
        full = f"{section}.{key}" if section else str(key)
        close = difflib.get_close_matches(str(key), names, n=1, cutoff=0.7)
        if close:
            raise TaskError(f"{where}: unknown key {full}; did you mean {close[0]}?")
        if strict:
            raise TaskError(f"{where}: unknown key {full}; known here: {', '.join(sorted(names))}")
        warnings.append(f"{where}: unknown key {full} is passed by")
    return warnings


def _modern(given: dict[str, Any], where: str, section: str) -> dict[str, Any]:
    """A section with older spellings replaced by current ones."""
    if section != "sandbox":
        return given
    for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
        if old in given:
            _only_one(given, old, new, where)
            given[new] = _megabytes(given.pop(old), f"{where}: {section}.{old}")
    if "allow_internet" in given:
        _only_one(given, "allow_internet", "network_mode", where)
        given["network_mode"] = "public" if given.pop("allow_internet") else "no-network"
    return given


def _only_one(given: dict[str, Any], old: str, new: str, where: str) -> None:
    if new in given:
        raise TaskError(f"{where}: sandbox.{old} is an older spelling of {new}; keep one of them")


def _megabytes(value: object, where: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", str(value), re.IGNORECASE)
    if not match:
        raise TaskError(f"{where} must be a size such as 2G or 512M, not {value!r}")
    unit = {"k": 1 / 1024, "m": 1, "g": 1024, "t": 1024 * 1024, "": 1 / 1024**2}[match.group(2).lower()]
    return max(1, round(float(match.group(1)) * unit))


def _typed(declared: str, value: Any, where: str) -> Any:
    kind = declared.removesuffix(" | None")
    if kind == "float" and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise TaskError(f"{where} must be a finite number, not {value!r}")
        return float(value)
    if kind == "int" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "list[str]" and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return value
    if kind == "list[float]" and isinstance(value, list):
        return [_typed("float", v, where) for v in value]
    if kind == "list[Any]" and isinstance(value, list):
        return value
    if kind == "dict[str, str]" and isinstance(value, dict):
        return {_typed("str", k, where): _word(v, f"{where}.{k}") for k, v in value.items()}
    if kind == "dict[str, bool]" and isinstance(value, dict) and all(isinstance(v, bool) for v in value.values()):
        return value
    if kind == "dict[str, Any]" and isinstance(value, dict):
        return value
    words = {
        "float": "a number",
        "int": "a whole number",
        "str": "a text",
        "list[str]": "a list of texts",
        "dict[str, str]": "a mapping of names to texts",
        "dict[str, bool]": "a mapping of names to true or false",
    }
    raise TaskError(f"{where} must be {words.get(kind, kind)}, not {value!r}")


def _word(value: Any, where: str) -> str:
    """YAML reads `PORT: 80` as a number; environment variables are text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise TaskError(f"{where} must be a text, not {value!r}")


def _check_values(spec: object, where: str) -> None:
    for name in ("timeout_sec", "build_timeout_sec", "cpus", "memory_mb", "storage_mb", "pids"):
        value = getattr(spec, name, None)
        if value is not None and value <= 0:
            raise TaskError(f"{where}.{name} must be greater than 0, not {value!r}")
    if isinstance(spec, SandboxSpec) and spec.memory_mb < 6:
        raise TaskError(f"{where}.memory_mb must be at least 6, Docker's own minimum")
    mode = getattr(spec, "network_mode", None)
    if mode is not None and mode not in NETWORKS:
        hint = difflib.get_close_matches(str(mode), NETWORKS, n=1)
        more = f"; did you mean {hint[0]}?" if hint else ""
        raise TaskError(f"{where}.network_mode must be one of {', '.join(NETWORKS)}, not {mode!r}{more}")
    if getattr(spec, "allowed_hosts", None) and mode == "public" and isinstance(spec, SandboxSpec):
        raise TaskError(f"{where}.allowed_hosts has no effect with network_mode public; set network_mode: allowlist")
    workdir = getattr(spec, "workdir", None)
    if workdir is not None and (not workdir.startswith("/") or ".." in workdir.split("/")):
        raise TaskError(f"{where}.workdir must be an absolute path without .., not {workdir!r}")
    user = getattr(spec, "user", None)
    if user is not None and not USER.match(user):
        raise TaskError(f"{where}.user must be a user name such as agent, not {user!r}")
    if isinstance(spec, VerifierSpec):
        _check_verifier(spec, where)


def _check_verifier(spec: VerifierSpec, where: str) -> None:
    if spec.type != "test-script":
        raise TaskError(f"{where}.type {spec.type!r} is not supported here; only test-script is")
    if spec.sandbox_mode not in (None, "shared", "separate"):
        raise TaskError(f"{where}.sandbox_mode must be shared or separate, not {spec.sandbox_mode!r}")
    low_high = spec.reward_range
    if len(low_high) != 2 or low_high[0] > 0 or low_high[1] < 1:
        raise TaskError(f"{where}.reward_range must be [low, high] with low <= 0 and high >= 1, not {low_high!r}")
    known = ("cleanup_conftests", "safe_path")
    check_keys(spec.hardening, known, where.split(": ")[0], "verifier.hardening", strict=True)
