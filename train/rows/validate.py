"""`bench train validate`: is a file of rows what its trainer takes, and does it render to what was sampled?"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from train.errors import BadInput, NoSuchPath
from train.rows.capture_lookup import CapturedCall, CaptureLookup
from train.rows.checks import check_banned
from train.rows.column_types import ColumnTypes, too_deep
from train.rows.convert import calls_tools
from train.rows.formats import NAMES, find_format
from train.rows.formats.base import Format, Row
from train.rows.render import Rendered, RenderError, Template
from train.rows.source_health import SourceHealth, source_health
from train.rows.writers import read_rows

#: This many problems and differences are in the report; all of them are counted.
REPORTED: Final = 100
#: Ids that are shown on both sides of a difference.
WINDOW: Final = 8


@dataclass(slots=True)
class Report:
    """What was found. Problems of a row begin with `row N: `, N from 1."""

    format: str
    rows: int = 0
    rows_with_tool_calls: int = 0
    problem_count: int = 0
    problems: list[str] = field(default_factory=list)
    #: Per row, the number of its tokens and how many of them are trained.
    lengths: array[int] = field(default_factory=lambda: array("q"))
    trainable: array[int] = field(default_factory=lambda: array("q"))
    equal: int = 0
    equal_but_for_template: int = 0
    different: int = 0
    not_captured: int = 0
    differences: list[dict[str, Any]] = field(default_factory=list)
    #: Of --source-jobs.
    source_health: SourceHealth | None = None
    #: Formats in which the first row would be valid, where it is not in this one.
    valid_as: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problem_count

    def problem(self, sentence: str) -> None:
        self.problem_count += 1
        if len(self.problems) < REPORTED:
            self.problems.append(sentence)

    def to_json(self) -> dict[str, Any]:
        report: dict[str, Any] = {
            "ok": self.ok,
            "format": self.format,
            "rows": self.rows,
            "rows_with_tool_calls": self.rows_with_tool_calls,
            "problem_count": self.problem_count,
            "problems": self.problems,
        }
        if self.lengths:
            lengths = sorted(self.lengths)
            report["tokenization"] = {
                "min_tokens": lengths[0],
                "median_tokens": lengths[len(lengths) // 2],
                "p95_tokens": lengths[min(len(lengths) - 1, int(0.95 * len(lengths)))],
                "max_tokens": lengths[-1],
                "min_trainable_assistant_tokens": min(self.trainable),
                "trainable_tokens": sum(self.trainable),
            }
        if self.equal or self.equal_but_for_template or self.different or self.not_captured:
            report["captures"] = {
                "equal": self.equal,
                "equal_but_for_template_tokens_after_the_stop": self.equal_but_for_template,
                "different": self.different,
                "without_capture": self.not_captured,
                "differences": self.differences,
            }
        if self.source_health is not None:
            report["source_health"] = self.source_health.to_json()
        return report


def validate(
    path: Path,
    format: str,
    *,
    tokenizer: str | None = None,
    tokenizer_revision: str | None = None,
    source_jobs: Path | None = None,
    expected_rows: int | None = None,
    require_tool_calls: bool = False,
    require_llm_trajectory: bool = False,
    max_length: int | None = None,
) -> Report:
    """Checks every row of `path`. Raises `NoSuchPath`, and `BadInput` where it cannot be read or rendered at all."""
    form = find_format(format)
    if not path.exists():
        raise NoSuchPath(f"No such path: {path}")
    if max_length is not None and max_length < 1:
        raise BadInput("max_length must be positive")
    if max_length is not None and tokenizer is None and form.reads == "messages":
        raise BadInput("max_length requires --tokenizer")
    if tokenizer_revision is not None and tokenizer is None:
        raise BadInput("--tokenizer-revision requires --tokenizer")
    if require_llm_trajectory and source_jobs is None:
        raise BadInput("--require-llm-trajectory requires --source-jobs, the folder that was converted")
    check = _TokenCheck(
        form=form,
        template=Template(tokenizer, tokenizer_revision) if tokenizer is not None else None,
        captures=CaptureLookup(source_jobs),
        max_length=max_length,
        report=Report(form.name),
    )
    report = check.report
    if source_jobs is not None:
        report.source_health = source_health(source_jobs)
        if require_llm_trajectory and not report.source_health.ok:
            report.problem("source jobs contain missing/malformed llm_trajectory.jsonl")
    types = ColumnTypes()
    for number, offset, row in read_rows(path, form):
        report.rows += 1
        if not isinstance(row, dict):
            report.problem(f"row {number}: top-level record must be an object")
            continue
        problems = check_banned(row) + form.check(row)
        if offset is not None and form.container == "jsonl":
            new = types.add(row, offset)
            problems += [
                f"{field[:60]}… is nested deeper than load_dataset reads" for field, _ in new if too_deep(field)
            ][:1]
            problems += [
                f"{field} has its first value of kind {kind} after 10 MiB, where load_dataset has fixed the types: it "
                "refuses the file; write it again with bench train convert, or as Parquet"
                for field, kind in new
                if (field, kind) in types.late()
            ]
        if problems and report.rows == 1:
            report.valid_as = [name for name in NAMES if name != form.name and not find_format(name).check(row)]
        report.rows_with_tool_calls += calls_tools(row)
        if not problems:
            problems = check(number, row)
        for problem in problems:
            report.problem(f"row {number}: {problem}")
    for field_name in types.dates():
        report.problem(f"{field_name} has nothing but dates, which load_dataset reads as timestamps: write Parquet")
    if expected_rows is not None and report.rows != expected_rows:
        report.problem(f"row count {report.rows} != expected {expected_rows}")
    if not report.rows:
        report.problem(f"{path} has no rows")
    if require_tool_calls and report.rows_with_tool_calls < report.rows:
        report.problem(f"not all trainer rows contain tool calls: {report.rows_with_tool_calls} / {report.rows}")
    return report


@dataclass(frozen=True, slots=True)
class _TokenCheck:
    """Counts the tokens of rows, and compares them with what was captured."""

    form: Format
    template: Template | None
    captures: CaptureLookup
    max_length: int | None
    report: Report

    def __call__(self, number: int, row: Row) -> list[str]:
        """What is wrong with the row's tokens."""
        try:
            rendered = self._render(row)
        except RenderError as error:
            return [f"the chat template refuses it: {error}"]
        if rendered is None:
            return []
        self.report.lengths.append(len(rendered.ids))
        self.report.trainable.append(rendered.trainable)
        problems = []
        if not rendered.boundary:
            problems.append("tokenized prompt differs before the assistant generation boundary")
        if not rendered.trainable:
            problems.append("no trainable assistant completion tokens")
        if self.max_length is not None and len(rendered.ids) > self.max_length:
            problems.append(f"tokenized length {len(rendered.ids)} exceeds max_length {self.max_length}")
        self._compare(number, rendered.ids, self.captures.of(row))
        return problems

    def _render(self, row: Row) -> Rendered | None:
        """None where the row needs a template and there is none."""
        if self.form.conversation is None:
            return _rendered_ids(row)
        if self.template is None:
            return None
        messages, tools = self.form.conversation(row)
        return self.template.render(messages, tools, template_kwargs(row), last_only=self.form.trains == "last")

    def _compare(self, number: int, ids: list[int], captured: CapturedCall | None) -> None:
        report = self.report
        if captured is None or not captured.choices:
            report.not_captured += 1
            return
        common, choice = max(
            ((_common_prefix(ids, captured.prompt + sampled), at) for at, sampled in enumerate(captured.choices)),
            key=lambda found: (found[0], -found[1]),
        )
        whole = captured.prompt + captured.choices[choice]
        if common == len(whole) == len(ids):
            report.equal += 1
        elif common == len(whole):
            report.equal_but_for_template += 1
        else:
            report.different += 1
            if len(report.differences) < REPORTED:
                report.differences.append(_difference(number, common, whole, ids, len(captured.prompt), self.template))


