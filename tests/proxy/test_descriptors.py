"""A shell's limit of open files is not the proxy's: 512 streams need more than the usual 1,024."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import pathlib, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
from proxy import ProxyThread, Settings
with ProxyThread(Settings(upstream=["http://127.0.0.1:9"], out=pathlib.Path(sys.argv[2]), probe=False)):
    print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("hard", [256, 64])
def test_a_proxy_takes_what_it_may_have(tmp_path: Path, hard: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(hard), str(tmp_path)], capture_output=True, text=True, timeout=60,
        cwd=Path(__file__).parents[2], check=False,
    )  # fmt: skip
    assert done.stdout.strip() == f"({hard}, {hard})", done.stderr
