"""`bench train run sft`, with a double of `uv`: Prime-RL itself needs a GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.forked import run_command
from tests.train.build import make_job
from tests.train.tool_calls import tool_job, tool_rollout

ROOT = Path(__file__).parents[3]

#: Stands where `uv` would be found: writes down how it was called, prints two lines, ends with FAKE_UV_CODE.
FAKE_UV = """#!/bin/sh
printf '%s\\n' "$PWD" "$@" > "$FAKE_UV_CALL"
echo "step 1 loss 2.5"
echo "warning: slow" >&2
[ -z "$FAKE_UV_SLEEP" ] || exec sleep "$FAKE_UV_SLEEP"
exit "${FAKE_UV_CODE:-0}"
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a job, a checkout that looks like Prime-RL's, and FakeUv first on the PATH."""
    (tmp_path / "bin").mkdir()
    uv = tmp_path / "bin/uv"
    uv.write_text(FAKE_UV)
    uv.chmod(0o755)
    (tmp_path / "prime-rl/.git").mkdir(parents=True)
    (tmp_path / "prime-rl/.git/HEAD").write_text("559b447" + "0" * 33 + "\n")
    (tmp_path / "prime-rl/pyproject.toml").write_text("[project]\nname = 'prime-rl'\n")
    tool_job(tmp_path / "job")
    return tmp_path


def environment(place: Path, **more: str) -> dict[str, str]:
    path = f"{place / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "FAKE_UV_CALL": str(place / "call"), **more}


