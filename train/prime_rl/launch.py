"""`bench train run sft`: rows, a configuration and a launch of Prime-RL's SFT trainer in the user's own checkout.

Nothing of Prime-RL is imported or needed here. It wants Python 3.12 and a GPU, and is started with `uv` in its folder.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from capture.journal.journal import write_atomic, write_json
from train.errors import BadInput, NoSuchPath, TrainError
from train.prime_rl.toml import dumps, put
from train.rows.convert import Converted, Options, convert

ROWS = "data/train.jsonl"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be trained, where. `source` is a job folder to convert, or `data` rows that are there already.

    `config` is a TOML file of the user's; what is given here goes over it. `overrides` are `a.b=value`, value in TOML.
    """

    checkout: Path
    work_dir: Path
    source: Path | None = None
    data: Path | None = None
    config: Path | None = None
    output_dir: Path | None = None
    model: str | None = None
    max_steps: int | None = None
    seq_len: int | None = None
    batch_size: int | None = None
    micro_batch_size: int | None = None
    lr: float | None = None
    overrides: Sequence[str] = ()
    uv_no_sync: bool = False
    options: Options = field(default_factory=Options)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was written; `command` is what is run, in `checkout`."""

    command: list[str]
    config: Path
    manifest: Path
    told: dict[str, Any]
    converted: Converted | None = None


def prepare(plan: Plan, on_warning: Callable[[str], None] | None = None) -> Prepared:
    """Writes rows, `sft.toml`, `command.txt` and `train-run.json` to `work_dir`. Raises `TrainError`."""
    _check(plan)
    work = plan.work_dir.resolve()
    config = _read_config(plan)
    converted = None
    if plan.source is not None:
        converted = convert(plan.source, work / ROWS, plan.options, on_warning)
    data = (work / ROWS).parent if plan.source is not None else plan.data
    if data is not None and data.is_file():
        data = _as_folder(data, (work / ROWS).parent)
    output = (plan.output_dir or work / "prime-rl").resolve()
    settings = {
        "model.name": plan.model,
        "data.name": None if data is None else str(data.resolve()),
        "data.seq_len": plan.seq_len,
        "data.batch_size": plan.batch_size,
        "data.micro_batch_size": plan.micro_batch_size,
        "optim.lr": plan.lr,
        "max_steps": plan.max_steps,
        "output_dir": str(output),
    }
    for name, value in settings.items():
        if value is not None:
            put(config, name, value)
    for override in plan.overrides:
        put(config, *_override(override))
    model = config.get("model")
    if not isinstance(model, dict) or not model.get("name"):
        raise BadInput("no model is named: give --model, or --config with [model] name")
    toml = work / "sft.toml"
    write_atomic(toml, dumps(config).encode())
    command = ["uv", "run", *(["--no-sync"] if plan.uv_no_sync else []), "sft", "@", str(toml)]
    write_atomic(
        work / "command.txt", f"cd {shlex.quote(str(plan.checkout.resolve()))} && {shlex.join(command)}\n".encode()
    )
    told: dict[str, Any] = {
        "schema_version": 1,
        "backend": "prime-rl",
        "status": "prepared",
        "command": command,
        "checkout": str(plan.checkout.resolve()),
        "commit": _commit(plan.checkout),
        "config": str(toml),
        "data": config.get("data", {}).get("name"),
        "output_dir": str(output),
        "log": str(output / "sft.log"),
        "rows": None if converted is None else converted.rows,
        "conversion": None if converted is None else converted.manifest,
        "env_names": sorted(name for name in os.environ if name.startswith(("HF_", "WANDB_", "CUDA_", "UV_", "NCCL_"))),
    }
    manifest = work / "train-run.json"
    write_json(manifest, told)
    return Prepared(command, toml, manifest, told, converted)


def launch(prepared: Prepared, say: Callable[[str], None]) -> int:
    """Runs the trainer in its checkout, passes each line of its output to `say` and to its log; returns its exit code.

    Ctrl-C reaches the trainer, which is then waited for. Raises `TrainError` where there is no `uv`.
    """
    if shutil.which("uv") is None:
        raise TrainError("uv is not installed, and Prime-RL is run with it: see its README, then run it again")
    log = Path(prepared.told["log"])
    log.parent.mkdir(parents=True, exist_ok=True)
    told = prepared.told | {"status": "running", "started_at": _now()}
    write_json(prepared.manifest, told)
    with log.open("ab", buffering=0) as copy:
        child = subprocess.Popen(
            prepared.command,
            cwd=told["checkout"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert child.stdout is not None
        try:
            for line in child.stdout:
                copy.write(line)
                say(line.decode("utf-8", "replace").rstrip("\n"))
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            try:
                for line in child.stdout:
                    copy.write(line)
            except KeyboardInterrupt:  # asked twice
                child.terminate()
        finally:
            code = child.wait()
            ended = {"status": "finished" if code == 0 else "failed", "exit_code": code, "ended_at": _now()}
            write_json(prepared.manifest, told | ended)
    return code if code >= 0 else 128 - code


def _check(plan: Plan) -> None:
    if not plan.checkout.is_dir():
        raise NoSuchPath(f"No such path: {plan.checkout}")
    if not (plan.checkout / "pyproject.toml").is_file():
        raise BadInput(f"{plan.checkout} is no checkout of Prime-RL: it has no pyproject.toml; give --prime-rl-dir")
    if plan.source is not None and plan.data is not None:
        raise BadInput("give the job folder to train on or rows with --data, not both")
    if plan.source is None and plan.data is None and plan.config is None:
        raise BadInput("give the job folder to train on, or rows with --data")
    if plan.data is not None and not plan.data.exists():
        raise NoSuchPath(f"No such path: {plan.data}")


def _as_folder(rows: Path, folder: Path) -> Path:
    """A folder that holds only these rows: Prime-RL gives `data.name` to `load_dataset`, which wants a folder."""
    if rows.parent.resolve() == folder.resolve():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for before in folder.glob("train.*"):
        before.unlink()
    shutil.copyfile(rows, folder / f"train{rows.suffix}")
    return folder


def _read_config(plan: Plan) -> dict[str, Any]:
    if plan.config is None:
        return {}
    try:
        return tomllib.loads(plan.config.read_text(encoding="utf-8"))
    except OSError as error:
        raise NoSuchPath(f"No such path: {plan.config}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{plan.config} is no TOML: {error}") from error


def _override(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip(".- "):
        raise BadInput(f"--override must be NAME=VALUE, as optim.lr=1e-5, not '{text}'")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value


def _commit(checkout: Path) -> str | None:
    """The checkout's commit, without asking git: a loose or packed reference, or a detached head."""
    try:
        head = (checkout / ".git/HEAD").read_text(encoding="utf-8").strip()
        return (checkout / ".git" / head[5:]).read_text(encoding="utf-8").strip() if head.startswith("ref: ") else head
    except (OSError, UnicodeDecodeError):
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
