"""`bench train convert`: finished rollouts into a file of rows that a trainer loads. One rollout in memory at a time.

The file is written beside its place and renamed when it is whole; whatever does not become a row is counted by reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capture.errors import CaptureError
from capture.journal.journal import write_json
from capture.journal.layout import EVALUATION, LOCK, SUMMARY, RolloutDir
from train.errors import BadInput, NoSuchPath, NothingWritten
from train.groups.groups import GroupOptions
from train.rollouts.rollouts import Rollout, find_rollouts
from train.rows.examples import ROW_MODES, Wanted, exchanges, token_examples
from train.rows.formats import Format, LeftOut, Origin, Row, find_format
from train.rows.group_members import Member, whole_groups
from train.rows.row_files import is_row_file, row_file_exchanges
from train.rows.skip_reasons import Tally
from train.rows.writers import Rows, open_rows


@dataclass(frozen=True, slots=True)
class Options:
    """What `bench train convert` was asked for; `group` is None without --group-advantage."""

    format: str = "prime-sft"
    row_mode: str = "rollout"
    min_reward: float | None = None
    include_errored: bool = False
    expected_rows: int | None = None
    manifest: Path | None = None
    redact: bool = False
    require_plain_sampling: bool = False
    group: GroupOptions | None = None


@dataclass(frozen=True, slots=True)
class Converted:
    """What came of it. `told` are sentences on what was left out and what a reader of the rows should know."""

    rows: int
    rollouts: int
    out: Path
    told: list[str]
    manifest: dict[str, Any] = field(default_factory=dict)


def convert(path: Path, out: Path, options: Options, on_warning: Callable[[str], None] | None = None) -> Converted:
    """Writes the rows of all rollouts at `path` to `out`.

    Raises `NoSuchPath`, `BadInput`, `NothingWritten` (no row, or not as many as were expected) and `TrainError`; the
    file that stood at `out` is then as it was.
    """
    form = check_options(path, out, options)
    tally = Tally()
    with open_rows(out, form) as rows:
        if path.is_file() and is_row_file(path):
            _from_row_file(path, form, options, rows, tally)
        else:
            _from_rollouts(path, form, options, rows, tally, on_warning)
        if options.expected_rows is not None and tally.rows != options.expected_rows:
            raise NothingWritten(f"row count {tally.rows} != expected {options.expected_rows}", tally.sentences())
        if not tally.rows and options.expected_rows is None:
            raise NothingWritten(f"no row came of {path}, and nothing was written", tally.sentences())
        notes = rows.commit()
    manifest = _manifest(path, form, options, tally, notes)
    if options.manifest is not None:
        write_json(options.manifest, dict(sorted(manifest.items())))
    return Converted(tally.rows, tally.rollouts_written, rows.path, [*tally.sentences(), *notes], manifest)


def check_options(path: Path, out: Path, options: Options) -> Format:
    """The format, if the options go together. Raises `NoSuchPath`, `BadInput`."""
    form = find_format(options.format)
    if not path.exists():
        raise NoSuchPath(f"No such path: {path}")
    if options.row_mode not in ROW_MODES:
        raise BadInput(f"--row-mode must be 'rollout', 'exchange' or 'segment', not '{options.row_mode}'")
    if form.container == "folder" and options.row_mode != "rollout":
        raise BadInput(f"{form.name} has one row a rollout: leave --row-mode out")
    if out.exists() and path.exists() and out.resolve() == path.resolve():
        raise BadInput(
            "--out must differ from the source JSONL path" if path.is_file() else "--out must differ from PATH"
        )
    if options.manifest is not None and options.manifest.resolve() in (out.resolve(), path.resolve()):
        raise BadInput("--manifest must differ from --out and from PATH")
    if options.group is not None and options.min_reward is not None and form.one_row_a_rollout:
        raise BadInput(
            f"--min-reward would break the groups of {form.name}: leave it out, or leave --group-advantage out"
        )
    return form


def _from_rollouts(
    path: Path,
    form: Format,
    options: Options,
    rows: Rows,
    tally: Tally,
    on_warning: Callable[[str], None] | None,
) -> None:
    rollout_dir = RolloutDir(path.parent.parent)
    if path.is_file() and path == rollout_dir.journal and rollout_dir.result.is_file():
        path = rollout_dir.path  # the log of a finished rollout: its reward is known
    found = find_rollouts(path, on_warning)
    if options.group is None:
        for rollout in found:
            tally.rollouts_seen += 1
            if (reason := why_not(rollout, options)) is not None:
                tally.leave_out(reason)
            else:
                _write(rollout, None, form, options, rows, tally)
        return
    for group in whole_groups(_kept(found, tally), options.group, tally):
        _write_group(group, form, options, rows, tally)


def _kept(found: Iterable[Rollout], tally: Tally) -> Iterator[Rollout]:
    """Rollouts for groups: all that finished; errors and rewards are for the group to judge."""
    for rollout in found:
        tally.rollouts_seen += 1
        if _unfinished(rollout):
            tally.leave_out("no_result")
        else:
            yield rollout


def _write_group(group: list[Member], form: Format, options: Options, rows: Rows, tally: Tally) -> None:
    """All of a group's rows, or none: one member that cannot be a row would change what the others are worth."""
    mark, counted = rows.mark(), Tally()
    for member in group:
        if options.min_reward is not None and not _reaches(member.rollout, options.min_reward):
            counted.leave_out("below_min_reward")
        elif not _write(member.rollout, member.signal, form, options, rows, counted):
            rows.roll_back(mark)
            tally.add_left_out(counted)
            tally.leave_out("group_not_written", len(group) - 1)
            return
    tally.add(counted)


