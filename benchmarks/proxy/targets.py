"""The targets between client and engine: each one's environment, how it starts, what it recorded.

`direct` is the engine itself. Everything else is a process of its own on a free port, with one worker process where it
has workers, in the setting that its makers recommend for production as far as there is one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ENVIRONMENTS = Path.home() / ".cache" / "capture-bench"


class Missing(Exception):
    """A target that is not available here; the text says why."""


class Target:
    """A target that runs. `asks`: whether the client itself asks for ids and logprobs, for one that does not."""

    name = "direct"
    asks = True
    path = "/v1/chat/completions"

    def __init__(self, engine_port: int, folder: Path) -> None:
        self.engine_port = engine_port
        self.folder = folder / self.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = engine_port
        self.process: subprocess.Popen[bytes] | None = None

    def install(self) -> None:
        """Makes its environment where it is not there yet. Raises `Missing`."""

    def command(self) -> list[str]:
        return []

    def start(self) -> None:
        command = self.command()
        if not command:
            return
        log = (self.folder / "log").open("ab")
        environment = {**os.environ, **self.environment(), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, env=environment,
            start_new_session=True,
        )  # fmt: skip
        self._wait_until_it_listens()

    def environment(self) -> dict[str, str]:
        return {}

    def _wait_until_it_listens(self, seconds: float = 120) -> None:
        assert self.process is not None
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.process.poll() is not None:
                break
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.1)
        end = (self.folder / "log").read_text(errors="replace")[-800:]
        raise Missing(f"{self.name} does not listen; its log ends:\n{end}")

    def stop(self) -> None:
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    # what it cost

    def pids(self) -> list[int]:
        """The processes of its tree."""
        if self.process is None:
            return []
        found, todo = [], [self.process.pid]
        while todo:
            pid = todo.pop()
            found.append(pid)
            with suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    todo += [int(child) for child in (task / "children").read_text().split()]
        return found

    def cpu(self) -> float:
        """Seconds of processor time of its tree so far, by each process's own clock, which is exact."""
        total = 0.0
        for pid in self.pids():
            with suppress(OSError):
                total += time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3)
        return total

    def settle(self, seconds: float = 20.0) -> None:
        """Waits until it has nothing left to do: what is written after the reply belongs to the call."""
        until = time.monotonic() + seconds
        before = self.cpu()
        while time.monotonic() < until:
            time.sleep(0.15)
            now = self.cpu()
            if now - before < 0.01:
                return
            before = now

    def forget_peak(self) -> None:
        for pid in self.pids():
            with suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")

    def peak_mb(self) -> float:
        """The most memory its processes held since `forget_peak`, each at its own time."""
        total = 0
        for pid in self.pids():
            with suppress(OSError):
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith("VmHWM:"):
                        total += int(line.split()[1])
        return total / 1024

    # what it delivered

    def begin(self) -> None:
        """A load begins: what is recorded from now on is its."""

    def records(self, tokens: int) -> tuple[int, int] | None:
        """Calls recorded since `begin`, and those with every id and one logprob each; None where it keeps none."""
        return None


class Nginx(Target):
    name = "nginx"

    def install(self) -> None:
        if shutil.which("nginx") is None:
            raise Missing("nginx is not installed: apt-get install nginx-light")

    def command(self) -> list[str]:
        self.port = free_port()
        (self.folder / "nginx.conf").write_text(
            f"""
daemon off; worker_processes 1; pid {self.folder}/pid; error_log {self.folder}/error.log;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_max_body_size 256m; client_body_buffer_size 1m;
  client_body_temp_path {self.folder}/body; proxy_temp_path {self.folder}/proxy; fastcgi_temp_path {self.folder}/f;
  uwsgi_temp_path {self.folder}/u; scgi_temp_path {self.folder}/s;
  upstream engine {{ server 127.0.0.1:{self.engine_port}; keepalive 600; }}
  server {{
    listen 127.0.0.1:{self.port} backlog=4096; keepalive_requests 1000000;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
"""
        )
        return ["nginx", "-p", str(self.folder), "-c", str(self.folder / "nginx.conf")]


