"""`bench train stream`: one JSON line a finished rollout on standard output, the state of things on standard error."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, cast

import orjson
import typer

from capture.command.terminal import echo
from train.errors import BadInput, TrainError
from train.groups.advantage import EPS, AdvantageKind
from train.groups.groups import DEFAULT_BY, GroupOptions, parse_group_by
from train.rollouts.purpose import HELP
from train.stream.records import SCHEMA_VERSION, Encode
from train.stream.stream import Stream, StreamOptions


def stream_command(
    path: Annotated[Path, typer.Argument(help="A job folder, or the folder that holds the repeats of a --trials run.")],
    format: Annotated[str, typer.Option(help="Output format; jsonl is the only choice.")] = "jsonl",
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Follow until the job ends, or read once and stop.")
    ] = True,
    poll_interval: Annotated[float, typer.Option(help="Seconds between two checks of the job.")] = 1.0,
    timeout: Annotated[float | None, typer.Option(help="Stop following after this many seconds.")] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Hold rollouts until this many of a group have finished, and add advantages.")
    ] = None,
    group_by: Annotated[
        str, typer.Option(help="What makes a group: task, agent, model, task_digest, job, in any order.")
    ] = ",".join(DEFAULT_BY),
    withheld: Annotated[
        Path | None, typer.Option(help="File for the lines of withheld groups, each with the reason.")
    ] = None,
    purpose: Annotated[str, typer.Option(help=HELP)] = "train",
    advantage: Annotated[
        str,
        typer.Option(
            help="grpo: (reward - mean) / (std + eps); dr-grpo: reward - mean; rloo: reward - mean of the others."
        ),
    ] = "grpo",
    std_ddof: Annotated[int, typer.Option(help="1: the sample's standard deviation; 0: the population's.")] = 1,
    eps: Annotated[float, typer.Option(help="Added to the standard deviation.")] = EPS,
) -> None:
    """Print one JSON line per finished rollout, and keep watching until the job ends.

    Exit codes: 0 the job finished; 1 it was stopped or its process died first; 2 bad input; 3 --timeout ran out.
    Whatever the code, every finished rollout was printed before.
    """
    if format != "jsonl":
        raise BadInput("--format must be 'jsonl'")
    if withheld is not None and group_size is None:
        raise BadInput("--withheld writes groups that are not whole; give --group-size too")
    if sys.stdout is None:
        raise BadInput("standard output is closed; that is where the lines go")
    groups = GroupOptions(parse_group_by(group_by), group_size, cast(AdvantageKind, advantage), std_ddof, eps)
    options = StreamOptions(follow, poll_interval, timeout, groups, purpose)
    options.check()
    with _withheld_file(withheld, path) as file:
        stream = Stream(
            path,
            options,
            Encode(text=True),
            on_withheld=(lambda rows: _write_rows(file, rows, withheld)) if file else None,
            on_warning=say,
            on_status=_once(say),
            wait=_wait,
        )
        raise typer.Exit(_run(stream, withheld))


def _run(stream: Stream, withheld: Path | None) -> int:
    written = 0
    try:
        for row in stream:
            line = orjson.dumps(row) + b"\n"
            with _no_signals():  # a line is whole and counted, or neither
                _write(line)
                written += 1
    except BrokenPipeError:  # the reader has what it wanted
        _abandon_stdout()
        return 0
    except KeyboardInterrupt:
        stream.counts.streamed = written
        say(f"interrupted; {stream.streamed(withheld)}")
        return 130
    say(stream.summary(withheld))
    try:
        stream.raise_end()
    except TrainError as error:
        return error.exit_code
    return 0


def say(text: str) -> None:
    echo(f"bench train stream: {text}", err=True)


def _once(say: Any) -> Any:
    printed: set[str] = set()

    def say_once(text: str) -> None:
        if text not in printed:
            printed.add(text)
            say(text)

    return say_once


def _write(line: bytes) -> None:
    """Raises `BrokenPipeError`, and `BadInput` for a full disk."""
    try:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _abandon_stdout()
        raise BadInput(f"cannot write to standard output: {error.strerror}") from error


@contextmanager
def _no_signals() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(seconds: float) -> bool:
    """Pauses; raises `BrokenPipeError` at once when nobody reads standard output any more."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # a test's stand-in for standard output has none
        output = -1
    watch = select.poll()
    watch.register(output, 0) if output >= 0 else None
    if any(event & (select.POLLERR | select.POLLHUP) for _, event in watch.poll(seconds * 1000)):
        raise BrokenPipeError(errno.EPIPE, "standard output was closed")
    return False


def _abandon_stdout() -> None:
    """Python flushes standard output when it exits; that must not raise a second time."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError):
        pass


@contextmanager
def _withheld_file(path: Path | None, job: Path) -> Iterator[IO[bytes] | None]:
    """The file for withheld lines, empty at first. Raises `BadInput` where it cannot be written or is the job's."""
    if path is None:
        yield None
        return
    try:
        if job.is_dir() and path.exists() and path.resolve().is_relative_to(job.resolve()) and not _is_ours(path):
            raise BadInput(f"--withheld {path} is a file of the job that is read; give another name")
        with path.open("wb", buffering=0) as file:  # unbuffered: a full disk is noticed at once
            yield file
    except OSError as error:
        if isinstance(error, BrokenPipeError) or error.filename is None:
            raise
        raise BadInput(f"cannot write {path}: {error.strerror}; give --withheld a file that can be written") from error


def _is_ours(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(200)
    return not start or SCHEMA_VERSION.encode() in start


def _write_rows(file: IO[bytes], rows: list[dict[str, Any]], path: Path | None) -> None:
    with _no_signals():
        try:
            data = b"".join(orjson.dumps(row) + b"\n" for row in rows)
            while data:
                data = data[file.write(data) :]
        except OSError as error:
            raise BadInput(f"cannot write {path}: {error.strerror}") from error
