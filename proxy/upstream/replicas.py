"""Engines that serve one model: a session stays where its prefix cache is, and leaves a replica that is down."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import orjson

from capture import json
from capture.engines import IDENTITY_ROUTES, detect, engine
from capture.engines.base import Engine
from capture.engines.meaning import NOTHING, LogprobMeaning, measure
from capture.engines.reader import Reader
from capture.engines.request import FollowUp
from proxy.dialects.chat import dumps
from proxy.errors import UpstreamError
from proxy.http.headers import Headers
from proxy.settings import Timeouts, upstream_base
from proxy.upstream.client import Client
from proxy.upstream.gate import Gate
from proxy.upstream.pool import HttpClient

T = TypeVar("T")
log = logging.getLogger("proxy")

#: Seconds without a call after which an engine is asked again what it is. No engine loads its weights in less, so a
#: restart with other weights or another version is noticed: here, or by calls that fail.
UNUSED = 10.0
#: Names of models of which it is remembered whether they are adapters.
MOST_ADAPTERS = 256


@dataclass(eq=False)
class Replica:
    """One engine: how to reach it, and what it turned out to be."""

    label: str
    client: Client
    key: str | None
    engine_name: str = "auto"
    engine: Engine | None = None
    version: str | None = None
    #: What it samples with where nothing was sent; None where it does not say (vLLM, SGLang).
    sampling_defaults: dict[str, Any] | None = None
    #: What its logprobs mean, where that was measured.
    measured: LogprobMeaning | None = None
    #: Whether its logprobs are measured, and of which model: None is the first that it lists.
    measures: bool = False
    measured_model: str | None = None
    #: The replicas of its model, itself among them.
    peers: list[Replica] = field(default_factory=list, repr=False)
    #: Wires on which it refused capture fields in a stream: those are called unstreamed from then on.
    buffered: set[str] = field(default_factory=set)
    #: Wires on which an unstreamed call brought no more than a streamed one.
    streams_anyway: set[str] = field(default_factory=set)
    #: What no agent and no record may see of it: its key, and its address where that is no ordinary word.
    secrets: tuple[bytes, ...] = ()
    sessions: int = 0
    down: bool = False
    #: Seconds between two checks of a replica that is down. No call goes there, unless all replicas are down.
    check_interval: float = 5.0
    #: Models that turned out to be LoRA adapters, or not to be.
    _adapters: dict[str, bool] = field(default_factory=dict)
    used_at: float = field(default_factory=time.monotonic)
    #: Whether another engine may be at its address by now.
    doubted: bool = False
    _checking: asyncio.Task[None] | None = None
    _detecting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _measuring: asyncio.Lock = field(default_factory=asyncio.Lock)
    _remeasuring: asyncio.Task[None] | None = None

    async def identify(self) -> Engine:
        """Which engine this is: as the settings say, else it is asked. Raises `UpstreamError` when it is down.

        It is asked again after it could not be reached, broke off an answer, or had no call for a while.
        """
        now = time.monotonic()
        if now - self.used_at > UNUSED:
            self.doubted = True
        self.used_at = now
        if self.engine is not None and not self.doubted:
            return self.engine
        async with self._detecting:
            if self.engine is None or self.doubted:
                name, version, unsure = self.engine_name, None, False
                if name != Engine.name:
                    seen, version, unsure = await self._detect()
                    name = seen if name == "auto" else name
                if self.engine is not None and (self.engine.name, self.version) != (name, version):
                    if self.engine.name != Engine.name:  # else nobody knew what it was
                        log.warning("%s is another engine now: %s %s", self.label, name, version or "")
                    self.buffered.clear()
                    self.streams_anyway.clear()
                    self.measured = None
                    self._adapters.clear()
                self.engine, self.version, self.doubted = engine(name), version, unsure
                if self.measures and self.measured is None and not self._measuring.locked():
                    self._remeasuring = asyncio.ensure_future(self._measure_again())
        return self.engine

    def doubt(self) -> None:
        """It broke off an answer or cannot be reached: what comes back may be another version, or started otherwise."""
        self.doubted = True
        self.measured = None

    async def serves_adapter(self, model: str) -> bool:
        """Whether it lists a model of this name with a base model, its `parent` (vLLM 0.32, SGLang 0.5.23): an adapter.

        A listed name is asked about once. Raises `UpstreamError`.
        """
        known = self._adapters.get(model)
        if known is None:
            models = _rows(await self.get_json("/v1/models"))
            row = next((row for row in models if row.get("id") == model), None)
            if row is None:
                return False
            while len(self._adapters) >= MOST_ADAPTERS:
                del self._adapters[next(iter(self._adapters))]
            known = self._adapters[model] = bool(row.get("parent"))
        return known

    def mark_down(self) -> None:
        """No call goes there from now on; it is checked regularly whether it is back."""
        self.down = True
        self.doubt()
        if self._checking is None or self._checking.done():
            self._checking = asyncio.ensure_future(self._until_it_answers())

    async def _until_it_answers(self) -> None:
        while self.down:
            await asyncio.sleep(self.check_interval)
            with suppress(UpstreamError):
                (await self.client.send("GET", "/health", self.auth([]), b"")).close()
                self.down = False  # whatever the status, it answers

    async def close(self) -> None:
        tasks = [task for task in (self._checking, self._remeasuring) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()

    @property
    def logprobs(self) -> LogprobMeaning:
        """What its logprobs mean: as measured, else as its engine is started by default."""
        return self.measured or (self.engine.logprobs if self.engine is not None else NOTHING)

    @property
    def differs_from(self) -> Replica | None:
        """The first measured replica, where this one's logprobs mean something else than that one's."""
        if self.measured is not None:
            for peer in self.peers:
                if peer.measured is not None:
                    return None if peer is self or peer.measured.agrees(self.measured) else peer
        return None

    def describe_logprobs(self) -> dict[str, str]:
        """`{"temperature", "truncation", "values", "source"}`, for records; and `differs_from` where it does."""
        described = self.logprobs.to_json()
        if (first := self.differs_from) is not None:
            described["differs_from"] = first.label
        return described

    async def measure_logprobs(self, model: str | None) -> None:
        """Finds out what its logprobs mean, unless that is known; from now on also after it was down.

        Where it refuses the calls, its engine's default stands. Raises `UpstreamError` where it cannot be reached.
        """
        self.measures, self.measured_model = True, model
        async with self._measuring:
            if self.measured is not None or (await self.identify()).name == Engine.name:
                return
            name = model or first_model(await self.get_json("/v1/models"))
            self.measured = await self.ask(measure(name)) or self.logprobs
        for peer in self.peers:
            first = peer.differs_from
            if first is not None and self in (peer, first):
                log.warning(
                    "%s: its logprobs mean something else (%s) than those of %s (%s): start both engines alike",
                    peer.label, peer.logprobs, first.label, first.logprobs,
                )  # fmt: skip

    async def _measure_again(self) -> None:
        with suppress(UpstreamError):
            await self.measure_logprobs(self.measured_model)

    async def _detect(self) -> tuple[str, str | None, bool]:
        """Name, version, and whether to ask again at the next call: a gateway may answer before its engine does."""
        answers: dict[str, Any] = {}
        status = 0
        self.sampling_defaults = None
        for path in IDENTITY_ROUTES:
            status, answers[path] = await self._answer("GET", path, None)
            found = detect(answers)
            if found is not None:
                self.sampling_defaults = engine(found[0]).sampling_defaults(answers)
                return *found, False
        return "other", None, status >= 500

    async def get_json(self, path: str, *, method: str = "GET", body: Any = None) -> Any:
        """The JSON an engine answers on a side route, or None where it has no such route."""
        return (await self._answer(method, path, body))[1]

    async def status(self, path: str) -> int:
        """What an engine answers to GET `path`. Raises `UpstreamError`."""
        return (await self._answer("GET", path, None))[0]

    async def _answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        payload = b"" if body is None else dumps(body)
        response = await self.client.send(method, path, self.auth([(b"accept", b"application/json")], payload), payload)
        try:
            data = await response.read()
        finally:
            response.close()
        if response.status != 200:
            return response.status, None
        try:
            return 200, orjson.loads(data)
        except orjson.JSONDecodeError:
            return 200, None

    async def answer_follow_ups(self, engine: Engine, reader: Reader) -> None:
        """Asks what the engine's answer does not say and its other routes do (llama.cpp: the prompt's ids)."""
        follow_ups = engine.follow_ups(reader)
        if follow_ups is not None:
            with suppress(UpstreamError, RecursionError):  # nested too deeply to be written: not asked
                await self.ask(follow_ups)

    async def ask(self, follow_ups: Generator[FollowUp, Any, T]) -> T:
        """What the follow-ups come to, each answered with JSON or None. Raises `UpstreamError`."""
        try:
            path, body = next(follow_ups)
            while True:
                path, body = follow_ups.send(await self.get_json(path, method="POST", body=body))
        except StopIteration as end:
            return cast(T, end.value)

    def scrub(self, data: bytes) -> bytes:
        """`data` without this engine's key and address: for errors, and for headers; never for model text."""
        for secret in self.secrets:
            if secret in data:
                data = data.replace(secret, b"***")
        return data

    def auth(self, headers: Headers, body: bytes = b"") -> Headers:
        """`headers` with this engine's key, and the content type of a JSON body."""
        made = list(headers)
        if self.key:
            made.append((b"authorization", b"Bearer " + self.key.encode()))
        if body:
            made.append((b"content-type", b"application/json"))
        return made