class Ours(Target):
    """This project as it stands in this folder, in the environment that runs the benchmark, one worker, no --fsync."""

    name = "ours"
    asks = False
    module = "proxy"
    more: tuple[str, ...] = ()

    def command(self) -> list[str]:
        self.port = free_port()
        upstream = f"http://127.0.0.1:{self.engine_port}/v1"
        return [
            sys.executable, "-m", self.module, "--upstream", upstream, "--port", str(self.port), "--out",
            str(self.folder / "captures"), "--no-probe", *self.more,
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(Path(__file__).parents[2])}

    def journals(self) -> list[Path]:
        return sorted((self.folder / "captures").rglob("llm_trajectory.jsonl"))

    def begin(self) -> None:
        self._ends = {path: path.stat().st_size for path in self.journals()}

    def records(self, tokens: int) -> tuple[int, int] | None:
        calls = complete = 0
        for path in self.journals():
            with path.open("rb") as file:
                file.seek(self._ends.get(path, 0))
                for line in file:
                    capture = json.loads(line)["metadata"]["token_capture"]
                    calls += 1
                    choices = capture["completions"]
                    complete += (
                        not capture["unavailable"]
                        and len(choices) == 1
                        and len(choices[0]["token_ids"]) == len(choices[0]["logprobs"]) == tokens
                    )
        return calls, complete


class OursOnUvicorn(Ours):
    """The same with Uvicorn as its HTTP server."""

    name = "ours-on-uvicorn"
    module = "benchmarks.proxy.uvicorn_listener"


class OursTwo(Ours):
    """The same with two workers."""

    name = "ours2"
    more = ("--workers", "2")


class Packaged(Target):
    """A target from PyPI, in an environment of its own."""

    package = ""

    @property
    def bin(self) -> Path:
        return ENVIRONMENTS / self.name / "bin"

    def install(self) -> None:
        if (self.bin.parent / ".installed").exists():
            return
        print(f"installing {self.package} into {self.bin.parent}: once, some minutes", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(self.bin.parent)], check=True)
        done = subprocess.run([str(self.bin / "pip"), "install", "-q", self.package], capture_output=True, text=True)
        if done.returncode:
            raise Missing(f"{self.package} cannot be installed: {done.stderr[-400:]}")
        (self.bin.parent / ".installed").touch()


class Rllm(Packaged):
    """rllm-model-gateway with its default store (SQLite), asking for ids and logprobs as it does by default."""

    name = "rllm"
    package = "rllm-model-gateway"
    asks = False
    path = "/sessions/bench/v1/chat/completions"

    def command(self) -> list[str]:
        self.port = free_port()
        self.database = self.folder / "traces.db"
        return [
            str(self.bin / "rllm-model-gateway"), "--host", "127.0.0.1", "--port", str(self.port), "--worker",
            f"http://127.0.0.1:{self.engine_port}/v1", "--db-path", str(self.database), "--log-level", "WARNING",
        ]  # fmt: skip

    def begin(self) -> None:
        self._rows = self._count()

    def _count(self) -> int:
        with suppress(sqlite3.Error), sqlite3.connect(f"file:{self.database}?mode=ro", uri=True) as store:
            return int(store.execute("SELECT count(*) FROM traces").fetchone()[0])
        return 0

    def records(self, tokens: int) -> tuple[int, int] | None:
        calls = complete = 0
        with sqlite3.connect(f"file:{self.database}?mode=ro", uri=True) as store:
            for (data,) in store.execute("SELECT data FROM traces ORDER BY rowid LIMIT -1 OFFSET ?", (self._rows,)):
                trace = json.loads(data)
                calls += 1
                complete += bool(
                    trace["prompt_token_ids"]
                    and len(trace["completion_token_ids"]) == len(trace["logprobs"] or ()) == tokens
                )
        return calls, complete


class Litellm(Packaged):
    """LiteLLM's proxy in production mode, one worker, no callbacks beyond its defaults."""

    name = "litellm"
    package = "litellm[proxy]"

    def command(self) -> list[str]:
        self.port = free_port()
        (self.folder / "config.yaml").write_text(
            f"""
model_list:
  - model_name: policy
    litellm_params:
      model: hosted_vllm/policy
      api_base: http://127.0.0.1:{self.engine_port}/v1
      api_key: none
general_settings:
  master_key: sk-bench
litellm_settings:
  telemetry: false
  request_timeout: 600
"""
        )
        return [
            str(self.bin / "litellm"), "--config", str(self.folder / "config.yaml"), "--host", "127.0.0.1", "--port",
            str(self.port), "--num_workers", "1",
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        return {"LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


TARGETS: dict[str, type[Target]] = {
    target.name: target for target in (Target, Nginx, Ours, OursOnUvicorn, OursTwo, Rllm, Litellm)
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
