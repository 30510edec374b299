"""The public API: start a proxy, open and close sessions, stop it; on this loop (`serve`) or in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from proxy.admin.api import Admin
from proxy.admin.metrics import Metrics
from proxy.admin.server import AdminServer
from proxy.errors import ProxyError
from proxy.http.listener import Listener
from proxy.http.sockets import bind, in_url
from proxy.routes import Routes
from proxy.runtime.fd_limits import raise_fd_limit
from proxy.runtime.loop import run
from proxy.runtime.lru import MemoryBudget
from proxy.sessions.factory import SessionFactory
from proxy.sessions.placement import Placement
from proxy.sessions.policy import Policy
from proxy.sessions.registry import Sessions
from proxy.settings import Settings
from proxy.upstream.probe import probe_all

log = logging.getLogger("proxy")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OpenSession:
    """What an agent needs: a key that reaches one session, and base URLs for OpenAI's and Anthropic's clients."""

    id: str
    name: str
    api_key: str
    base_url: str
    anthropic_base_url: str


class Proxy:
    """A running proxy."""

    def __init__(
        self, settings: Settings, sessions: Sessions, factory: SessionFactory, host: str, admin_url: str | None
    ) -> None:
        self.settings = settings
        self.sessions = sessions
        self.port = factory.port
        self.base_url = f"http://{in_url(host)}:{factory.port}/v1"
        self.admin_url = admin_url
        self._factory = factory

    async def open_session(self, name: str, *, journal: Path, **options: Any) -> OpenSession:
        """Opens a session that writes to `journal`; options are those of `POST /sessions`. Raises `ProxyError`."""
        session = self._factory.open_session(name, journal=journal, **options)
        return OpenSession(session.id, session.name, session.api_key, self.base_url, self.base_url.removesuffix("/v1"))

    async def close_session(self, session_id: str) -> dict[str, Any]:
        """Waits for calls in flight and seals the journal; returns the session's last state."""
        return await self.sessions.close(session_id)

    async def session_state(self, session_id: str) -> dict[str, Any]:
        return self.sessions.get(session_id).state()

    async def set_policy_version(self, session_id: str, version: str) -> None:
        self.sessions.set_policy(self.sessions.get(session_id), Policy(version))

    async def set_policy(self, version: str, model: str | None = None) -> None:
        """The version that calls of all sessions, open and later, have from now on; `model` is the name under which the
        engine serves it, where it has a new one (a LoRA adapter).
        """
        self._factory.set_all_policies(Policy(version, model))

    async def pause(self, wait: float) -> int:
        """Holds all calls that are not at an engine yet; waits up to `wait` seconds for the others to end, and returns
        how many have not. Held calls wait, streams with keep-alives, until `resume`.
        """
        return await self._factory.pause(wait)

    async def resume(self, version: str | None = None, model: str | None = None) -> None:
        """Lets the held calls go, as calls to this version where one is given."""
        self._factory.resume(None if version is None else Policy(version, model))

    async def logprobs(self) -> dict[str, str] | None:
        """What the logprobs of the settings' engine mean, as records have it; None without an engine."""
        if not self.settings.upstream:
            return None
        return self._factory.replicas(self.settings).any_up().describe_logprobs()


