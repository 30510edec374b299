"""Twenty times `kill -9` under 32 concurrent streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proxy.test_kill import kill


@pytest.mark.timeout(600)
async def test_no_finished_call_is_lost_in_twenty_kills(tmp_path: Path) -> None:
    await kill(tmp_path, rounds=20)
