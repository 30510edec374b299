"""The file of rows appears whole or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.build import conversation, make_job
from tests.train.conversion import options, run
from tests.train.tool_calls import tool_job
from train.errors import BadInput, NoSuchPath, NothingWritten, TrainError
from train.rows.convert import convert

ROOT = Path(__file__).parents[3]


def test_expected_rows_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    job, out = tool_job(tmp_path / "job"), tmp_path / "rows/o.jsonl"
    out.parent.mkdir()
    out.write_text("as it was")
    with pytest.raises(NothingWritten, match="row count 1 != expected 2"):
        convert(job, out, options(expected_rows=2))
    assert out.read_text() == "as it was"
    assert [path.name for path in out.parent.iterdir()] == ["o.jsonl"]
    assert convert(job, out, options(expected_rows=1)).rows == 1


def test_without_rows_no_file_is_written_and_the_exit_code_is_1(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"reward": None, "error": "no"}])
    result = run(job, "-o", tmp_path / "rows/o.jsonl")
    assert result.exit_code == 1
    assert "left out 1 rollout(s): ended in an error, without a reward" in result.stderr
    assert list((tmp_path / "rows").iterdir()) == []


def test_the_output_must_not_be_the_input(tmp_path: Path) -> None:
    job = tool_job(tmp_path / "job")
    journal = next(job.glob("*/trajectory/llm_trajectory.jsonl"))
    before = journal.read_bytes()
    with pytest.raises(BadInput, match="--out must differ from the source JSONL path"):
        convert(journal, journal, options())
    assert journal.read_bytes() == before


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """The limit on a file's size stands in for a full disk: the write fails in the same place."""
    job = make_job(tmp_path / "job", [{} for _ in range(40)])
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000));"
        "sys.argv = ['train', 'convert', 'job', '-o', 'rows/o.jsonl']; from train.__main__ import main; main()"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert answer.returncode == 2
    assert answer.stderr.splitlines()[-1].startswith("train: cannot write rows/o.jsonl")
    assert list((tmp_path / "rows").iterdir()) == []
    assert job.is_dir()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_leave_no_partial_file(tmp_path: Path, number: signal.Signals, code: int) -> None:
    job = make_job(tmp_path / "job", [{}])
    journal = next(job.glob("*/trajectory/llm_trajectory.jsonl"))
    journal.unlink()
    os.mkfifo(journal)  # is_file() is false for a pipe, so stand a slow log behind a link
    slow = journal.rename(tmp_path / "pipe")
    journal.write_bytes(json.dumps(conversation(1)[0]).encode() + b"\n")
    process = subprocess.Popen(
        [sys.executable, "-c", f"""
import sys, train.rollouts.rollouts as rollouts
read = rollouts.Rollout.calls
def slow(self):
    print("reading", flush=True)
    open({str(slow)!r}).read()
    yield from read(self)
rollouts.Rollout.calls = slow
sys.argv = ["train", "convert", "job", "-o", "rows/o.jsonl"]
from train.__main__ import main
main()
"""],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # under nohup SIGHUP is ignored
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "reading\n"
    process.send_signal(number)
    assert process.wait(timeout=60) == code
    assert list((tmp_path / "rows").iterdir()) == []


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_rollouts(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        job = make_job(tmp_path / f"job-{count}", [{"calls": conversation(4)} for _ in range(count)])
        script = (
            "import resource, sys; from train.cli import app;"
            f"app(['convert', {str(job)!r}, '-o', {str(tmp_path / 'o.jsonl')!r}], standalone_mode=False);"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
        )
        answer = subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        return int(answer.stderr.splitlines()[-1])

    assert peak(400) < peak(4) + 8_000, "kilobytes"


def test_a_write_that_fails_is_a_train_error(tmp_path: Path) -> None:
    job = tool_job(tmp_path / "job")
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match="cannot write"):
        convert(job, tmp_path / "file/o.jsonl", options())
    with pytest.raises(NoSuchPath):
        convert(tmp_path / "nowhere", tmp_path / "o.jsonl", options())
