"""The sidecar: HTTP in, HTTP out, one journal line a call. `serve` and `ProxyThread` are its public door."""

from proxy.env import read_capture, read_top_logprobs
from proxy.errors import ProxyError, SessionError, SettingsError
from proxy.sampling import misspelt_sampling
from proxy.server import OpenSession, Proxy, ProxyThread, serve
from proxy.settings import Settings

__all__ = [
    "OpenSession", "Proxy", "ProxyError", "ProxyThread", "SessionError", "Settings", "SettingsError",
    "misspelt_sampling", "read_capture", "read_top_logprobs", "serve",
]  # fmt: skip
