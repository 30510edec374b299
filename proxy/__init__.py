"""The sidecar: HTTP in, HTTP out, one journal line per call. `serve` and `ProxyThread` are its public door."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proxy.env import TOKEN_LOGPROBS, TOP_LOGPROBS, read_capture, read_top_logprobs
    from proxy.errors import ProxyError, SessionError, SettingsError
    from proxy.sampling import read_sampling
    from proxy.server import OpenSession, Proxy, ProxyThread, serve
    from proxy.sessions.policy import Policy
    from proxy.settings import SessionOptions, Settings, check_key, is_loopback, option_help
    from proxy.upstream.gate import seconds_to_wait

#: Loaded when asked for: `bench --help` and `bench train` need no proxy.
_DEFINED_IN = {
    "proxy.env": ("TOKEN_LOGPROBS", "TOP_LOGPROBS", "read_capture", "read_top_logprobs"),
    "proxy.errors": ("ProxyError", "SessionError", "SettingsError"),
    "proxy.sampling": ("read_sampling",),
    "proxy.server": ("OpenSession", "Proxy", "ProxyThread", "serve"),
    "proxy.sessions.policy": ("Policy",),
    "proxy.settings": ("SessionOptions", "Settings", "check_key", "is_loopback", "option_help"),
    "proxy.upstream.gate": ("seconds_to_wait",),
}

__all__ = [
    "TOKEN_LOGPROBS", "TOP_LOGPROBS", "OpenSession", "Policy", "Proxy", "ProxyError", "ProxyThread", "SessionError",
    "SessionOptions", "Settings", "SettingsError", "check_key", "is_loopback", "option_help", "read_capture",
    "read_sampling", "read_top_logprobs", "seconds_to_wait", "serve",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in _DEFINED_IN.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
