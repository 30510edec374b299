"""`bench train run sft`: rows, a configuration and a launch of Prime-RL's SFT trainer in the user's own checkout.

Nothing of Prime-RL is imported or needed here. It requires Python 3.12 and a GPU, and is started with `uv` in its
folder.
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
from typing import Any, Final

from capture.journal.files import write_atomic, write_json
from train.errors import BadInput, NoSuchPath, TrainError
from train.rows.convert import ConvertOptions, ConvertResult, convert

ROWS: Final = "data/train.jsonl"


@dataclass(frozen=True, slots=True)
class SftOptions:
    """What is trained, and where. `source` is a job folder to convert, `data` are rows that exist already.

    `config` is a TOML file of the user's; the fields here override it, and `overrides` (`a.b=value`, the value in TOML)
    override both.
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
    convert: ConvertOptions = field(default_factory=ConvertOptions)


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """What was written. `command` is run in the checkout; `record` is the content of `manifest`."""

    command: list[str]
    config: Path
    manifest: Path
    record: dict[str, Any]
    converted: ConvertResult | None = None


def prepare(options: SftOptions, on_warning: Callable[[str], None] | None = None) -> PreparedRun:
    """Writes rows, `sft.toml`, `command.txt` and `train-run.json` to `work_dir`. Raises `TrainError`."""
    import tomli_w

    _check(options)
    work = options.work_dir.resolve()
    config = _read_config(options.config)
    converted = None
    if options.source is not None:
        converted = convert(options.source, work / ROWS, options.convert, on_warning)
    output = (options.output_dir or work / "prime-rl").resolve()
    settings = {
        "model.name": options.model,
        "data.name": _data_folder(options, (work / ROWS).parent),
        "data.seq_len": options.seq_len,
        "data.batch_size": options.batch_size,
        "data.micro_batch_size": options.micro_batch_size,
        "optim.lr": options.lr,
        "max_steps": options.max_steps,
        "output_dir": str(output),
    }
    for name, value in settings.items():
        if value is not None:
            _set(config, name, value)
    for override in options.overrides:
        _set(config, *_parse_override(override))
    model = config.get("model")
    if not isinstance(model, dict) or not model.get("name"):
        raise BadInput("no model is named: give --model, or --config with [model] name")
    toml = work / "sft.toml"
    write_atomic(toml, tomli_w.dumps(config).encode())
    command = ["uv", "run", *(["--no-sync"] if options.uv_no_sync else []), "sft", "@", str(toml)]
    checkout = options.checkout.resolve()
    write_atomic(work / "command.txt", f"cd {shlex.quote(str(checkout))} && {shlex.join(command)}\n".encode())
    record: dict[str, Any] = {
        "schema_version": 1,
        "backend": "prime-rl",
        "status": "prepared",
        "command": command,
        "checkout": str(checkout),
        "commit": _commit(checkout),
        "config": str(toml),
        "data": config.get("data", {}).get("name"),
        "output_dir": str(output),
        "log": str(output / "sft.log"),
        "rows": None if converted is None else converted.rows,
        "conversion": None if converted is None else converted.manifest,
        "env_names": sorted(name for name in os.environ if name.startswith(("HF_", "WANDB_", "CUDA_", "UV_", "NCCL_"))),
    }
    manifest = work / "train-run.json"
    write_json(manifest, record)
    return PreparedRun(command, toml, manifest, record, converted)


def launch(prepared: PreparedRun, print_line: Callable[[str], None]) -> int:
    """Runs the trainer in its checkout, passes each line of its output to `print_line` and to its log.

    Returns the trainer's exit code, 128 + N where signal N ended it. Ctrl-C reaches the trainer, which is then waited
    for. Raises `TrainError` where `uv` is not installed.
    """
    if shutil.which("uv") is None:
        raise TrainError("uv is not installed, and Prime-RL needs it: install uv, then run this again")
    log = Path(prepared.record["log"])
    log.parent.mkdir(parents=True, exist_ok=True)
    record = prepared.record | {"status": "running", "started_at": _now()}
    write_json(prepared.manifest, record)
    with log.open("ab", buffering=0) as copy:
        child = subprocess.Popen(
            prepared.command,
            cwd=record["checkout"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert child.stdout is not None
        try:
            for line in child.stdout:
                copy.write(line)
                print_line(line.decode("utf-8", "replace").rstrip("\n"))
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            try:
                for line in child.stdout:
                    copy.write(line)
            except KeyboardInterrupt:  # the second Ctrl-C
                child.terminate()
        finally:
            code = child.wait()
            outcome = {"status": "finished" if code == 0 else "failed", "exit_code": code, "ended_at": _now()}
            write_json(prepared.manifest, record | outcome)
    return code if code >= 0 else 128 - code


def _check(options: SftOptions) -> None:
    if not options.checkout.is_dir():
        raise NoSuchPath(f"No such path: {options.checkout}")
    if not (options.checkout / "pyproject.toml").is_file():
        raise BadInput(
            f"{options.checkout} is not a checkout of Prime-RL: it has no pyproject.toml; give --prime-rl-dir"
        )
    if options.source is not None and options.data is not None:
        raise BadInput("give the job folder to train on or rows with --data, not both")
    if options.source is None and options.data is None and options.config is None:
        raise BadInput("give the job folder to train on, or rows with --data")
    if options.data is not None and not options.data.exists():
        raise NoSuchPath(f"No such path: {options.data}")


def _data_folder(options: SftOptions, converted: Path) -> str | None:
    """A folder with only the rows to train on: Prime-RL gives `data.name` to `load_dataset`, which takes a folder."""
    if options.source is not None:
        return str(converted.resolve())
    data = options.data
    if data is None:
        return None
    if data.is_file() and data.parent.resolve() != converted.resolve():
        converted.mkdir(parents=True, exist_ok=True)
        for before in converted.glob("train.*"):
            before.unlink()
        shutil.copyfile(data, converted / f"train{data.suffix}")
    return str((converted if data.is_file() else data).resolve())


def _read_config(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NoSuchPath(f"No such path: {path}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not valid TOML: {error}") from error


def _parse_override(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip(".- "):
        raise BadInput(f"--override must be NAME=VALUE, as optim.lr=1e-5, not '{text}'")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value


def _set(config: dict[str, Any], dotted: str, value: Any) -> None:
    """Sets `a.b.c` in nested tables. Raises `BadInput` where `a` or `a.b` is not a table."""
    *tables, last = dotted.split(".")
    table = config
    for name in tables:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise BadInput(f"{dotted}: {name} is a value already, not a table")
    table[last] = value


def _commit(checkout: Path) -> str | None:
    """The checkout's commit, without asking git: a loose reference, or a detached head."""
    try:
        head = (checkout / ".git/HEAD").read_text(encoding="utf-8").strip()
        return (checkout / ".git" / head[5:]).read_text(encoding="utf-8").strip() if head.startswith("ref: ") else head
    except (OSError, UnicodeDecodeError):
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
