"""How a job stands, from its lock and its summary."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.train.build import dead_pid, end_job, make_job, write
from train.rollouts.job_state import job_state


def test_a_jobs_state_follows_its_lock_and_its_summary(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [], state="running")
    assert job_state(job).kind == "running"
    write(job / ".evaluation.lock", {"pid": dead_pid(), "host": socket.gethostname()})
    assert job_state(job).kind == "stopped" and "is gone (lock" in job_state(job).detail
    write(job / ".evaluation.lock", {"pid": dead_pid(), "host": "another-host"})
    assert job_state(job).kind == "running"
    (job / ".evaluation.lock").write_text('{"pi')
    assert job_state(job).kind == "running"
    end_job(job)
    assert job_state(job).kind == "finished"
    end_job(job, stopped=True)
    assert job_state(job).kind == "stopped"
    (job / "summary.json").unlink()
    assert job_state(job).kind == "waiting" and job_state(job, had_lock=True).kind == "stopped"
    assert job_state(tmp_path / "nowhere").kind == "waiting"


def test_a_later_process_of_the_same_number_is_not_the_jobs(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [], state="running")
    content = {"pid": os.getpid(), "host": socket.gethostname()}
    ticks = Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[19]
    write(job / ".evaluation.lock", {**content, "started": ticks})
    assert job_state(job).kind == "running"
    write(job / ".evaluation.lock", {**content, "started": "1"})
    assert job_state(job).kind == "stopped"


def test_a_process_that_died_and_was_not_collected_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as zombie:
        assert zombie.stdout is not None and zombie.stdout.read() == b""
        job = make_job(tmp_path / "job", [], state="running", pid=zombie.pid)
        deadline = time.monotonic() + 60
        while job_state(job).kind != "stopped" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert job_state(job).kind == "stopped"
