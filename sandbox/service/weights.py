"""New weights behind a service: calls are held meanwhile, and made to the new version afterwards."""

from __future__ import annotations

import threading
from pathlib import Path

from proxy import Policy
from sandbox.embedded_engine import EmbeddedEngine
from sandbox.errors import EngineError
from sandbox.service.group_request import RequestRefused, bad
from sandbox.service.group_service import GroupService

#: Seconds that a pause waits for calls in flight where the trainer says nothing.
WAIT = 300.0


class Weights:
    """What a trainer does when it has new weights. Methods may be called from any thread and may take minutes."""

    def __init__(self, service: GroupService, engine: EmbeddedEngine | None) -> None:
        """`engine`: the one that the service itself runs."""
        self._service = service
        self._engine = engine
        #: Whether a trainer has paused it, and not resumed it yet.
        self.paused = False
        self._loading = threading.Lock()

    def pause(self, wait: float) -> int:
        """Holds calls that are not at the engine yet; how many of the others have not ended after `wait` seconds."""
        self.paused = True
        return self._hold(wait)

    def resume(self, policy: Policy | None) -> None:
        if policy is not None:
            self._service.set_policy(policy)
        self.paused = False
        self._release()

    def load(self, path: object, policy: Policy, wait: float) -> None:
        """Has the service's engine serve this GGUF file, as `policy`; held calls continue unless it was paused before.

        Raises `RequestRefused`; the old weights stay in use then.
        """
        if self._engine is None:
            raise RequestRefused(
                409,
                "no_engine",
                "this service does not run its engine itself: load the weights into the engine and POST /policy, or "
                "start bench serve with --gguf",
            )
        if not isinstance(path, str) or not path or "\0" in path:
            raise bad('give the path of a GGUF file on the service\'s host: {"path": "/shared/step-8.gguf", ...}')
        if not self._loading.acquire(blocking=False):
            raise RequestRefused(409, "loading", "other weights are being loaded; ask again when that is done")
        try:
            self._replace(self._engine, Path(path).absolute(), policy, wait)
        finally:
            self._loading.release()

    def _replace(self, engine: EmbeddedEngine, path: Path, policy: Policy, wait: float) -> None:
        try:
            engine.check(path)
        except EngineError as error:
            raise RequestRefused(400, "bad_weights", f"the old weights stay in use: {error}") from error
        try:
            if left := self._hold(wait):
                raise RequestRefused(
                    409,
                    "in_flight",
                    f"{left} calls have not ended after {wait:g} s, so the old weights stay in use; give a longer "
                    "`wait`",
                )
            try:
                engine.reload(path)
            except EngineError as error:
                raise RequestRefused(503, "engine", str(error), retry_after=5) from error
            self._service.set_policy(policy, str(path))
        finally:
            if not self.paused:
                self._release()

    def _hold(self, wait: float) -> int:
        return 0 if self._service.proxy is None else self._service.proxy.pause(wait)

    def _release(self) -> None:
        if self._service.proxy is not None:
            self._service.proxy.resume()
