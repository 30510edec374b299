"""`bench train convert`: finished rollouts into a file of rows that a trainer loads. One rollout in memory at a time.

The file is renamed into its place when it is whole; whatever does not become a row is counted by reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capture.errors import CaptureError
from capture.journal.files import write_json
from capture.journal.layout import EVALUATION, LOCK, SUMMARY, RolloutDir
from train.errors import BadInput, NoSuchPath, NothingWritten
from train.groups.groups import GroupOptions
from train.rollouts.purpose import check_purpose, is_wanted
from train.rollouts.rollouts import Rollout, find_rollouts
from train.rows.examples import ROW_MODES, ExampleOptions, conversation_examples, token_examples
from train.rows.formats import find_format
from train.rows.formats.base import Format, MalformedArguments, Origin, Row
from train.rows.group_members import Member, whole_groups
from train.rows.row_files import is_row_file, row_file_examples
from train.rows.skip_reasons import OTHER_PURPOSE, Tally
from train.rows.writers import RowWriter, open_rows


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """The options of `bench train convert`; `group` is None without --group-advantage."""

    format: str = "prime-sft"
    row_mode: str = "rollout"
    min_reward: float | None = None
    include_errored: bool = False
    expected_rows: int | None = None
    manifest: Path | None = None
    redact: bool = False
    require_plain_sampling: bool = False
    #: `train`, `eval` or `all`.
    purpose: str = "train"
    group: GroupOptions | None = None


@dataclass(frozen=True, slots=True)
class ConvertResult:
    """What was written. `notes` are sentences on what was left out and what a user of the rows should know."""

    rows: int
    rollouts: int
    out: Path
    notes: list[str]
    manifest: dict[str, Any] = field(default_factory=dict)


def convert(
    path: Path, out: Path, options: ConvertOptions, on_warning: Callable[[str], None] | None = None
) -> ConvertResult:
    """Writes the rows of all rollouts at `path` to `out`.

    Raises `NoSuchPath`, `BadInput`, `NothingWritten` (no row, or not as many as expected) and `TrainError`; a file that
    was at `out` is then unchanged.
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
            raise NothingWritten(f"{path} gave no rows, and nothing was written", tally.sentences())
        notes = rows.commit()
    manifest = _manifest(path, form, options, tally, notes)
    if options.manifest is not None:
        write_json(options.manifest, dict(sorted(manifest.items())))
    return ConvertResult(tally.rows, tally.rollouts_written, rows.path, [*tally.sentences(), *notes], manifest)


def check_options(path: Path, out: Path, options: ConvertOptions) -> Format:
    """The format, if the options fit together. Raises `NoSuchPath`, `BadInput`."""
    form = find_format(options.format)
    if not path.exists():
        raise NoSuchPath(f"No such path: {path}")
    check_purpose(options.purpose)
    if options.row_mode not in ROW_MODES:
        raise BadInput(f"--row-mode must be 'rollout', 'exchange' or 'segment', not '{options.row_mode}'")
    if form.container == "folder" and options.row_mode != "rollout":
        raise BadInput(f"{form.name} has one row per rollout: leave --row-mode out")
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
    options: ConvertOptions,
    rows: RowWriter,
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
    for group in whole_groups(_finished(found, options, tally), options.group, tally):
        _write_group(group, form, options, rows, tally)


def _finished(found: Iterable[Rollout], options: ConvertOptions, tally: Tally) -> Iterator[Rollout]:
    """Rollouts for groups: all that finished; errors and rewards are judged per group."""
    for rollout in found:
        tally.rollouts_seen += 1
        if not is_wanted(rollout, options.purpose):
            tally.leave_out(OTHER_PURPOSE[rollout.purpose])
        elif _unfinished(rollout):
            tally.leave_out("no_result")
        else:
            yield rollout


def _write_group(group: list[Member], form: Format, options: ConvertOptions, rows: RowWriter, tally: Tally) -> None:
    """All of a group's rows, or none: without one member the advantages of the others would be wrong."""
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


