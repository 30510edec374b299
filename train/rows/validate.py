"""`bench train validate`: is a file of rows what its trainer takes, and does it render to what was sampled?"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.errors import BadInput, NoSuchPath
from train.rollouts.messages import Message, arguments_of
from train.rows.capture_lookup import Captured, Captures
from train.rows.checks import check_banned, tools_of
from train.rows.formats import NAMES, Format, Row, find_format
from train.rows.render import Rendered, RenderError, Template
from train.rows.writers import read_rows

#: So many problems and differences stand in the report; all of them are counted.
TOLD = 100
WINDOW = 8


@dataclass(slots=True)
class Report:
    """What was found. `problems` begin with `row N: `, N from 1."""

    format: str
    rows: int = 0
    rows_with_tool_calls: int = 0
    problem_count: int = 0
    problems: list[str] = field(default_factory=list)
    lengths: array[int] = field(default_factory=lambda: array("q"))
    trainable: array[int] = field(default_factory=lambda: array("q"))
    equal: int = 0
    equal_but_for_template: int = 0
    different: int = 0
    not_captured: int = 0
    differences: list[dict[str, Any]] = field(default_factory=list)
    #: Formats that the first row would be right in, where it is wrong in this one.
    right_as: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problem_count

    def problem(self, sentence: str) -> None:
        self.problem_count += 1
        if len(self.problems) < TOLD:
            self.problems.append(sentence)

    def to_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "ok": self.ok,
            "format": self.format,
            "rows": self.rows,
            "rows_with_tool_calls": self.rows_with_tool_calls,
            "problem_count": self.problem_count,
            "problems": self.problems,
        }
        if self.lengths:
            lengths = sorted(self.lengths)
            told["tokenization"] = {
                "min_tokens": lengths[0],
                "median_tokens": lengths[len(lengths) // 2],
                "p95_tokens": lengths[min(len(lengths) - 1, int(0.95 * len(lengths)))],
                "max_tokens": lengths[-1],
                "min_trainable_assistant_tokens": min(self.trainable),
                "trainable_tokens": sum(self.trainable),
            }
        if self.equal or self.equal_but_for_template or self.different or self.not_captured:
            told["captures"] = {
                "equal": self.equal,
                "equal_but_for_template_tokens_after_the_stop": self.equal_but_for_template,
                "different": self.different,
                "without_capture": self.not_captured,
                "differences": self.differences,
            }
        return told


def validate(
    path: Path,
    format: str,
    *,
    tokenizer: str | None = None,
    source_jobs: Path | None = None,
    expected_rows: int | None = None,
    require_tool_calls: bool = False,
    max_length: int | None = None,
) -> Report:
    """Checks every row of `path`. Raises `NoSuchPath`, `BadInput` where it cannot be read or rendered at all."""
    form = find_format(format)
    if not path.exists():
        raise NoSuchPath(f"No such path: {path}")
    if max_length is not None and max_length < 1:
        raise BadInput("max_length must be positive")
    if max_length is not None and tokenizer is None and form.reads == "messages":
        raise BadInput("max_length requires --tokenizer")
    template = Template(tokenizer) if tokenizer is not None else None
    report, captures = Report(form.name), Captures(source_jobs)
    for number, row in read_rows(path, form):
        report.rows += 1
        if not isinstance(row, dict):
            report.problem(f"row {number}: top-level record must be an object")
            continue
        problems = check_banned(row) + form.check(row)
        if problems and report.rows == 1:
            report.right_as = [name for name in NAMES if name != form.name and not find_format(name).check(row)]
        report.rows_with_tool_calls += _calls_tools(row)
        if not problems:
            problems = _tokens(number, row, form, template, captures, max_length, report)
        for what in problems:
            report.problem(f"row {number}: {what}")
    if expected_rows is not None and report.rows != expected_rows:
        report.problem(f"row count {report.rows} != expected {expected_rows}")
    if not report.rows:
        report.problem(f"{path} holds no row")
    if require_tool_calls and report.rows_with_tool_calls < report.rows:
        report.problem(f"not all trainer rows contain tool calls: {report.rows_with_tool_calls} / {report.rows}")
    return report


def _tokens(
    number: int,
    row: Row,
    form: Format,
    template: Template | None,
    captures: Captures,
    max_length: int | None,
    report: Report,
) -> list[str]:
    """Counts a row's tokens and compares them with what was captured; returns what is wrong."""
    if form.reads == "ids":
        rendered = _of_ids(row)
    elif template is not None:
        messages, tools = conversation(row, form)
        kwargs = template_kwargs(row)
        try:
            rendered = template.render(messages, tools, kwargs, last_only=form.trains == "last")
        except RenderError as error:
            return [f"the chat template refuses it: {error}"]
    else:
        return []
    report.lengths.append(len(rendered.ids))
    report.trainable.append(rendered.trainable)
    problems = []
    if not rendered.boundary:
        problems.append("tokenized prompt differs before the assistant generation boundary")
    if not rendered.trainable:
        problems.append("no trainable assistant completion tokens")
    if max_length is not None and len(rendered.ids) > max_length:
        problems.append(f"tokenized length {len(rendered.ids)} exceeds max_length {max_length}")
    _compare(number, rendered.ids, captures.of(row), template, report)
    return problems


