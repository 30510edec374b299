"""`bench train stream` as a person and a pipe use it: lines, words, exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.forked import run_command
from tests.schemas import validator
from tests.train.build import CRASH, conversation, dead_pid, end_job, make_job, make_rollout, trials, write

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "train", "stream"]


def stream(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run_command(["train", "stream", *words], cwd=cwd)


@pytest.fixture
def started() -> Iterator[Any]:
    """Starts the command and leaves it running; whatever is left at the end is ended."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*words: object, **options: Any) -> subprocess.Popen[bytes]:
        # unbuffered: `communicate` does not see what a buffered `readline` has read ahead
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0, **options}
        running.append(
            subprocess.Popen([*COMMAND, *map(str, words)], env={**os.environ, "PYTHONPATH": str(ROOT)}, **options)
        )
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def rows(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    for row in found:
        validator("rollout_stream.v1").validate(row)
    return found


def test_a_finished_job_prints_and_counts_its_rollouts(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"name": f"r__{number}"} for number in range(9)])
    done = stream(job)
    assert (done.returncode, done.stderr) == (0, "bench train stream: 9 rollouts streamed\n")
    assert [row["rollout"] for row in rows(done.stdout)] == [f"r__{number}" for number in range(9)]
    assert all(
        line == json.dumps(json.loads(line), separators=(",", ":"), ensure_ascii=False)
        for line in done.stdout.splitlines()[:1]
    )


def test_the_seeds_groups_and_its_last_status_line(tmp_path: Path) -> None:
    kinds = [[{"task": task}] * 3 for task in ("econ", "wyckoff", "write")]
    root = trials(
        tmp_path / "agent", *kinds, [{"task": "odd"}, {"task": "odd", "reward": None, "error": "x"}, {"task": "odd"}]
    )
    done = stream(
        root, "--group-size", 3, "--group-by", "model,task,agent", "--withheld", "withheld.jsonl", cwd=tmp_path
    )
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == (
        "bench train stream: 9 rollouts streamed; 1 group withheld (3 rollouts), written to withheld.jsonl"
    )
    assert [row["advantage"] for row in rows(done.stdout)] == [0.0] * 9
    withheld = rows((tmp_path / "withheld.jsonl").read_text())
    assert [(row["task"], row["withheld"]) for row in withheld] == [("odd", "unscored")] * 3


def test_without_a_withheld_file_the_groups_are_counted_anyway(tmp_path: Path) -> None:
    done = stream(make_job(tmp_path / "job"), "--group-size", 2)
    assert (done.returncode, done.stdout) == (0, "")
    assert (
        done.stderr
        == "bench train stream: 0 rollouts streamed; 1 group withheld (1 rollout); --withheld FILE says why\n"
    )


def test_a_retried_rollout_is_counted_apart(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"name": "t__1", **CRASH}, {"name": "t__2"}], retry={"max_retries": 1})
    done = stream(job, "--group-size", 1, "--withheld", tmp_path / "w.jsonl")
    assert done.stderr == "bench train stream: 1 rollout streamed; 1 rollout left out, replaced by a retry\n"
    assert [row["withheld"] for row in rows((tmp_path / "w.jsonl").read_text())] == ["retried"]


def test_exit_1_when_the_jobs_process_is_gone_after_every_finished_rollout(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{}, {}], state="running", pid=(pid := dead_pid()))
    done = stream(job)
    assert done.returncode == 1 and len(rows(done.stdout)) == 2
    lock = f"{job}/.evaluation.lock"
    assert done.stderr == f"bench train stream: the job's process {pid} is gone (lock {lock}); 2 rollouts streamed\n"


def test_exit_1_when_the_user_stopped_the_job(tmp_path: Path) -> None:
    done = stream(make_job(tmp_path / "job", [{}, {}], state="stopped"), "--group-size", 3)
    assert done.returncode == 1
    assert done.stderr == (
        "bench train stream: the job was stopped by its user; 0 rollouts streamed; 1 group withheld (2 rollouts); "
        "--withheld FILE says why\n"
    )


def test_exit_2_for_bad_input_in_one_sentence(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job")
    for words, sentence in (
        ([tmp_path / "no", "--no-follow"], f"no such job folder: {tmp_path}/no"),
        ([job, "--format", "csv"], "--format must be 'jsonl'"),
        ([job, "--group-size", 0], "--group-size must be at least 1"),
        ([job, "--group-by", "task,seed"], "--group-by: 'seed' is not a key"),
        ([job, "--withheld", tmp_path / "w"], "give --group-size too"),
        ([job, "--group-size", 2, "--withheld", tmp_path / "no/w"], "No such file or directory; give --withheld"),
        ([job, "--group-size", 2, "--withheld", job / "summary.json"], "is a file of the job that is read"),
        ([job / "summary.json"], "is a file; give a job folder"),
    ):
        done = stream(*words)
        assert (done.returncode, done.stdout) == (2, ""), words
        assert sentence in done.stderr and "Traceback" not in done.stderr and done.stderr.count("\n") == 1
    assert json.loads((job / "summary.json").read_text())["job_name"] == "job"


def test_exit_3_when_the_time_ran_out_after_every_finished_rollout(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{}, {}], state="running")
    done = stream(job, "--timeout", 0.3, "--poll-interval", 0.05)
    assert done.returncode == 3 and len(rows(done.stdout)) == 2
    state = f"running as process {os.getpid()}"
    assert done.stderr == f"bench train stream: job not finished after 0.3s ({state}); 2 rollouts streamed\n"