def why_not(rollout: Rollout, options: ConvertOptions) -> str | None:
    """Why a whole rollout is left out, by BenchFlow's rules; None when it is not."""
    if not is_wanted(rollout, options.purpose):
        return OTHER_PURPOSE[rollout.purpose]
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
    """Whether a rollout still runs: it is in a job, without `result.json`. A stand-alone proxy writes none either."""
    job = rollout.path.resolve().parent
    return not rollout.finished and any((job / name).exists() for name in (EVALUATION, LOCK, SUMMARY))


def _reaches(rollout: Rollout, least: float) -> bool:
    return rollout.reward is not None and rollout.reward >= least


def _write(
    rollout: Rollout,
    signal: dict[str, Any] | None,
    form: Format,
    options: ConvertOptions,
    rows: RowWriter,
    tally: Tally,
) -> bool:
    """Writes a rollout's rows; returns whether there were any. An unreadable log costs this rollout and no other."""
    if rollout.journal is None:
        tally.leave_out("no_trajectory")
        return False
    if form.needs_reward and rollout.reward is None:
        tally.leave_out("unscored")
        return False
    origin = origin_of(rollout, signal)
    example_options = ExampleOptions(form, options.row_mode, options.redact, options.require_plain_sampling)
    mark, written, counted = rows.mark(), 0, Tally()
    examples: Iterator[Any] = (
        token_examples(rollout, origin, example_options, counted)
        if form.reads == "ids"
        else conversation_examples(rollout, origin, example_options, counted)
    )
    try:
        for example in examples:
            written += _write_example(example, form, rows, counted)
    except CaptureError as error:
        rows.roll_back(mark)
        rollout.warn(f"{rollout.journal}: {error}")
        tally.leave_out("unreadable")
        return False
    if not written and not counted.left_out:
        tally.leave_out("no_trajectory")
        return False
    counted.rollouts_written += bool(written)
    tally.add(counted)
    return bool(written)


def _write_example(example: Any, form: Format, rows: RowWriter, tally: Tally) -> bool:
    try:
        row = form.row(example)
    except MalformedArguments:
        tally.leave_out("malformed_tool_arguments")
        return False
    rows.write(row)
    tally.rows += 1
    tally.rows_with_tool_calls += calls_tools(row)
    return True


def origin_of(rollout: Rollout, signal: dict[str, Any] | None = None) -> Origin:
    return Origin(
        id=rollout.rollout_path,
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


def calls_tools(row: Row) -> bool:
    """Whether a message of the row calls a tool. The row may come from a file, so its parts may be anything."""
    parts = [row.get(name) for name in ("prompt", "completion", "messages")]
    return any(
        message.get("tool_calls")
        for part in parts
        if isinstance(part, list)
        for message in part
        if isinstance(message, dict)
    )


def _from_row_file(path: Path, form: Format, options: ConvertOptions, rows: RowWriter, tally: Tally) -> None:
    if options.group is not None:
        raise BadInput(
            "--group-advantage needs a job folder: a file of rows does not say which rollouts belong together"
        )
    if form.reads == "ids":
        raise BadInput(f"{path} has no token ids; give the job folder for {form.name}")
    for example in row_file_examples(
        path, options.min_reward, options.include_errored, options.redact, tally, purpose=options.purpose
    ):
        if form.needs_reward and example.origin.reward is None:
            tally.leave_out("unscored")
        else:
            tally.rollouts_written += _write_example(example, form, rows, tally)


def _manifest(path: Path, form: Format, options: ConvertOptions, tally: Tally, notes: list[str]) -> dict[str, Any]:
    manifest = tally.manifest() | {
        "format": form.name,
        "row_mode": options.row_mode,
        "purpose": options.purpose,
        "sources": [str(path)],
    }
    manifest["notes"] = [*manifest["notes"], *notes]
    if options.group is not None:
        manifest["training_signal"] = options.group.to_json() | {"groups": tally.groups}
    return manifest
