"""The error edge of `bench` and of `python -m proxy`, `-m sandbox`, `-m train`: errors become a sentence and a code.

Loads nothing but the standard library, so that Ctrl-C is handled before anything slow is loaded.
"""

from __future__ import annotations

import errno
import os
import signal
import sys

from capture.command.terminal import echo
from capture.errors import BenchError

TYPE_CHECKING = False  # typing takes milliseconds in which Ctrl-C is not handled yet
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn

#: What the machine refuses, as opposed to a path that our own code got wrong.
_REFUSED = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE,
     errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR}
)  # fmt: skip

#: Packages that are ours: an import that fails there is a bug.
_OURS = frozenset({"__main__", "bench", "capture", "proxy", "sandbox", "train"})


def run(program: str, load: Callable[[], Callable[..., object]]) -> NoReturn:
    """Loads a command line, runs it under the name `program`, and exits.

    Exit codes: the command's own; an error's `exit_code` (2 unless it says otherwise) for what cannot be used; 70 for a
    bug of ours; 130 for Ctrl-C, at any time.
    """
    _exit_on_ctrl_c()
    name = program.removeprefix("python -m ")
    code: int | str | None = 0
    try:
        load()(prog_name=program)
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        code = 130
    except BenchError as error:
        code = _report(f"{name}: {error}", error.exit_code)
    except Exception as error:
        if os.environ.get("BENCH_DEBUG"):
            raise
        if isinstance(error, OSError) and error.errno in _REFUSED and error.filename is not None:
            code = _report(f"{name}: {os.fsdecode(error.filename)}: {error.strerror}", 2)
        elif (package := _broken_package(error)) is not None:
            code = _report(
                f"{name}: the package {package}, which this command needs, is missing or broken "
                f"({type(error).__name__}: {error}): install benchflow-sidecar again (pip install --force-reinstall)",
                2,
            )
        else:
            code = _report(
                f"{name}: this should not have happened ({type(error).__name__}: {error}). "
                "Run it again with BENCH_DEBUG=1 and report what it prints.",
                70,
            )
    _exit_on_ctrl_c()  # also while Python shuts down
    sys.exit(code if _flushed() else 1)


def _broken_package(error: Exception) -> str | None:
    """The package of others whose import failed; None for a bug of ours. Broken ones raise whatever they like."""
    trace, package = error.__traceback__, None
    while trace is not None:
        frame = trace.tb_frame
        module = str(frame.f_globals.get("__name__")).partition(".")[0]
        code = frame.f_code
        if code.co_name == "<module>" and not code.co_filename.startswith("<") and module not in _OURS:
            package = module
        trace = trace.tb_next
    if package is None and isinstance(error, ImportError) and error.name is not None:
        package = error.name.partition(".")[0]
    return None if package in _OURS else package


def raise_on_ctrl_c() -> None:
    """From here on Ctrl-C raises `KeyboardInterrupt`: there may be something to tidy up. Nothing outside of `run`."""
    if signal.getsignal(signal.SIGINT) is _exit_now:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit_on_ctrl_c() -> None:
    """Nothing is open while modules load, and an exception could vanish in one of the callbacks of `importlib`."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell's background job ignores Ctrl-C
        signal.signal(signal.SIGINT, _exit_now)


def _exit_now(_number: int, _frame: FrameType | None) -> None:
    os._exit(130)


def _report(sentence: str, code: int) -> int:
    if sys.stderr is not None:
        echo(sentence, err=True)
    return code


def _flushed() -> bool:
    """Writes out what is left; a reader that is gone must not make Python print "Exception ignored"."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True