def test_reading_once_takes_what_there_is_of_a_running_job(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{}, {"finished": False}], state="running")
    done = stream(job, "--no-follow")
    assert (done.returncode, done.stderr) == (0, "bench train stream: 1 rollout streamed\n")


def test_following_prints_a_line_when_its_rollout_is_finished(tmp_path: Path, started: Any) -> None:
    job = tmp_path / "job"
    process = started(job, "--poll-interval", 0.05)
    assert b"waiting for the job: no such folder yet" in process.stderr.readline()
    make_job(job, [{"name": "first"}], state="running")
    assert json.loads(process.stdout.readline())["rollout"] == "first"
    make_rollout(job, name="second")
    assert json.loads(process.stdout.readline())["rollout"] == "second"
    end_job(job)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, b"") and error.endswith(b"bench train stream: 2 rollouts streamed\n")


def test_a_closed_pipe_ends_the_stream_quietly(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"calls": conversation(8)} for _ in range(40)])
    command = f"{sys.executable} -m train stream {job} | head -n 1 | wc -l; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert (done.stdout.split(), done.stderr) == (["1", "0"], "")


def test_a_closed_pipe_ends_an_idle_stream(tmp_path: Path, started: Any) -> None:
    process = started(make_job(tmp_path / "job", state="running"), "--poll-interval", 30)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 0 and process.stderr.read() == b""


def test_ctrl_c_ends_after_a_whole_line(tmp_path: Path, started: Any) -> None:
    process = started(make_job(tmp_path / "job", [{}, {}], state="running"))
    lines = process.stdout.readline() + process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130 and len(rows((lines + out).decode())) == 2
    assert error == b"bench train stream: interrupted; 2 rollouts streamed\n"


def test_a_full_disk_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, job], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False, cwd=ROOT
        )
    assert (done.returncode, done.stderr) == (2, "train: cannot write to standard output: No space left on device\n")
    done = stream(job, "--group-size", 2, "--withheld", "/dev/full")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr == (
        "train: cannot write /dev/full: No space left on device\n"
    )


def test_a_closed_standard_output_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job")
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m train stream {job} >&-"],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "train: standard output is closed; that is where the lines go\n")


def test_a_problem_of_a_rollout_is_reported_once_and_loses_no_other(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"name": "a__1"}, {"name": "b__2"}], state="running")
    (job / "a__1/result.json").write_text("{")
    done = stream(job, "--timeout", 0.3, "--poll-interval", 0.02)
    assert [row["rollout"] for row in rows(done.stdout)] == ["b__2"] and done.returncode == 3
    skipped = f"bench train stream: skipping {job}/a__1/result.json: not a readable JSON object"
    assert done.stderr.splitlines().count(skipped) == 1


def test_a_lock_of_another_host_counts_as_running(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", state="running")
    write(job / ".evaluation.lock", {"pid": dead_pid(), "host": f"not-{socket.gethostname()}"})
    assert stream(job, "--timeout", 0.2, "--poll-interval", 0.05).returncode == 3


@pytest.mark.parametrize("where", [".", "job", "./job", "job/", "../{here}/job"])
def test_the_folder_may_be_given_in_any_way(tmp_path: Path, where: str) -> None:
    job = make_job(tmp_path / "job", [{"name": "t__1", **CRASH}, {"name": "t__2"}], retry={"max_retries": 1})
    done = stream(where.format(here=tmp_path.name), cwd=job if where == "." else tmp_path)
    assert [(row["rollout_path"], row["replaces"], row["job"]) for row in rows(done.stdout)] == [
        ("t__1", None, "job"), ("t__2", "t__1", "job"),
    ]  # fmt: skip


def test_names_that_are_not_utf8_are_printed(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"name": "caf\udce9__1", "error": "bad \ud800"}, {"name": "ünï__2"}])
    done = stream(job)
    assert [row["rollout_path"] for row in rows(done.stdout)] == ["caf?__1", "ünï__2"] and done.returncode == 0


def test_bench_and_python_m_are_the_same_command(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job")
    command = [sys.executable, "-c", "import bench; bench.main()", "train", "stream", str(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert (done.stdout, done.stderr, done.returncode) == ((same := stream(job)).stdout, same.stderr, 0)
