"""`bench train validate`: rows against their format, rendered with a model's own template, and against captured ids."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.train.build import GOLDEN, Line, make_job
from tests.train.tool_calls import BASH, SUFFIX, WRITE, other_call, sampled_count, tool_job, tool_rollout
from train.cli import app
from train.errors import BadInput, NoSuchPath
from train.rows.convert import ConvertOptions, convert
from train.rows.formats import NAMES
from train.rows.render import RenderError, Template
from train.rows.validate import validate

ROOT = Path(__file__).parents[3]
MESSAGE_FORMATS = [name for name in NAMES if not name.endswith(("ids", "grpo"))]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["validate", *(str(argument) for argument in arguments)])


def rows(tmp_path: Path, form: str, calls: list[Line] | None = None, **options: Any) -> Path:
    job = make_job(tmp_path / "job", [{"calls": calls or tool_rollout()}])
    out = tmp_path / SUFFIX.get(form, "rows.jsonl")
    convert(job, out, ConvertOptions(format=form, **options))
    return out


# --- the arithmetic of the seed


def test_message_rows_train_one_template_token_a_reply_more_than_was_sampled(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    calls = tool_rollout()
    file = rows(tmp_path, "trl-sft", calls, row_mode="exchange")
    report = validate(file, "trl-sft", tokenizer=str(tokenizer_folder)).to_json()
    assert report["ok"] and report["rows"] == 2
    assert report["tokenization"]["trainable_tokens"] == sampled_count(calls) + 2
    assert report["captures"] == {
        "equal": 0,
        "equal_but_for_template_tokens_after_the_stop": 2,
        "different": 0,
        "without_capture": 0,
        "differences": [],
    }


def test_exact_rows_train_what_was_sampled(tmp_path: Path) -> None:
    calls = tool_rollout()
    file = rows(tmp_path, "trl-sft-ids", calls)
    report = validate(file, "trl-sft-ids").to_json()
    assert report["tokenization"]["trainable_tokens"] == sampled_count(calls)
    assert report["captures"]["equal"] == 1


@pytest.mark.parametrize("form", MESSAGE_FORMATS)
def test_rows_of_every_format_render_to_what_was_captured(tmp_path: Path, tokenizer_folder: Path, form: str) -> None:
    report = validate(rows(tmp_path, form), form, tokenizer=str(tokenizer_folder))
    assert (report.ok, report.equal_but_for_template, report.different) == (True, 1, 0)


def test_every_reply_trains_where_the_trainer_trains_all(tmp_path: Path, tokenizer_folder: Path) -> None:
    calls = tool_rollout()
    report = validate(rows(tmp_path, "prime-sft", calls), "prime-sft", tokenizer=str(tokenizer_folder))
    assert sum(report.trainable) == sampled_count(calls) + 2


def test_golden_lines_of_a_real_engine_render_to_their_captured_ids(tmp_path: Path, tokenizer_folder: Path) -> None:
    """vLLM's own ids of a call with a system prompt left to the template and one tool."""
    report = validate(rows(tmp_path, "trl-sft", [GOLDEN["ok"]]), "trl-sft", tokenizer=str(tokenizer_folder))
    assert (report.ok, report.equal + report.equal_but_for_template) == (True, 1)


# --- what differs


def test_the_first_difference_is_shown_with_both_texts(tmp_path: Path, tokenizer_folder: Path) -> None:
    calls = tool_rollout()
    file = rows(tmp_path, "trl-sft", calls)
    file.write_text(file.read_text().replace("Done: 42 is written.", "Done: 43 is written."))
    result = run(file, "--format", "trl-sft", "--tokenizer", tokenizer_folder)
    assert result.exit_code == 0, "rows that render otherwise are right rows"
    (found,) = json.loads(result.stdout)["captures"]["differences"]
    assert (found["row"], found["in"]) == (1, "reply")
    assert found["before_text"].endswith("Done: 4")
    assert (found["captured_text"][0], found["rendered_text"][0]) == ("2", "3")
    assert "row 1: differs from the captured ids at index" in result.stderr


