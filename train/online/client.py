"""A client of the rollout service (`bench serve`): asks for groups, and gets records and a verdict for each."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, Literal, Self, TypedDict, TypeVar, cast
from urllib.parse import quote

import httpx

from train.errors import BadInput, ServiceBusy, ServiceError, ServiceRefused, ServiceUnavailable
from train.stream.records import RolloutRecord

log = logging.getLogger(__name__)

VERDICT: Final = "benchflow.group-verdict.v1"
#: Seconds that a service may take to load other weights or to let calls in flight end.
SLOW: Final = 900.0

_T = TypeVar("_T")


class Task(TypedDict):
    """A task that the service can run."""

    name: str
    digest: str | None
    prompt: str


class GroupVerdict(TypedDict):
    """How a group ended. `rollouts` and `advantages` are in the order of the rollouts' `index`, one per rollout; in a
    group of one the advantage is None, as there is nothing to compare it with.

    `advantages` is None unless `state` is "complete"; else `reason` is a code and `detail` a sentence that say why.
    """

    schema_version: str
    key: str
    task: str
    size: int
    purpose: str
    state: Literal["complete", "withheld", "cancelled"]
    reason: str | None
    detail: str | None
    rollouts: list[str | None]
    advantages: list[float | None] | None
    advantage_kind: str | None
    group_mean: float | None
    group_std: float | None
    ddof: int | None
    eps: float | None


class RolloutService:
    """A rollout service at `url`; `key` is what it was started with. Threads may share one; it can be pickled.

    A connection counts as lost after `timeout` seconds without a byte (the service sends something every 10 s). What
    cannot be reached, is shutting down or has a full queue is asked again for `patience` seconds.

    Methods raise `ServiceUnavailable`, `ServiceBusy` or `ServiceRefused` with one sentence; an address that cannot be
    one is `BadInput`.
    """

    def __init__(self, url: str, key: str | None = None, *, timeout: float = 60.0, patience: float = 300.0) -> None:
        _check(url, key)
        self.url = url.rstrip("/")
        self.timeout = timeout
        self.patience = patience
        self._key = key
        self._http = self._open()

    def _open(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(self.timeout, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
            trust_env=False,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_http"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._http = self._open()

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def group(
        self,
        *,
        key: str,
        size: int,
        task: str | None = None,
        seed: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        policy_version: str | None = None,
        deadline: float | None = None,
        purpose: Literal["train", "eval"] = "train",
        advantage: Mapping[str, Any] | None = None,
        max_calls: int | None = None,
        max_sampled_tokens: int | None = None,
        max_seconds: float | None = None,
        max_output_tokens: int | None = None,
    ) -> Group:
        """Starts `size` rollouts of one task, or joins the group that has this `key` already.

        The task is named, or picked by `seed`. `sampling` is forced on every call. `deadline` is in seconds from the
        start of the group. `advantage` is `{"kind": "grpo" | "dr-grpo" | "rloo", "ddof": 0 | 1, "eps": float}`. The
        last four bound each rollout. The result yields records as rollouts finish.
        """
        given = {
            "key": key, "size": size, "task": task, "seed": seed, "policy_version": policy_version,
            "sampling": None if sampling is None else dict(sampling), "deadline": deadline, "purpose": purpose,
            "advantage": None if advantage is None else dict(advantage), "max_calls": max_calls,
            "max_sampled_tokens": max_sampled_tokens, "max_seconds": max_seconds,
            "max_output_tokens": max_output_tokens,
        }  # fmt: skip
        return Group(self, {name: value for name, value in given.items() if value is not None})

    def cancel(self, key: str) -> None:
        """Stops a group; its containers are removed, and its verdict is "cancelled". Tries for 10 s at most."""
        self._call("DELETE", f"/groups/{quote(key, safe='')}", patience=10.0)

    def tasks(self) -> list[Task]:
        return cast(list[Task], self._call("GET", "/tasks")["tasks"])

    def status(self) -> dict[str, Any]:
        return self._call("GET", "/status")

    def set_policy(self, version: str | int, model: str | None = None) -> None:
        """Stamps the calls from now on, of running rollouts too, with this version of the weights.

        `model` is the engine's name for it, where each version has its own (a LoRA adapter).
        """
        self._call("POST", "/policy", _policy(version, model))

    def pause(self, wait: float = 60.0) -> int:
        """Holds calls to the engine back and waits up to `wait` seconds for those in flight; how many are left."""
        return int(self._call("POST", "/pause", {"wait": wait}, slow=True)["in_flight"])

    def resume(self, version: str | int | None = None, model: str | None = None) -> None:
        """Lets the calls go that `pause` held back; with a `version`, as `set_policy` does."""
        self._call("POST", "/resume", {} if version is None else _policy(version, model))

    def load_weights(self, path: str, version: str | int) -> None:
        """Makes the service's own engine serve the GGUF file at `path` (of the service's host) as this version."""
        self._call("POST", "/weights", {"path": path, "version": str(version)}, slow=True)

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        slow: bool = False,
        patience: float | None = None,
    ) -> dict[str, Any]:
        """One request; repeated while the service cannot be reached, since each is safe to repeat."""
        timeout = httpx.Timeout(max(SLOW, self.timeout) if slow else self.timeout, connect=self.timeout, pool=None)

        def attempt() -> dict[str, Any]:
            try:
                answer = self._http.request(method, path, json=body, timeout=timeout)
            except httpx.TransportError as error:
                raise self.unreachable(error) from error
            self.raise_for(answer)
            try:
                found = answer.json()
            except ValueError:
                found = None
            if not isinstance(found, dict):
                raise ServiceRefused(f"{self.url}{path} answered with no JSON object: is it a rollout service?")
            return found

        return self.patiently(attempt, time.monotonic() + (self.patience if patience is None else patience))

    def stream(self, body: Mapping[str, Any]) -> httpx.Response:
        """The open answer to one POST /groups; the caller closes it."""
        request = self._http.build_request("POST", "/groups", json=body)
        try:
            answer = self._http.send(request, stream=True)
        except httpx.TransportError as error:
            raise self.unreachable(error) from error
        try:
            if answer.status_code != httpx.codes.OK:
                answer.read()
            self.raise_for(answer)
        except httpx.TransportError as error:
            answer.close()
            raise self.unreachable(error) from error
        except ServiceError:
            answer.close()
            raise
        return answer

    def patiently(self, attempt: Callable[[], _T], until: float) -> _T:
        """The result of `attempt`, made again while the service is away or busy, until the clock is at `until`. The log
        says so once.
        """
        pause, warned = 0.1, False
        while True:
            try:
                return attempt()
            except (ServiceUnavailable, ServiceBusy) as error:
                wait = error.retry_after if isinstance(error, ServiceBusy) else pause
                if time.monotonic() + wait > until:
                    raise
                if not warned:
                    log.warning("%s; trying again for %.0f s", error, until - time.monotonic())
                    warned = True
                time.sleep(wait * random.uniform(1, 1.25))  # noqa: S311 - so that trainers do not come back at once
                pause = min(pause * 2, 5.0)

    def unreachable(self, error: httpx.TransportError) -> ServiceUnavailable:
        what = str(error).strip() or type(error).__name__
        return ServiceUnavailable(
            f"the rollout service at {self.url} does not answer ({what}): start bench serve, or check the address"
        )

    def raise_for(self, answer: httpx.Response) -> None:
        """Raises what an answer that is not 200 means; the body has been read."""
        status = answer.status_code
        if status == httpx.codes.OK:
            return
        message = _message(answer)
        if status in (401, 403):
            raise ServiceRefused(f"the rollout service at {self.url} refuses the key: {message}", status)
        if status == 429:
            raise ServiceBusy(f"the rollout service at {self.url} is busy: {message}", _retry_after(answer))
        if status in (502, 503, 504):
            raise ServiceUnavailable(f"the rollout service at {self.url} cannot answer now (HTTP {status}): {message}")
        raise ServiceRefused(f"the rollout service at {self.url} refuses (HTTP {status}): {message}", status)


class Group(Iterator[RolloutRecord]):
    """The records of one group, in the order its rollouts finish; after the last one, `verdict` is set.

    A lost connection is opened again, with the same key: the service joins it to the group, and records that were seen
    are skipped. Leaving early does not cancel the group: `RolloutService.cancel` does.
    """

    def __init__(self, service: RolloutService, body: Mapping[str, Any]) -> None:
        self.key = str(body["key"])
        self.verdict: GroupVerdict | None = None
        self._service = service
        self._body = body
        self._seen: set[str] = set()
        #: When the connection was lost for the first time since something new came or a connection lasted.
        self._lost: float | None = None
        self._open()

    def _open(self) -> None:
        until = (self._lost or time.monotonic()) + self._service.patience
        self._answer = self._service.patiently(lambda: self._service.stream(self._body), until)
        self._lines = _lines(self._answer)
        self._opened = time.monotonic()

    def __next__(self) -> RolloutRecord:
        while self.verdict is None:
            row = self._next_line()
            if row.get("schema_version") == VERDICT:
                self.verdict = cast(GroupVerdict, row)
                self.close()
            elif row["rollout"] not in self._seen:
                self._seen.add(row["rollout"])
                self._lost = None
                return cast(RolloutRecord, row)
        raise StopIteration

    def close(self) -> None:
        """Closes the connection; the group runs on."""
        self._answer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _next_line(self) -> dict[str, Any]:
        while True:
            try:
                line = next(self._lines, None)
            except (httpx.TransportError, httpx.StreamError):
                line = None
            if line is None:
                self._join_again()
            elif line:
                return _object(line, self._service.url)

    def _join_again(self) -> None:
        """The service went away before the verdict: the same request joins the same group."""
        self._answer.close()
        now = time.monotonic()
        if self._lost is None or now - self._opened > self._service.timeout:
            self._lost = now
        elif now - self._lost > self._service.patience:
            raise ServiceUnavailable(f"{self._service.url} ends its answers for group {self.key} without a verdict")
        else:
            time.sleep(0.05)
        self._open()


def _policy(version: str | int, model: str | None) -> dict[str, str]:
    return {"version": str(version)} | ({} if model is None else {"model": model})


def _check(url: str, key: str | None) -> None:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise BadInput(f"{url!r} is not the address of a rollout service: give one as http://HOST:PORT")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise BadInput("the key of the rollout service cannot be sent in a header: give the one it was started with")


def _lines(answer: httpx.Response) -> Iterator[bytes]:
    """The whole lines of an NDJSON answer. Only a line feed ends one: texts may hold other line separators."""
    parts: list[bytes] = []
    for chunk in answer.iter_bytes():
        *ended, rest = chunk.split(b"\n")
        for line in ended:
            yield b"".join([*parts, line])
            parts = []
        if rest:
            parts.append(rest)


def _object(line: bytes, url: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ServiceRefused(f"{url}/groups sent a line that is no JSON object: is it a rollout service?")
    return found


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200].strip() or "no reason given"


def _retry_after(answer: httpx.Response) -> float:
    try:
        return min(max(float(answer.headers.get("Retry-After", "1")), 0.1), 60.0)
    except ValueError:
        return 1.0
