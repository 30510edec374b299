"""New weights for the engine behind a rollout service, with the policy version that its calls are stamped with.

Each transfer has the methods of TRL's `WeightTransferProtocol`, and `update`, which does all of it. The first weights
are version 1, as TRL counts them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import httpx

from train.errors import BadInput, NoSuchPath, ServiceError
from train.extras import optional
from train.online.client import SLOW, RolloutService
from train.online.gguf import Dtype, GgufExporter

Weights = Iterable[tuple[str, Any]]


class EngineTransfer(Protocol):
    """What TRL asks of a transfer; its own `WeightTransferClient` is one."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, iterator: Any) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...


class Transfer:
    """Base: holds the service's calls back while weights change; calls that continue afterwards have the next version.

    `wait` is how many seconds calls in flight have to end; what is left then runs on, and its record names both
    versions. `version` is that of the weights that are served now.
    """

    def __init__(self, service: RolloutService, *, wait: float = 60.0, version: int = 0) -> None:
        self.service = service
        self.wait = wait
        self.version = version
        self._paused = self._begun = False

    def init_weight_transfer(self) -> None:
        """Called once, before the first weights."""

    def pause(self) -> None:
        self.service.pause(self.wait)
        self._paused = True

    def send_weights(self, iterator: Weights) -> None:
        raise NotImplementedError

    def resume(self) -> None:
        self.version += 1
        self.service.resume(self.version)
        self._paused = False

    def destroy(self) -> None:
        """Called once, at the end, also after a failure: the old weights stay in use, as the old version."""
        if self._paused:
            self.service.resume()
            self._paused = False

    def update(self, weights: Weights) -> int:
        """Serves these weights; returns their version. For trainers that are not TRL's AsyncGRPO."""
        if not self._begun:
            self.init_weight_transfer()
            self._begun = True
        self.pause()
        try:
            self.send_weights(weights)
        except BaseException:
            Transfer.destroy(self)
            raise
        self.resume()
        return self.version


class PausingTransfer(Transfer):
    """Around a transfer that reaches the engine itself, as TRL's over NCCL to vLLM does.

    `trainer.weight_transfer = PausingTransfer(service, trainer.weight_transfer)` before `trainer.train()`.
    """

    def __init__(
        self, service: RolloutService, engine: EngineTransfer, *, wait: float = 60.0, version: int = 0
    ) -> None:
        super().__init__(service, wait=wait, version=version)
        self._engine = engine

    def init_weight_transfer(self) -> None:
        self._engine.init_weight_transfer()

    def pause(self) -> None:
        super().pause()
        self._engine.pause()

    def send_weights(self, iterator: Weights) -> None:
        self._engine.send_weights(iterator)

    def resume(self) -> None:
        self._engine.resume()
        super().resume()

    def destroy(self) -> None:
        self._engine.destroy()
        super().destroy()


class FileTransfer(Transfer):
    """Base of those that write files to `folder`, which trainer and engine both see. The last `keep` are kept."""

    def __init__(
        self, service: RolloutService, folder: str | Path, *, wait: float = 60.0, version: int = 0, keep: int = 2
    ) -> None:
        super().__init__(service, wait=wait, version=version)
        self.folder = Path(folder).absolute()
        self._keep = max(keep, 1)
        self._written: list[Path] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"{folder} cannot be made: {error.strerror}; name another folder") from error

    def _add(self, path: Path) -> None:
        self._written.append(path)
        for old in self._written[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink(missing_ok=True)
        del self._written[: -self._keep]


class GgufTransfer(FileTransfer):
    """For `bench serve --gguf FILE`: writes a GGUF file like `like`, and the service restarts its engine with it.

    Calls continue while the file is written; the service holds them only for the restart.
    """

    def __init__(
        self,
        service: RolloutService,
        folder: str | Path,
        *,
        like: str | Path,
        dtype: Dtype = "f32",
        version: int = 0,
        keep: int = 2,
    ) -> None:
        super().__init__(service, folder, version=version, keep=keep)
        self._exporter = GgufExporter(like, dtype)

    def pause(self) -> None:
        """Nothing yet: see the class."""

    def send_weights(self, iterator: Weights) -> None:
        version = self.version + 1
        path = self._exporter.write(iterator, self.folder / f"policy-{version}.gguf")
        self.service.load_weights(str(path), version)
        self._add(path)

    def resume(self) -> None:
        """The service resumed when it had loaded the file."""
        self.version += 1


class SglangTransfer(FileTransfer):
    """For SGLang: writes a model folder like `like`, and `engine_url` (without `/v1`) loads it from disk.

    `like` is the folder that the trainer started from: its configuration and tokenizer are copied. `save` writes the
    tensors: safetensors' own function by default.
    """

    def __init__(
        self,
        service: RolloutService,
        folder: str | Path,
        *,
        like: str | Path,
        engine_url: str,
        engine_key: str | None = None,
        wait: float = 60.0,
        version: int = 0,
        keep: int = 2,
        save: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(service, folder, wait=wait, version=version, keep=keep)
        self._like = Path(like)
        if not (self._like / "config.json").is_file():
            raise NoSuchPath(f"{like} has no config.json: give the folder that the trainer's model was loaded from")
        self._url = engine_url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {engine_key}"} if engine_key else {}
        self._save = save or optional(
            "safetensors.torch", "save_file", needed_for="writing weights needs the trl extra", extra="trl"
        )

    def send_weights(self, iterator: Weights) -> None:
        version = self.version + 1
        path = self.folder / f"policy-{version}"
        path.mkdir(exist_ok=True)
        for file in self._like.iterdir():
            if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".gguf")):
                shutil.copy(file, path)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in iterator}
        self._save(tensors, path / "model.safetensors", metadata={"format": "pt"})
        self._load(path, version)
        self._add(path)

    def _load(self, path: Path, version: int) -> None:
        body = {"model_path": str(path), "weight_version": str(version)}
        try:
            answer = httpx.post(
                f"{self._url}/update_weights_from_disk", json=body, headers=self._headers, timeout=SLOW, trust_env=False
            )
        except httpx.HTTPError as error:
            raise ServiceError(f"SGLang at {self._url} did not take the weights in {path}: {error}") from error
        if answer.status_code != httpx.codes.OK:
            raise ServiceError(
                f"SGLang at {self._url} did not take the weights in {path}: "
                f"HTTP {answer.status_code}, {answer.text[:300]}"
            )