def test_nulls_that_parquet_filled_in_are_seen_in_the_rendering(tmp_path: Path, tokenizer_folder: Path) -> None:
    """The trap that convert warns of: two tools in one Parquet column get each other's parameters, null."""
    file = rows(tmp_path, "verl-sft", tool_rollout([WRITE, BASH]))
    report = validate(file, "verl-sft", tokenizer=str(tokenizer_folder))
    assert report.different == 1
    assert "null" in report.differences[0]["rendered_text"]
    (tmp_path / "exact").mkdir()
    same = validate(
        rows(tmp_path / "exact", "trl-sft", tool_rollout([WRITE, BASH])), "trl-sft", tokenizer=str(tokenizer_folder)
    )
    assert same.different == 0


def test_verls_argument_strings_are_right_for_a_template_that_asks(tmp_path: Path, tokenizer_folder: Path) -> None:
    report = validate(rows(tmp_path, "verl-sft", other_call()), "verl-sft", tokenizer=str(tokenizer_folder))
    assert report.ok
    template = Template(str(tokenizer_folder))
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}
    assert '"arguments": {"a": 1}}' in template.text([{"role": "user", "content": "go"}, message], [], {})


def test_rows_whose_captures_are_elsewhere_are_found_with_source_jobs(tmp_path: Path, tokenizer_folder: Path) -> None:
    file = rows(tmp_path, "trl-sft")
    (tmp_path / "job").rename(tmp_path / "moved")
    lost = validate(file, "trl-sft", tokenizer=str(tokenizer_folder))
    assert (lost.not_captured, lost.equal_but_for_template) == (1, 0)
    found = validate(file, "trl-sft", tokenizer=str(tokenizer_folder), source_jobs=tmp_path / "moved")
    assert (found.not_captured, found.equal_but_for_template) == (0, 1)


# --- what fails


def test_problems_name_their_row_and_the_code_is_1(tmp_path: Path) -> None:
    file = rows(tmp_path, "trl-sft", row_mode="exchange")
    first, second = file.read_text().splitlines()
    bad = json.loads(second)
    bad["completion"] = []
    bad["gold"] = "42"
    file.write_text(first + "\n" + json.dumps(bad) + "\n")
    result = run(file, "--format", "trl-sft", "--expected-rows", "3", "--require-tool-calls")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["ok"], report["rows"], report["rows_with_tool_calls"]) == (False, 2, 2)
    assert result.stderr.splitlines() == [
        "row 2: banned leakage keys present: gold",
        "row 2: completion must contain exactly one assistant message",
        "row count 2 != expected 3",
    ]


def test_rows_of_another_format_are_recognized(tmp_path: Path) -> None:
    result = run(rows(tmp_path, "trl-sft", row_mode="exchange"))
    assert result.exit_code == 1
    assert "row 1 is a valid row of trl-sft: give that as --format" in result.stderr.splitlines()


def test_rows_that_call_no_tool_fail_where_they_must(tmp_path: Path) -> None:
    from tests.train.build import conversation

    result = run(rows(tmp_path, "trl-sft", conversation(1)), "--format", "trl-sft", "--require-tool-calls")
    assert result.exit_code == 1
    assert "not all trainer rows contain tool calls: 0 / 1" in result.stderr


def test_a_row_longer_than_max_length_fails(tmp_path: Path, tokenizer_folder: Path) -> None:
    file = rows(tmp_path, "trl-sft")
    report = validate(file, "trl-sft", tokenizer=str(tokenizer_folder), max_length=10)
    assert report.problems[0].startswith("row 1: tokenized length ") and report.problems[0].endswith(
        " exceeds max_length 10"
    )
    with pytest.raises(BadInput, match="max_length requires --tokenizer"):
        validate(file, "trl-sft", max_length=10)


def test_a_template_whose_prompt_is_not_a_prefix_is_a_problem(tmp_path: Path, tokenizer_folder: Path) -> None:
    """As Qwen3's does, which opens a block of reasoning in the prompt that the finished turn does not have."""
    folder = tmp_path / "thinks"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text((tokenizer_folder / name).read_text())
    template = folder / "chat_template.jinja"
    template.write_text(
        template.read_text().replace(
            "'<|im_start|>assistant\\n' }}{%- endif", "'<|im_start|>assistant\\n<think>\\n' }}{%- endif"
        )
    )
    report = validate(rows(tmp_path, "trl-sft"), "trl-sft", tokenizer=str(folder))
    assert "row 1: tokenized prompt differs before the assistant generation boundary" in report.problems
    assert "row 1: no trainable assistant completion tokens" in report.problems


