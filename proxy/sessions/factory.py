"""Opens sessions with their own options, and the proxy's settings for the rest."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from proxy.errors import SettingsError
from proxy.sessions.policy import Policy
from proxy.sessions.registry import Defaults, Session, Sessions
from proxy.settings import SessionOptions, Settings
from proxy.upstream.gate import Gate
from proxy.upstream.probe import measure_all
from proxy.upstream.replicas import Replicas

log = logging.getLogger("proxy")


class SessionFactory:
    """Opens sessions on this proxy's engines, or on those that a session names."""

    def __init__(self, sessions: Sessions, settings: Settings) -> None:
        self.sessions = sessions
        self.settings = settings
        self.port = 0
        #: Of all engines.
        self.gate = Gate()
        self._measuring: set[asyncio.Task[None]] = set()
        self.pools: dict[tuple[tuple[str, ...], str | None, str], Replicas] = {}

    def replicas(self, options: SessionOptions) -> Replicas:
        """The engines to call; sessions with the same engines share connections and what was learned of the engine."""
        if not options.upstream:
            raise SettingsError("no upstream: start the proxy with --upstream, or name one for the session")
        pool = tuple(options.upstream), options.upstream_key, options.engine
        if pool not in self.pools:
            urls, key, engine = pool
            self.pools[pool] = Replicas(
                list(urls), key=key, engine_name=engine, timeouts=self.settings.timeouts, gate=self.gate
            )
            if options.capture and (self.settings.probe or self.settings.measure_logprobs):
                self._measuring.add(asyncio.ensure_future(measure_all(self.pools[pool], options.model)))
        return self.pools[pool]

    def open_session(
        self,
        name: str,
        *,
        journal: Path | None = None,
        key: str | None = None,
        session_id: str | None = None,
        **options: Any,
    ) -> Session:
        """Opens a session; `options` are fields of `SessionOptions`. Raises `SessionError`, `SettingsError`."""
        own = self.settings.session_options(options)
        replicas = self.replicas(own)
        return self.sessions.open(name, own, replicas, journal=journal, key=key, session_id=session_id)

    def set_all_policies(self, policy: Policy) -> None:
        """The policy of all sessions, open and later, but of those that are opened with one of their own."""
        self.settings = replace(self.settings, **policy.fields())
        self.sessions.set_all_policies(policy)

    async def pause(self, wait: float) -> int:
        """Holds calls that are not at an engine yet; how many of the others have not ended after `wait` seconds."""
        if not self.gate.closed:
            log.info("engines are paused: calls wait until they are resumed")
        self.gate.close()
        return await self.gate.drained(wait)

    def resume(self, policy: Policy | None = None) -> None:
        """Lets calls reach their engines again, with `policy` where it is given."""
        if self.gate.closed:
            log.info("engines are resumed: %d calls waited", self.gate.waiting)
        if policy is not None:
            self.set_all_policies(policy)
        for pool in self.pools.values():
            pool.identify_again()
        self.gate.open()

    def defaults(self) -> Defaults:
        """The options of sessions that are opened by their address."""
        options = self.settings.session_options()
        return Defaults(self.replicas(options), options)

    async def close(self) -> None:
        for task in self._measuring:
            task.cancel()
        await asyncio.gather(*self._measuring, return_exceptions=True)
        for pool in self.pools.values():
            await pool.close()
