"""`bench serve` and a proxy as processes that can be killed, and a model that solves the demo's task."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.sandbox.scripted_engine import MODEL, Body, Said, call_shell

ROOT = Path(__file__).parents[2]
TASK = ROOT / "sandbox" / "demo" / "task" / "write-number"
KEY = "service-key"
ANSWER = re.compile(r"/[\w/.-]*answer\.txt")


def solve(body: Body) -> Said:
    """Writes the demo's number, says so."""
    tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or []}
    if any(message["role"] == "tool" for message in body["messages"]):
        return Said("Done.")
    path = ANSWER.search(json.dumps(body["messages"]))
    return call_shell(tools, f"printf 42 > {path[0] if path else '/app/answer.txt'}")


class Process:
    """One command that can be killed and started again; its output goes to a log."""

    def __init__(self, words: list[str], log: Path, ready: str) -> None:
        """`ready`: an address that answers 200 once it serves."""
        self.words, self.log, self.ready = words, log, ready
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "bench.py"), *self.words, *more], stdout=log, stderr=log, cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.words[0]} ended: {self.log.read_text()[-2000:]}")
            try:
                if httpx.get(self.ready, timeout=5, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.05)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()

    def cpu_and_memory(self) -> tuple[float, float]:
        """Seconds of processor time so far, and the largest resident size in MiB, of the process itself."""
        assert self.process is not None
        stat = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK"), int(peak[1]) / 1024 if peak else 0.0


def service(engine: str, folder: Path, port: int, *more: str, job: str = "job") -> Process:
    words = ["serve", str(TASK), "-a", "mini", "-m", f"vllm/{MODEL}", "--port", str(port), "--key", KEY, "--job", job,
             "--jobs-dir", str(folder / "jobs"), *capture(engine), *more]  # fmt: skip
    return Process(words, folder / "service.log", f"http://127.0.0.1:{port}/health")


def capture(engine: str) -> list[str]:
    """The options that say where the engine is, and that its tokens are captured."""
    given = {"BENCHFLOW_PROVIDER_BASE_URL": engine, "BENCHFLOW_CAPTURE_TOKEN_LOGPROBS": "1"}
    return [word for name, value in given.items() for word in ("--agent-env", f"{name}={value}")]
