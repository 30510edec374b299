"""A shell's limit of open files is not the proxy's: 512 streams need more than the usual 1,024."""

from __future__ import annotations

import asyncio
import resource
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
        cwd=Path(__file__).parents[3], check=False,
    )  # fmt: skip
    assert done.stdout.strip() == f"({hard}, {hard})", done.stderr


async def test_a_proxy_that_has_none_left_says_so_once_and_computes_nothing(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", "--upstream", "http://127.0.0.1:9", "--out", str(tmp_path), "--port", "0",
        "--no-probe", stderr=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert process.stderr is not None
    try:
        result = b""
        while b"journal:" not in result:
            result += await process.stderr.readline()
        port = int(result.split(b"agents: http://127.0.0.1:")[1].split(b"/")[0])
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        highest = max(int(path.name) for path in Path(f"/proc/{process.pid}/fd").iterdir())
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (highest + 1, hard))
        before = processor_ticks(process.pid)
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(highest + 5)]
        async with asyncio.timeout(60):
            while b"no descriptor is left (Too many open files)" not in result:
                result += await process.stderr.readline()
        assert processor_ticks(process.pid) - before < 80, "of 100 a second, in two"
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (hard, hard))
        for _, writer in connections:
            writer.close()
    finally:
        process.terminate()
        rest = await process.stderr.read()
    assert b"no descriptor" not in rest and await process.wait() == 0


def processor_ticks(pid: int) -> int:
    """Hundredths of a second that a process computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
