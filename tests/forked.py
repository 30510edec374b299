"""Commands as processes of their own, without the start of a new Python for each.

One process has the packages loaded and forks for every command: its words, folder, environment, output and exit code
are those of a process that a shell starts. What the start itself does (loading, Ctrl-C) is in `test_command_edge.py`.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

ROOT = Path(__file__).parents[1]
#: What each command line is run by, and what its commands would load one after another.
TRAIN = ("train.cli", "train.commands.coverage", "train.commands.stream", "train.commands.convert",
         "train.commands.validate", "train.commands.sft")  # fmt: skip
PRELOADED = {
    "bench": ("bench", "proxy.cli", *TRAIN),
    "proxy": ("proxy.__main__", "proxy.cli", "proxy.server"),
    "sandbox": ("sandbox.__main__", "sandbox.cli", "sandbox.rollouts.job"),
    "train": ("train.__main__", *TRAIN),
}


def run_command(
    words: Sequence[object],
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
) -> subprocess.CompletedProcess[str]:
    """Runs `bench …`, `proxy …`, `sandbox …` or `train …`; the last three are `python -m proxy …` and so on.

    `env` is added to this process's environment.
    """
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        request = {
            "words": list(map(str, words)), "cwd": str(cwd or Path.cwd()), "env": {**os.environ, **(env or {})},
            "out": str(out), "err": str(err),
        }  # fmt: skip
        server.stdin.write(json.dumps(request).encode() + b"\n")
        server.stdin.flush()
        pid = int(_line(server.stdout, 60))
        try:
            code = int(_line(server.stdout, timeout))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            _line(server.stdout, 60)
            raise
        return subprocess.CompletedProcess(list(words), code, out.read_text(), err.read_text())


def _line(pipe: IO[bytes], seconds: float) -> bytes:
    if not select.select([pipe], [], [], seconds)[0]:
        raise TimeoutError(f"the command did not end within {seconds:g} s")
    return pipe.readline()


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.forked"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    atexit.register(server.wait)
    assert server.stdin is not None
    atexit.register(server.stdin.close)
    return server


def serve() -> None:
    replies = os.dup(1)
    while line := sys.stdin.readline():
        request = json.loads(line)
        command_line, *commands = PRELOADED[request["words"][0]]
        main = importlib.import_module(command_line).main
        for module in commands:
            importlib.import_module(module)
        pid = os.fork()
        if pid == 0:
            os.close(replies)
            _become(request, main)
        os.write(replies, b"%d\n" % pid)
        _, status = os.waitpid(pid, 0)
        os.write(replies, b"%d\n" % os.waitstatus_to_exitcode(status))


def _become(request: dict[str, object], main: Callable[[], NoReturn]) -> None:
    """Runs the command in this process, which ends with it."""
    words: list[str] = request["words"]  # type: ignore[assignment]
    code: object = 1
    try:
        for number, path, flags in (
            (0, os.devnull, os.O_RDONLY), (1, request["out"], os.O_WRONLY | os.O_CREAT),
            (2, request["err"], os.O_WRONLY | os.O_CREAT),
        ):  # fmt: skip
            opened = os.open(str(path), flags, 0o600)
            os.dup2(opened, number)
            os.close(opened)
        sys.stdin = open(0)  # noqa: SIM115 (this process's own)
        os.chdir(str(request["cwd"]))
        os.environ.clear()
        os.environ.update(request["env"])  # type: ignore[arg-type]
        sys.path.insert(0, str(request["cwd"]))  # as `python -m` does
        sys.argv = words
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        if isinstance(code, str):
            print(code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    serve()