class Replicas:
    """The engines a session may use; each session keeps to one while it answers."""

    def __init__(
        self,
        urls: list[str],
        *,
        key: str | None = None,
        engine_name: str = "auto",
        timeouts: Timeouts | None = None,
        gate: Gate | None = None,
    ) -> None:
        """Raises `SettingsError` for an invalid address."""
        self.gate = gate or Gate()
        self.all = [
            Replica(
                f"replica-{number}",
                make_client(upstream_base(url), timeouts or Timeouts(), self.gate),
                key,
                engine_name,
                secrets=_secrets(upstream_base(url), key),
            )
            for number, url in enumerate(urls)
        ]
        for replica in self.all:
            replica.peers = self.all

    def pick(
        self, current: Replica | None, avoid: set[Replica] | None = None, home: Replica | None = None
    ) -> Replica | None:
        """The session's first replica, its `home`, while it is up; else the one it is on; else the one with the fewest
        sessions; None when all are tried.
        """
        if current is not None and current is home and not avoid and not current.down:
            return current
        choice = [replica for replica in self.all if not avoid or replica not in avoid]
        up = [replica for replica in choice if not replica.down] or choice
        chosen = home if home in up else current if current in up else min(up, key=_sessions, default=None)
        if chosen is not current:
            self.leave(current)
            if chosen is not None:
                chosen.sessions += 1
        return chosen

    def any_up(self) -> Replica:
        """One that is up, if any, for a question that belongs to no session."""
        return next((replica for replica in self.all if not replica.down), self.all[0])

    def failed(self, replica: Replica) -> None:
        replica.mark_down()

    def identify_again(self) -> None:
        """Each is asked again what it is before its next call: it may have been started again."""
        for replica in self.all:
            replica.doubted = True

    def leave(self, replica: Replica | None) -> None:
        """A session moves to another replica, or has ended."""
        if replica is not None:
            replica.sessions -= 1

    async def close(self) -> None:
        for replica in self.all:
            await replica.close()


def first_model(models: Any) -> str:
    """The first of the models that an engine lists; `default` where it lists none."""
    return next((str(row.get("id")) for row in _rows(models)), "default")


def _rows(models: Any) -> list[dict[str, Any]]:
    """The models in the answer to `/v1/models`."""
    return json.objects(models.get("data")) if isinstance(models, dict) else []


def _sessions(replica: Replica) -> int:
    return replica.sessions


def _secrets(base: str, key: str | None) -> tuple[bytes, ...]:
    """A key shorter than any real key, such as `EMPTY`, is no secret, and may be a word in error texts."""
    address = base.partition("://")[2].partition("/")[0]
    return tuple(
        secret.encode()
        for secret in (key, address)
        if secret and len(secret) > 7 and (secret is key or not secret.isalnum())
    )


def make_client(base: str, timeouts: Timeouts, gate: Gate) -> Client:
    if base.startswith("https:"):
        from proxy.upstream.httpx_client import HostedClient  # httpx is a third of the memory of a proxy at rest

        return HostedClient(base, timeouts)
    return HttpClient(base, timeouts, gate)
