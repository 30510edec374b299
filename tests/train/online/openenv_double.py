"""The few classes of OpenEnv 0.10 that a session makes, without its 200 packages; tests/live has the real ones."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest


class ResourceSession(ABC):
    @abstractmethod
    def close(self) -> None: ...


class ResourceSessionFactory(ABC):
    @abstractmethod
    def create(self, task: Any) -> Any: ...


@dataclass
class VerifyResult:
    env_reward: float | None = None
    done: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, Any] = field(default_factory=dict)


@dataclass
class ToolResult:
    error: str | None = None


@dataclass
class TrainingTurn:
    node_id: str
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    per_token_logps: list[float]
    loss_mask: list[int]
    request: dict[str, Any]
    response: dict[str, Any]
    metadata: dict[str, Any]

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError("no prompt ids")


@dataclass
class TrainingTrace:
    turns: list[TrainingTurn]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `import openenv.core.harness` find them."""
    harness, training = ModuleType("openenv.core.harness"), ModuleType("openenv.core.harness.training")
    for kind in (ResourceSession, ResourceSessionFactory, VerifyResult, ToolResult):
        setattr(harness, kind.__name__, kind)
    for kind in (TrainingTurn, TrainingTrace):
        setattr(training, kind.__name__, kind)
    for name, module in (("openenv.core.harness", harness), ("openenv.core.harness.training", training)):
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("openenv", "openenv.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
