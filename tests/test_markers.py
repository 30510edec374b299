"""The markers that tests get from their fixtures and folders: `make test-fast` and `make live` rely on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

#: Collecting every test takes ten seconds.
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
PLUGIN = """
import json

def pytest_collection_finish(session):
    print("COLLECTED " + json.dumps([
        {
            "name": item.nodeid,
            "fixtures": item.fixturenames,
            "markers": sorted({mark.name for mark in item.iter_markers()}),
            "timeout": [list(mark.args), dict(mark.kwargs)] if (mark := item.get_closest_marker("timeout")) else None,
        }
        for item in session.items
    ]))
"""


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every test of this project, as pytest collects it."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "tell_items.py").write_text(PLUGIN)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-p", "tell_items", "-p", "no:cacheprovider", "tests"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    line = next(line for line in done.stdout.splitlines() if line.startswith("COLLECTED "))
    items: list[dict[str, Any]] = json.loads(line.removeprefix("COLLECTED "))
    return items


def test_the_time_limit_of_a_live_test_does_not_count_the_start_of_its_engine(collected: list[dict[str, Any]]) -> None:
    live = [item for item in collected if item["name"].startswith("tests/live/")]
    assert live
    for item in live:
        assert "live" in item["markers"]
        (seconds,), options = item["timeout"]
        assert seconds >= 300 and options == {"func_only": True}, item["name"]


@pytest.mark.parametrize(
    ("fixture", "marker"), [("engine", "engine"), ("docker_client", "docker"), ("browser", "browser")]
)
def test_what_a_test_needs_is_its_marker(collected: list[dict[str, Any]], fixture: str, marker: str) -> None:
    needing = [item for item in collected if fixture in item["fixtures"]]
    assert needing and [item["name"] for item in needing if marker not in item["markers"]] == []
