"""The model and the engine behind a service under test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sandbox.scripted_engine import ScriptedEngine
from tests.sandbox.service.support import Model


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def engine(model: Model) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(model) as running:
        yield running