def why_not(rollout: Rollout, options: Options) -> str | None:
    """Why a rollout is left out as a whole, BenchFlow's rules; None when it is not."""
    if _unfinished(rollout):
        return "no_result"
    result = rollout.result
    scoring = result.get("scoring")
    if (
        rollout.error is not None
        or rollout.verifier_error is not None
        or result.get("partial_trajectory")
        or (isinstance(scoring, dict) and not rollout.scored)
    ):
        if not rollout.scored:
            return "errored_unscored"
        if not options.include_errored:
            return "errored"
    if options.min_reward is not None and not _reaches(rollout, options.min_reward):
        return "below_min_reward"
    return None


def _unfinished(rollout: Rollout) -> bool:
    """Whether a rollout still runs: no `result.json`, in a job. What the stand-alone proxy wrote has none either."""
    job = rollout.path.resolve().parent
    return not rollout.finished and any((job / name).exists() for name in (EVALUATION, LOCK, SUMMARY))


def _reaches(rollout: Rollout, least: float) -> bool:
    return rollout.reward is not None and rollout.reward >= least


def _write(
    rollout: Rollout, signal: dict[str, Any] | None, form: Format, options: Options, rows: Rows, tally: Tally
) -> bool:
    """Writes a rollout's rows; whether there were any. A log that cannot be read costs this rollout, no other."""
    if rollout.journal is None:
        tally.leave_out("no_trajectory")
        return False
    if form.needs_reward and rollout.reward is None:
        tally.leave_out("unscored")
        return False
    origin = origin_of(rollout, signal)
    wanted = Wanted(form, options.row_mode, options.redact, options.require_plain_sampling)
    mark, written, counted = rows.mark(), 0, Tally()
    examples: Iterator[Any] = (
        token_examples(rollout, origin, wanted, counted)
        if form.reads == "ids"
        else exchanges(rollout, origin, wanted, counted)
    )
    try:
        for example in examples:
            try:
                row = form.row(example)
            except LeftOut as error:
                counted.leave_out(str(error))
                continue
            rows.write(row)
            written += 1
            counted.rows_with_tool_calls += _calls_tools(row)
    except CaptureError as error:
        rows.roll_back(mark)
        rollout.warn(f"{rollout.journal}: {error}")
        tally.leave_out("unreadable")
        return False
    if not written and not counted.left_out:
        tally.leave_out("no_trajectory")
        return False
    counted.rows += written
    counted.rollouts_written += bool(written)
    tally.add(counted)
    return bool(written)


def origin_of(rollout: Rollout, signal: dict[str, Any] | None = None) -> Origin:
    return Origin(
        reward=rollout.reward,
        task=rollout.task,
        agent=rollout.agent,
        model=rollout.model,
        rollout=rollout.name,
        rollout_dir=rollout.rollout_path,
        journal=str(rollout.journal),
        signal=signal,
        result=rollout.result,
    )


def _calls_tools(row: Row) -> bool:
    messages = [*row.get("prompt", ()), *row.get("completion", ()), *row.get("messages", ())]
    return any(message.get("tool_calls") for message in messages)


def _from_row_file(path: Path, form: Format, options: Options, rows: Rows, tally: Tally) -> None:
    if options.group is not None:
        raise BadInput(
            "--group-advantage needs a job folder: a file of rows does not say which rollouts belong together"
        )
    if form.reads == "ids":
        raise BadInput(f"{path} holds no token ids; give the job folder for {form.name}")
    for example in row_file_exchanges(path, options.min_reward, options.include_errored, options.redact, tally):
        if form.needs_reward and example.origin.reward is None:
            tally.leave_out("unscored")
            continue
        try:
            row = form.row(example)
        except LeftOut as error:
            tally.leave_out(str(error))
            continue
        rows.write(row)
        tally.rows += 1
        tally.rollouts_written += 1
        tally.rows_with_tool_calls += _calls_tools(row)


def _manifest(path: Path, form: Format, options: Options, tally: Tally, notes: list[str]) -> dict[str, Any]:
    told = tally.manifest() | {"format": form.name, "row_mode": options.row_mode, "sources": [str(path)]}
    told["notes"] = [*told["notes"], *notes]
    if options.group is not None:
        told["training_signal"] = options.group.to_json() | {"groups": tally.groups}
    return told
