"""Opens sessions with what they are given, and with the proxy's settings where they are given nothing."""

from __future__ import annotations

from pathlib import Path

from proxy.errors import SettingsError
from proxy.sessions.registry import Defaults, Session, Sessions
from proxy.settings import Settings, check_engine, check_key, check_token_in, check_top_logprobs
from proxy.upstream.replicas import Replicas


class SessionFactory:
    """Opens sessions on this proxy's engines, or on one that the session names."""

    def __init__(self, sessions: Sessions, settings: Settings) -> None:
        self.sessions = sessions
        self.settings = settings
        self.port = 0
        self.pools: dict[tuple[tuple[str, ...], str | None, str], Replicas] = {}

    def replicas(self, urls: tuple[str, ...], key: str | None, engine: str) -> Replicas:
        """The replicas at `urls`; sessions that name the same share connections and what was learned of the engine."""
        if not urls:
            raise SettingsError("no upstream: start the proxy with --upstream, or name one for the session")
        found = self.pools.get((urls, key, engine))
        if found is None:
            found = Replicas(list(urls), key=key, engine_name=engine, timeouts=self.settings.timeouts)
            self.pools[(urls, key, engine)] = found
        return found

    def open_session(
        self,
        name: str,
        *,
        journal: Path | None = None,
        engine: str | None = None,
        upstream: str | list[str] | None = None,
        upstream_key: str | None = None,
        model: str | None = None,
        capture: bool | None = None,
        top_logprobs: int | None = None,
        policy_version: str | None = None,
        sampling: dict[str, object] | None = None,
        token_in: str | None = None,
        key: str | None = None,
        session_id: str | None = None,
    ) -> Session:
        """Opens a session; what is not given is as the proxy's settings say. Raises `SessionError`, `SettingsError`."""
        ours = self.settings
        urls = ours.upstream if upstream is None else [upstream] if isinstance(upstream, str) else upstream
        if not all(isinstance(url, str) for url in urls):
            raise SettingsError("`upstream` must be an address, or a list of addresses")
        check_engine(engine or ours.engine)
        check_top_logprobs(top_logprobs)
        check_key(upstream_key)
        captured = ours.capture if capture is None else capture
        check_token_in(mode := ours.token_in if token_in is None else token_in, captured or token_in is None)
        if upstream is not None and upstream_key is None:
            secret = None  # our own engine's key is for our own engine
        else:
            secret = upstream_key if upstream_key is not None else ours.upstream_key
        replicas = self.replicas(tuple(urls), secret, engine or ours.engine)
        return self.sessions.open(
            name,
            journal=journal,
            replicas=replicas,
            key=key,
            model=model if model is not None else ours.model,
            capture=captured,
            top_logprobs=ours.top_logprobs if top_logprobs is None else top_logprobs,
            policy_version=ours.policy_version if policy_version is None else policy_version,
            sampling=ours.sampling if sampling is None else sampling,
            token_in=mode if captured else "off",
            session_id=session_id,
        )

    def defaults(self) -> Defaults:
        """What sessions are like that are made by their names alone."""
        ours = self.settings
        return Defaults(
            replicas=self.replicas(tuple(ours.upstream), ours.upstream_key, ours.engine),
            model=ours.model,
            capture=ours.capture,
            top_logprobs=ours.top_logprobs,
            policy_version=ours.policy_version,
            sampling=ours.sampling,
            token_in=ours.token_in if ours.capture else "off",
        )

    async def close(self) -> None:
        for pool in self.pools.values():
            await pool.close()