def test_a_template_that_refuses_a_row_is_a_problem(tmp_path: Path, tokenizer_folder: Path) -> None:
    template = Template(str(tokenizer_folder))
    with pytest.raises(RenderError, match="content"):
        template.text([{"role": "user", "content": None}], [], {})


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"messages": [', "line 1: invalid JSON"),
        ("", "has no rows"),
        ("[1]\n", "row 1: top-level record must be an object"),
    ],
)
def test_a_file_without_rows_is_refused(tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    try:
        result = " ".join(validate(tmp_path / "rows.jsonl", "prime-sft").problems)
    except BadInput as error:
        result = str(error)
    assert sentence in result


def test_no_such_file_and_no_such_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(NoSuchPath):
        validate(tmp_path / "nowhere.jsonl", "prime-sft")
    file = rows(tmp_path, "trl-sft")
    with pytest.raises(BadInput, match=r"no tokenizer at .*: give a folder with tokenizer\.json"):
        validate(file, "trl-sft", tokenizer=str(tmp_path / "job"))


BROKEN = {
    "missing": (None, "transformers is missing"),
    "an ImportError": ("raise ImportError('no libcudart.so')", "ImportError: no libcudart.so"),
    "an error of a dependency": ("raise RuntimeError('numpy 1 wanted')", "RuntimeError: numpy 1 wanted"),
    "an OSError": ("raise OSError('bad magic')", "OSError: bad magic"),
    "half of the package": ("x = 1", "AttributeError: module 'transformers' has no attribute 'AutoTokenizer'"),
    "a lazy package": ("def __getattr__(name):\n    raise ValueError(name)", "ValueError: AutoTokenizer"),
}


@pytest.mark.parametrize(("module", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_missing_or_broken_extra_is_an_error_of_one_sentence(tmp_path: Path, module: str | None, reason: str) -> None:
    file = rows(tmp_path, "trl-sft")
    script = "import sys;" + ("sys.modules['transformers'] = None;" if module is None else "sys.path.insert(0, 'lib');")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/transformers.py").write_text(module or "")
    script += (
        f"sys.argv = ['train', 'validate', {str(file)!r}, '--format', 'trl-sft', '--tokenizer', 'x'];"
        "from train.__main__ import main; main()"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert answer.returncode == 2
    [line] = answer.stderr.splitlines()
    assert line.startswith("train: tokenizer validation requires the benchflow train or trl extra (") and reason in line


def test_no_trainer_and_no_tokenizer_is_imported_before_it_is_needed(tmp_path: Path) -> None:
    job = tool_job(tmp_path / "job")
    script = (
        "import sys; from train.cli import app;"
        f"app(['convert', {str(job)!r}, '-o', {str(tmp_path / 'o.jsonl')!r}], standalone_mode=False);"
        f"app(['validate', {str(tmp_path / 'o.jsonl')!r}], standalone_mode=False);"
        "print(sorted({'torch', 'transformers', 'pyarrow', 'trl', 'datasets', 'numpy'} & sys.modules.keys()))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert answer.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("levels", "good"), [(57, True), (58, False), (90, False)])
def test_a_field_that_is_nested_too_deeply_is_a_problem(tmp_path: Path, levels: int, good: bool) -> None:
    """Where `load_dataset` 5.2 reads a file, and where it says "Recursion level in ArrowSchema struct exceeded"."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    for _ in range(levels - 1):
        call["function"]["arguments"] = {"a": call["function"]["arguments"]}  # type: ignore[index]
    made = json.dumps(call).replace("{}", '{"a": 1}')
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": [{"role": "user", "content": "x"}], "completion": [{"role": "assistant", "content": "", '
        '"tool_calls": [' + made + ']}], "tools": null}\n'
    )
    problems = validate(tmp_path / "rows.jsonl", "trl-sft").problems
    assert any("nested deeper" in problem for problem in problems) is not good, problems
