"""A trainer as a process that may be killed: asks for groups one after another, and writes each verdict down.

python -m benchmarks.serve.trainer URL FILE GROUPS SIZE
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benchmarks.serve.processes import KEY
from train.online.client import RolloutService


def main(url: str, file: str, groups: int, size: int) -> None:
    done = {json.loads(line)["key"] for line in whole_lines(Path(file))}
    with RolloutService(url, KEY) as service, Path(file).open("ab", buffering=0) as out:
        for number in range(groups):
            if f"g{number}" in done:
                continue
            group = service.group(key=f"g{number}", seed=number, size=size)
            records = [record["rollout"] for record in group]
            assert group.verdict is not None
            out.write(b"\n" + json.dumps({"key": group.key, "records": records, "verdict": group.verdict}).encode())
            out.write(b"\n")
            os.fsync(out.fileno())


def whole_lines(file: Path) -> list[bytes]:
    """Without what a kill cut off."""
    if not file.exists():
        return []
    lines = file.read_bytes().split(b"\n")[:-1]
    return [line for line in lines if line.startswith(b"{") and line.endswith(b"}")]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