def _of_ids(row: Row) -> Rendered:
    if "input_ids" in row:
        return Rendered(row["input_ids"], sum(label != -100 for label in row["labels"]))
    return Rendered([*row["prompt_ids"], *row["completion_ids"]], sum(row["env_mask"]))


def conversation(row: Row, form: Format) -> tuple[list[Message], list[Any]]:
    """The messages and tools as the format's trainer hands them to the template."""
    if form.name == "trl-sft":
        return [*row["prompt"], *row["completion"]], tools_of(row, "tools")[0]
    if form.name == "verl-sft":
        return row["messages"], row["tools"] or []
    if form.name == "openenv-episodes":
        return row["messages"], row["extra"].get("tools") or []
    tools = tools_of(row, "tools" if row.get("tools") is not None else "tool_defs")[0]
    return [_with_objects(message) for message in row["messages"]], tools


def template_kwargs(row: Row) -> dict[str, Any]:
    kwargs = row.get("chat_template_kwargs")
    found = dict(kwargs) if isinstance(kwargs, Mapping) else {}
    if isinstance(row.get("enable_thinking"), bool):
        found["enable_thinking"] = row["enable_thinking"]
    return found


def _with_objects(message: Message) -> Message:
    """Prime-RL and SkyRL parse arguments before they render."""
    calls = message.get("tool_calls")
    if not calls:
        return {name: value for name, value in message.items() if value is not None}
    parsed = [call | {"function": call["function"] | {"arguments": arguments_of(call)}} for call in calls]
    return {name: value for name, value in message.items() if value is not None} | {"tool_calls": parsed}


def _compare(number: int, ids: list[int], captured: Captured | None, template: Template | None, report: Report) -> None:
    if captured is None or not captured.choices:
        report.not_captured += 1
        return
    best, choice = max(
        ((_common(ids, captured.prompt + sampled), at) for at, sampled in enumerate(captured.choices)),
        key=lambda found: (found[0], -found[1]),
    )
    whole = captured.prompt + captured.choices[choice]
    if best == len(whole) == len(ids):
        report.equal += 1
    elif best == len(whole):
        report.equal_but_for_template += 1
    else:
        report.different += 1
        if len(report.differences) < TOLD:
            report.differences.append(_difference(number, best, whole, ids, len(captured.prompt), template))


def _difference(
    number: int, at: int, whole: list[int], ids: list[int], prompt: int, template: Template | None
) -> dict[str, Any]:
    told: dict[str, Any] = {
        "row": number,
        "index": at,
        "in": "prompt" if at < prompt else "reply",
        "captured": whole[at : at + WINDOW],
        "rendered": ids[at : at + WINDOW],
    }
    if template is not None:
        told["before_text"] = template.decode(ids[max(0, at - WINDOW) : at])
        told["captured_text"] = template.decode(told["captured"])
        told["rendered_text"] = template.decode(told["rendered"])
    return told


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two lists begin with in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _calls_tools(row: Row) -> bool:
    parts = [row.get(name) for name in ("prompt", "completion", "messages")]
    return any(
        message.get("tool_calls")
        for part in parts
        if isinstance(part, list)
        for message in part
        if isinstance(message, dict)
    )
