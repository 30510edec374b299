"""The sidecar: HTTP in, HTTP out, one journal line a call. `serve` and `ProxyThread` are its public door."""

from proxy.calls.request_body import misspelt_sampling
from proxy.errors import ProxyError, SessionError, SettingsError
from proxy.server import OpenSession, Proxy, ProxyThread, serve
from proxy.settings import Settings

__all__ = [
    "OpenSession", "Proxy", "ProxyError", "ProxyThread", "SessionError", "Settings", "SettingsError",
    "misspelt_sampling", "serve",
]  # fmt: skip
