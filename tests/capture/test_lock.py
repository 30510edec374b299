"""The lock of a job folder: one holder at a time, whoever began writing it and however its last holder ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from capture.errors import LockError
from capture.lock import TORN_IS_STALE_AFTER, LockHeld, holder, hostname, locked, process_start

HERE = hostname()


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / ".evaluation.lock"


def test_a_lock_names_its_process_and_is_gone_after_the_block(lock: Path) -> None:
    with locked(lock):
        assert json.loads(lock.read_text()) == {"pid": os.getpid(), "host": HERE, "started": process_start(os.getpid())}
        assert [path.name for path in lock.parent.iterdir()] == [lock.name]
        with pytest.raises(LockHeld, match=f"process {os.getpid()}"), locked(lock):
            pass
        assert lock.exists()
    assert holder(lock) is None


@pytest.mark.parametrize(
    "content",
    ["", " ", "\0" * 40, '{"pi', '{"pid": 12', "[]", "{}", '{"pid": null}', '{"pid": true}', '{"pid": -3}',
     '{"pid": "7"}', '{"pid": 999999999, "host": "elsewhere"}', '{"pid": 999999999}'],
)  # fmt: skip
def test_a_lock_whose_process_cannot_be_checked_counts_as_live(lock: Path, content: str) -> None:
    """Another program creates its lock first and writes it then: in between it is empty."""
    lock.write_text(content)
    with pytest.raises(LockHeld), locked(lock):
        pass
    assert lock.read_text() == content


@pytest.mark.parametrize(
    "content",
    [
        {"pid": 999999999, "host": HERE},
        {"pid": 10**30, "host": HERE},
        {"pid": os.getpid(), "host": HERE, "started": "1"},
        {"pid": os.getpid(), "host": HERE, "started": 1},
    ],
)
def test_the_lock_of_a_process_that_is_gone_is_replaced(lock: Path, content: dict[str, object]) -> None:
    lock.write_text(json.dumps(content))
    with locked(lock):
        assert json.loads(lock.read_text())["started"] == process_start(os.getpid())


def test_a_torn_lock_is_replaced_when_it_is_old(lock: Path) -> None:
    lock.write_text('{"pi')
    before = time.time() - TORN_IS_STALE_AFTER - 1
    os.utime(lock, (before, before))
    with locked(lock):
        pass


RACER = """
import os, sys
from pathlib import Path
from capture.lock import LockHeld, locked
lock, alone = (Path(path) for path in sys.argv[1:])
sys.stdin.readline()
try:
    with locked(lock):
        os.close(os.open(alone, os.O_CREAT | os.O_EXCL))
        sys.stdout.write("held\\n"); sys.stdout.flush()
        sys.stdin.readline()
except LockHeld:
    sys.stdout.write("refused\\n"); sys.stdout.flush()
"""


@pytest.mark.parametrize("left", [None, json.dumps({"pid": 999999999, "host": HERE})])
@pytest.mark.slow
def test_of_many_processes_one_gets_the_lock(lock: Path, left: str | None, tmp_path: Path) -> None:
    for _ in range(5):
        lock.unlink(missing_ok=True)
        (tmp_path / "alone").unlink(missing_ok=True)
        if left is not None:
            lock.write_text(left)
        racers = [
            subprocess.Popen(
                [sys.executable, "-c", RACER, str(lock), str(tmp_path / "alone")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for _ in range(6)
        ]  # fmt: skip
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        lines = [racer.stdout.readline() for racer in racers if racer.stdout is not None]
        for racer in racers:
            racer.communicate("done\n")
        assert sorted(lines) == ["held\n", *["refused\n"] * 5]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LockError, match="cannot be written: No such file"), locked(tmp_path / "no" / "lock"):
        pass