@asynccontextmanager
async def serve(settings: Settings, share: Share | None = None) -> AsyncIterator[Proxy]:
    """A running proxy. On leaving, calls in flight get `settings.grace` seconds, then journals are sealed.

    Raises `SettingsError` for what cannot be used, a taken port included, and `SessionError` for a journal.
    """
    settings.check()
    settings = settings.with_admin_key()
    raise_fd_limit()
    open_mode = settings.out is not None and settings.key is None
    sessions = Sessions(
        open_mode=open_mode, out=settings.out, fsync=settings.fsync, grace=settings.grace, idle=settings.session_idle,
        budget=MemoryBudget((settings.history_mb << 20) // settings.workers),
        placement=share.placement if share else None,
    )  # fmt: skip
    factory = SessionFactory(sessions, settings)
    metrics = Metrics(factory.gate)
    sockets = share.sockets if share else bind([settings.host, *settings.more_hosts], settings.port)
    factory.port = sockets[0].getsockname()[1]
    first = share is None or share.placement.index == 0
    listener = Listener(Routes(sessions, settings, metrics), settings.limits)
    admin_sockets: list[socket.socket] = []
    admin_url = None
    try:
        if share is not None:
            admin_sockets = [share.admin_socket()]
        elif settings.admin_port is not None:
            admin_sockets = bind([settings.admin_host], settings.admin_port, option="--admin-port")
            admin_url = f"http://{in_url(settings.admin_host)}:{admin_sockets[0].getsockname()[1]}"
        if settings.out is not None:
            sessions.defaults = factory.defaults()
            if first:
                sessions.default = factory.open_session("default", key=settings.key)
    except ProxyError:
        for bound in (*sockets, *admin_sockets):
            bound.close()
        raise
    admin = AdminServer(Admin(sessions, settings, metrics, factory).app(), settings, admin_sockets)
    probing: asyncio.Future[None] | None = None
    try:
        if share is not None:
            share.restore(factory)  # before the first call comes
            if share.paused:
                factory.gate.close()
        await listener.listen(sockets)
        await admin.start()
        if settings.upstream and (settings.probe or settings.measure_logprobs):
            pool = factory.replicas(settings)  # its logprobs are measured from now on
            if settings.probe and first:
                probing = asyncio.ensure_future(probe_all(pool, settings))
        yield Proxy(settings, sessions, factory, settings.host, admin_url)
    finally:
        if probing is not None:
            probing.cancel()
        factory.gate.end()
        await asyncio.gather(listener.close(settings.grace), admin.close())
        await sessions.close_all()
        await factory.close()


@dataclass(frozen=True, slots=True)
class Share:
    """A worker's share of a proxy: where sessions live, its bound sockets, the Unix socket of its admin routes."""

    placement: Placement
    sockets: list[socket.socket]
    admin: Path
    #: Whether the proxy's engines are paused.
    paused: bool
    #: Opens again what an earlier process of this worker had open.
    restore: Callable[[SessionFactory], None]

    def admin_socket(self) -> socket.socket:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(str(self.admin))
        return listening


class ProxyThread:
    """The same API for code without an event loop: the proxy runs in a thread of its own.

    `with ProxyThread(settings) as proxy: ...` gives the proxy; its methods block until they are done.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.base_url = ""
        self.port = 0
        self.admin_url: str | None = None
        self._proxy: Proxy | None = None
        self._ready = threading.Event()
        self._failed: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="capture-proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        if self._failed is not None:
            self._thread.join()
            raise self._failed
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def open_session(self, name: str, *, journal: Path, **options: Any) -> OpenSession:
        return self._call(lambda proxy: proxy.open_session(name, journal=journal, **options))

    def close_session(self, session_id: str) -> dict[str, Any]:
        return self._call(lambda proxy: proxy.close_session(session_id))

    def session_state(self, session_id: str) -> dict[str, Any]:
        return self._call(lambda proxy: proxy.session_state(session_id))

    def set_policy_version(self, session_id: str, version: str) -> None:
        self._call(lambda proxy: proxy.set_policy_version(session_id, version))

    def set_policy(self, version: str, model: str | None = None) -> None:
        self._call(lambda proxy: proxy.set_policy(version, model))

    def pause(self, wait: float) -> int:
        return self._call(lambda proxy: proxy.pause(wait))

    def resume(self, version: str | None = None, model: str | None = None) -> None:
        self._call(lambda proxy: proxy.resume(version, model))

    def logprobs(self) -> dict[str, str] | None:
        return self._call(lambda proxy: proxy.logprobs())

    def _call(self, work: Callable[[Proxy], Awaitable[T]]) -> T:
        if self._proxy is None or self._loop is None or not self._thread.is_alive():
            raise ProxyError("the proxy is not running")
        proxy = self._proxy

        async def run() -> T:
            return await work(proxy)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _run(self) -> None:
        try:
            run(self._main())
        except BaseException as error:
            self._failed = error
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with serve(self.settings) as proxy:
            self._proxy = proxy
            self.base_url, self.port, self.admin_url = proxy.base_url, proxy.port, proxy.admin_url
            self._ready.set()
            await self._stop.wait()
