"""A service process over plain folders, and a model that solves the task at a pace that a test chooses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx

from tests.sandbox.scripted_engine import Body, Said, ScriptedEngine, call_shell
from tests.sandbox.service.local_service import KEY
from tests.sandbox.support import WAIT, make_task

ROOT = Path(__file__).parents[3]
#: The local pool spells `/app` as a folder of this machine.
ANSWER = re.compile(r"[\w/]*/app/answer\.txt")
PROMPT = "Write 42 to `/app/answer.txt`."


class Model:
    """Writes 42 to the file of the prompt. While `gate` is clear, the agents' calls wait."""

    def __init__(self, right: float = 1.0) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.calls = 0
        self._lock = threading.Lock()
        self._right = right

    def __call__(self, body: Body) -> Said:
        if not body.get("tools"):  # the proxy asks what logprobs mean
            return Said("Yes.")
        with self._lock:
            self.calls += 1
            number = self.calls
        assert self.gate.wait(WAIT)
        tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or []}
        path = ANSWER.search(json.dumps(body["messages"]))
        if path is None or any(message["role"] == "tool" for message in body["messages"]):
            return Said("Done.")
        value = 42 if self._right == 1.0 or number % 4 else 41
        return call_shell(tools, f"printf {value} > {path[0]}")


def until(happened: Any) -> None:
    deadline = time.monotonic() + WAIT
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def write_tasks(folder: Path, *names: str) -> Path:
    for name in names or ("write-42",):
        task = make_task(folder, name=name)
        (task.path / "task.md").write_text(
            (task.path / "task.md").read_text().replace("Write 42 to answer.txt.", PROMPT)
        )
    return folder


class Service:
    """The process, from `with` on; `url` is its address."""

    def __init__(self, folder: Path, engine: ScriptedEngine, **options: Any) -> None:
        self.folder, self._engine, self._options = folder, engine, options
        self.job = folder / "jobs" / "job"
        self.log = folder / "service.log"

    def start(self, **more: Any) -> Self:
        options = json.dumps(self._options | more)
        words = [self._engine.base_url, str(self.folder / "jobs"), str(self.folder / "tasks"), options]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.sandbox.service.local_service", *words], cwd=ROOT, stdout=subprocess.PIPE,
                stderr=log, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http://"), self.log.read_text()
        self.http = httpx.Client(
            base_url=self.url, headers={"authorization": f"Bearer {KEY}"}, timeout=WAIT, trust_env=False
        )
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill(signal.SIGKILL)

    def kill(self, number: signal.Signals) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(WAIT)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.http.close()
        return code

    def group(self, key: str, **fields: Any) -> list[dict[str, Any]]:
        """All lines of a group, from the request on."""
        return list(self.lines(key, **fields))

    def lines(self, key: str, **fields: Any) -> Iterator[dict[str, Any]]:
        body = {"key": key, "task": "write-42", "size": 2, **fields}
        with self.http.stream("POST", "/groups", json=body) as reply:
            if reply.status_code != 200:
                reply.read()
                raise AssertionError(f"{reply.status_code}: {reply.text}")
            for line in reply.iter_lines():
                if line:
                    yield json.loads(line)

    def post(self, **body: Any) -> httpx.Response:
        return self.http.post("/groups", json=body)

    def rollouts(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.job.glob("*/result.json"))]