def _rendered_ids(row: Row) -> Rendered:
    if "input_ids" in row:
        return Rendered(row["input_ids"], sum(label != -100 for label in row["labels"]))
    return Rendered([*row["prompt_ids"], *row["completion_ids"]], sum(row["env_mask"]))


def template_kwargs(row: Row) -> dict[str, Any]:
    """What the trainer passes to the chat template besides messages and tools."""
    kwargs = row.get("chat_template_kwargs")
    found = dict(kwargs) if isinstance(kwargs, Mapping) else {}
    if isinstance(row.get("enable_thinking"), bool):
        found["enable_thinking"] = row["enable_thinking"]
    return found


def _difference(
    number: int, at: int, captured: list[int], rendered: list[int], prompt: int, template: Template | None
) -> dict[str, Any]:
    """The first difference, at index `at`, between rendered and captured ids; the first `prompt` are the prompt."""
    difference: dict[str, Any] = {
        "row": number,
        "index": at,
        "in": "prompt" if at < prompt else "reply",
        "captured": captured[at : at + WINDOW],
        "rendered": rendered[at : at + WINDOW],
    }
    if template is not None:
        difference["before_text"] = template.decode(rendered[max(0, at - WINDOW) : at])
        difference["captured_text"] = template.decode(difference["captured"])
        difference["rendered_text"] = template.decode(difference["rendered"])
    return difference


def _common_prefix(ids: Sequence[int], other: Sequence[int]) -> int:
    """The number of ids that two lists have in common at their beginning."""
    low, high = 0, min(len(ids), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if ids[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
