"""Transfers of weights: what the service and the engine are told, in which order, and after a failure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

from tests.train.online.scripted_service import KEY, Answer, ok, refusal, scripted_service
from tests.train.online.test_gguf import weights, write_model
from train.errors import BadInput, NoSuchPath, ServiceError, ServiceRefused
from train.online.client import RolloutService
from train.online.weights import GgufTransfer, PausingTransfer, SglangTransfer, Transfer

Log = list[tuple[str, Any]]


@pytest.fixture
def log() -> Log:
    return []


@pytest.fixture
def service(log: Log) -> Iterator[RolloutService]:
    def answer(method: str, path: str, body: Any) -> Answer:
        if body and "bad" in str(body.get("path", "")):
            return refusal(400, "the old weights stay in use: llama.cpp could not serve it")
        log.append((path, body))
        return ok({"in_flight": 0})

    with scripted_service(answer) as scripted:
        yield RolloutService(scripted.url, KEY, patience=0)


class Engine:
    """An engine with a transfer of its own, such as vLLM's over NCCL."""

    def __init__(self, log: Log, fail: bool = False) -> None:
        self._log, self._fail = log, fail

    def __getattr__(self, name: str) -> Any:
        def called(*arguments: Any) -> None:
            self._log.append((name, None))
            for iterator in arguments:
                list(iterator)
            if name == "send_weights" and self._fail:
                raise RuntimeError("NCCL")

        return called


def run(transfer: Transfer, given: Any) -> None:
    """As TRL's trainer does it."""
    transfer.pause()
    transfer.send_weights(iter(given))
    transfer.resume()


def test_calls_are_held_while_another_transfer_sends(service: RolloutService, log: Log) -> None:
    transfer = PausingTransfer(service, Engine(log), wait=5)
    transfer.init_weight_transfer()
    for _ in range(2):
        run(transfer, weights().items())
    transfer.destroy()
    once = [("/pause", {"wait": 5}), ("pause", None), ("send_weights", None), ("resume", None)]
    assert log == [
        ("init_weight_transfer", None), *once, ("/resume", {"version": "1"}), *once, ("/resume", {"version": "2"}),
        ("destroy", None),
    ]  # fmt: skip


def test_after_a_failure_the_old_weights_serve_on_as_the_old_version(service: RolloutService, log: Log) -> None:
    transfer = PausingTransfer(service, Engine(log, fail=True), version=3)
    transfer.pause()
    with pytest.raises(RuntimeError, match="NCCL"):
        transfer.send_weights(iter(()))
    transfer.destroy()  # TRL calls it when training ends, however it ends
    assert log[-2:] == [("destroy", None), ("/resume", {})] and transfer.version == 3
    with pytest.raises(RuntimeError, match="NCCL"):
        transfer.update(weights().items())
    assert log[-1] == ("/resume", {}) and transfer.version == 3


def test_a_gguf_file_per_version_and_only_the_last_are_kept(tmp_path: Path, service: RolloutService, log: Log) -> None:
    like, folder = write_model(tmp_path / "like.gguf"), tmp_path / "shared" / "weights"
    transfer = GgufTransfer(service, folder, like=like)
    for seed in (1, 2, 3):
        assert transfer.update(weights(seed).items()) == seed
    transfer.destroy()
    assert log == [
        ("/weights", {"path": str(folder / f"policy-{version}.gguf"), "version": str(version)}) for version in (1, 2, 3)
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["policy-2.gguf", "policy-3.gguf"]
    norm = next(t for t in gguf.GGUFReader(folder / "policy-3.gguf").tensors if t.name == "output_norm.weight")
    assert np.array_equal(norm.data, weights(3)["model.norm.weight"])


def test_weights_that_the_service_refuses_are_a_sentence(tmp_path: Path, service: RolloutService) -> None:
    transfer = GgufTransfer(service, tmp_path / "bad", like=write_model(tmp_path / "like.gguf"))
    with pytest.raises(ServiceRefused, match="the old weights stay in use"):
        transfer.update(weights().items())
    assert transfer.version == 0


@pytest.fixture
def like_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"old")
    return folder


def tensors() -> Iterator[tuple[str, Any]]:
    """Stand-ins with the three methods of a tensor that are used."""
    for name, value in (("a.weight", b"1"), ("b.weight", b"2")):
        tensor = SimpleNamespace(value=value)
        tensor.detach = tensor.cpu = tensor.contiguous = lambda tensor=tensor: tensor
        yield name, tensor


def test_sglang_loads_a_folder_while_calls_are_held(
    tmp_path: Path, service: RolloutService, log: Log, like_folder: Path
) -> None:
    def sglang(method: str, path: str, body: Any) -> Answer:
        log.append((path, body))
        return ok({"success": True, "message": "done"})

    def save(given: dict[str, Any], path: Path, metadata: dict[str, str]) -> None:
        path.write_text(json.dumps({name: tensor.value.decode() for name, tensor in given.items()}))

    with scripted_service(sglang) as engine:
        transfer = SglangTransfer(
            service, tmp_path / "weights", like=like_folder, engine_url=f"{engine.url}/v1", engine_key=KEY, save=save
        )
        for version in (1, 2, 3):
            assert transfer.update(tensors()) == version
    folder = tmp_path / "weights" / "policy-3"
    assert log[-3:] == [
        ("/pause", {"wait": 60.0}),
        ("/update_weights_from_disk", {"model_path": str(folder), "weight_version": "3"}),
        ("/resume", {"version": "3"}),
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert json.loads((folder / "model.safetensors").read_text()) == {"a.weight": "1", "b.weight": "2"}
    assert sorted(path.name for path in folder.parent.iterdir()) == ["policy-2", "policy-3"]


def test_an_sglang_that_does_not_take_them_is_a_sentence_and_calls_go_on(
    tmp_path: Path, service: RolloutService, log: Log, like_folder: Path
) -> None:
    def fail(method: str, path: str, body: Any) -> Answer:
        return 400, {}, [b'{"success": false, "message": "Failed to load"}']

    options: dict[str, Any] = {"like": like_folder, "save": lambda *_, **__: None}
    with scripted_service(fail) as engine:
        transfer = SglangTransfer(service, tmp_path / "w", engine_url=engine.url, engine_key=KEY, **options)
        with pytest.raises(ServiceError, match=r"did not take the weights.*HTTP 400.*Failed to load"):
            transfer.update(tensors())
    gone = SglangTransfer(service, tmp_path / "w", engine_url="http://127.0.0.1:9", **options)
    with pytest.raises(ServiceError, match="did not take the weights"):
        gone.update(tensors())
    assert log == [("/pause", {"wait": 60.0}), ("/resume", {})] * 2


def test_folders_that_cannot_be_used_are_a_sentence(tmp_path: Path, service: RolloutService) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="name another folder"):
        GgufTransfer(service, tmp_path / "file" / "x", like=tmp_path / "file")
    with pytest.raises(NoSuchPath, match=r"no config\.json"):
        SglangTransfer(service, tmp_path / "w", like=tmp_path, engine_url="http://127.0.0.1:9")
