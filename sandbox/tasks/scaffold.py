"""`bench tasks init`: writes a small working task to start from."""

from __future__ import annotations

from pathlib import Path

from sandbox.errors import TaskError

TASK = """---
schema_version: "1.3"
metadata:
  author_name: you
  category: example
  tags: [example]
sandbox:
  docker_image: python:3.12-slim
  workdir: /app
  network_mode: no-network
  memory_mb: 1024
agent:
  timeout_sec: 300
verifier:
  timeout_sec: 60
---
# {name}

## prompt

Write the sum of 19 and 23 to the file `/app/answer.txt`.
"""

TEST = """#!/bin/bash
# Reward 1 when /app/answer.txt contains 42 (surrounding whitespace ignored), else 0.
if [ "$(tr -d '[:space:]' < /app/answer.txt 2>/dev/null)" = "42" ]; then
  echo PASS; echo 1 > /logs/verifier/reward.txt
else
  echo FAIL; echo 0 > /logs/verifier/reward.txt
fi
"""

SOLVE = """#!/bin/bash
echo $((19 + 23)) > /app/answer.txt
"""


def write_task(folder: Path) -> None:
    """Writes the example into a new folder. Raises `TaskError` when the folder is not empty."""
    if folder.exists() and not folder.is_dir():
        raise TaskError(f"{folder} is a file; give the name of a new folder")
    if folder.exists() and any(folder.iterdir()):
        raise TaskError(f"{folder} is not empty; give the name of a new folder")
    files = {"task.md": TASK.format(name=folder.name), "verifier/test.sh": TEST, "oracle/solve.sh": SOLVE}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".sh":
            path.chmod(0o755)