def run(place: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return run_command(["train", "run", "sft", *arguments], cwd=place, env=environment(place, **more))


ALL = ("job", "--prime-rl-dir", "prime-rl", "--model", "Qwen/Qwen2.5-0.5B-Instruct")


def test_it_writes_rows_and_a_configuration_and_starts_the_trainer_in_its_checkout(place: Path) -> None:
    answer = run(place, *ALL, "--max-steps", "3", "--lr", "1e-5", "--seq-len", "4096")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines() == ["step 1 loss 2.5", "warning: slow"]
    work = place / "train-runs/sft"
    lines = (place / "call").read_text().splitlines()
    assert lines == [str(place / "prime-rl"), "run", "sft", "@", str(work / "sft.toml")]
    assert tomllib.loads((work / "sft.toml").read_text()) == {
        "max_steps": 3,
        "output_dir": str(work / "prime-rl"),
        "model": {"name": "Qwen/Qwen2.5-0.5B-Instruct"},
        "data": {"name": str(work / "data"), "seq_len": 4096},
        "optim": {"lr": 1e-5},
    }
    (row,) = [json.loads(line) for line in (work / "data/train.jsonl").read_text().splitlines()]
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert (work / "prime-rl/sft.log").read_text() == "step 1 loss 2.5\nwarning: slow\n"
    result = json.loads((work / "train-run.json").read_text())
    assert (result["status"], result["exit_code"], result["rows"]) == ("finished", 0, 1)
    assert result["commit"].startswith("559b447")
    assert (work / "command.txt").read_text() == f"cd {place}/prime-rl && uv run sft @ {work}/sft.toml\n"


def test_a_dry_run_starts_nothing_and_prints_the_command(place: Path) -> None:
    answer = run(place, *ALL, "--dry-run")
    assert answer.returncode == 0
    assert answer.stdout == (place / "train-runs/sft/command.txt").read_text()
    assert not (place / "call").exists()
    assert (place / "train-runs/sft/data/train.jsonl").is_file()


def test_the_trainers_exit_code_is_passed_on(place: Path) -> None:
    answer = run(place, *ALL, FAKE_UV_CODE="7")
    assert answer.returncode == 7
    manifest = place / "train-runs/sft/train-run.json"
    assert answer.stderr.splitlines()[-1] == f"Prime-RL SFT failed with exit code 7; see {manifest}"
    assert json.loads(manifest.read_text())["status"] == "failed"


def test_options_override_the_users_configuration(place: Path) -> None:
    (place / "mine.toml").write_text('max_steps = 9\n[model]\nname = "a"\n[ckpt]\ninterval = 5\n[[x]]\ny = [1, 2]\n')
    answer = run(
        place, "job", "--prime-rl-dir", "prime-rl", "--config", "mine.toml", "--max-steps", "2",
        "--override", "ckpt.interval=50", "--override", "renderer.name=qwen", "--dry-run",
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    found = tomllib.loads((place / "train-runs/sft/sft.toml").read_text())
    assert (found["max_steps"], found["model"], found["ckpt"]) == (2, {"name": "a"}, {"interval": 50})
    assert (found["renderer"], found["x"]) == ({"name": "qwen"}, [{"y": [1, 2]}])


def test_existing_rows_are_copied_to_a_folder_of_their_own(place: Path) -> None:
    (place / "mine.jsonl").write_text('{"messages": []}\n')
    answer = run(place, "--data", "mine.jsonl", "--prime-rl-dir", "prime-rl", "--model", "m", "--dry-run")
    assert answer.returncode == 0, answer.stderr
    folder = Path(tomllib.loads((place / "train-runs/sft/sft.toml").read_text())["data"]["name"])
    assert [path.name for path in folder.iterdir()] == ["train.jsonl"]


def test_no_secret_is_written(place: Path) -> None:
    run(place, *ALL, "--dry-run", WANDB_API_KEY="very-secret-value", HF_TOKEN="hf_very_secret")
    work = place / "train-runs/sft"
    texts = "".join(path.read_text() for path in work.iterdir() if path.is_file())
    assert "very-secret-value" not in texts and "hf_very_secret" not in texts
    assert {"WANDB_API_KEY", "HF_TOKEN"} <= set(json.loads((work / "train-run.json").read_text())["env_names"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["job", "--prime-rl-dir", "nowhere", "--model", "m"], "No such path: nowhere"),
        (["job", "--prime-rl-dir", "job", "--model", "m"], "job is not a checkout of Prime-RL"),
        (["job", "--prime-rl-dir", "prime-rl"], "no model is named"),
        (["--prime-rl-dir", "prime-rl", "--model", "m"], "give the job folder to train on, or rows with --data"),
        ([*ALL, "--override", "lr"], "--override must be NAME=VALUE"),
        ([*ALL, "--config", "job/summary.json"], "is not valid TOML"),
        ([*ALL, "--data", "job"], "not both"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(place: Path, arguments: list[str], sentence: str) -> None:
    answer = run(place, *arguments)
    assert answer.returncode == 2
    assert sentence in answer.stderr.splitlines()[-1]
    assert not (place / "call").exists()


def test_without_rows_nothing_is_launched(place: Path) -> None:
    make_job(place / "empty", [{"calls": tool_rollout(), "reward": 0.0}])
    answer = run(place, "empty", *ALL[1:], "--min-reward", "1")
    assert answer.returncode == 1
    assert "left out 1 rollout(s): reward below --min-reward, or none" in answer.stderr
    assert not (place / "call").exists()


def test_a_missing_uv_is_named(place: Path) -> None:
    (place / "bin/uv").unlink()
    answer = run(place, *ALL, PATH="/nonexistent")
    assert answer.returncode == 2
    assert "uv is not installed" in answer.stderr


def test_ctrl_c_reaches_the_trainer_and_is_recorded(place: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "train", "run", "sft", *ALL],
        cwd=place, env=environment(place, FAKE_UV_SLEEP="30"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "step 1 loss 2.5\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    result = json.loads((place / "train-runs/sft/train-run.json").read_text())
    assert result["status"] == "failed"


@pytest.mark.parametrize(
    "value", ["'quoted \\ \"é\"'", "[1, 2.5, true]", "[{h = {i = false}}, {j = []}]", "1e-05", "1979-05-27T07:32:00Z"]
)
def test_a_configurations_values_are_written_as_they_were_read(place: Path, value: str) -> None:
    (place / "config.toml").write_text(f"[a.'b.c']\nd = {value}\n")
    answer = run(place, *ALL, "--config", "config.toml", "--dry-run")
    assert answer.returncode == 0, answer.stderr
    written = tomllib.loads((place / "train-runs/sft/sft.toml").read_text())
    assert written["a"]["b.c"]["d"] == tomllib.loads(f"d = {value}")["d"]


def test_a_value_is_not_a_table(place: Path) -> None:
    (place / "config.toml").write_text("optim = 1\n")
    answer = run(place, *ALL, "--config", "config.toml", "--override", "optim.lr=1", "--dry-run")
    assert (answer.returncode, "optim is a value already, not a table" in answer.stderr) == (2, True)
