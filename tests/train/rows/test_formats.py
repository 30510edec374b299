"""Each format's rows: the traps of the trainers that load them, and the checks that catch what is wrong."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.train.build import Line, conversation, make_job
from tests.train.conversion import results_line
from tests.train.tool_calls import (
    ARGUMENTS,
    BASH,
    SUFFIX,
    WRITE,
    answered,
    call_message,
    other_call,
    sampled_count,
    tool_rollout,
)
from train.errors import BadInput, NothingWritten, TrainError
from train.rollouts.messages import PlainHistory, plain
from train.rows.convert import ConvertOptions, convert
from train.rows.formats import NAMES, find_format
from train.rows.writers import read_rows

MESSAGE_FORMATS = [name for name in NAMES if find_format(name).reads == "messages"]


def made(tmp_path: Path, form: str, calls: list[Line], **options: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a rollout of these calls, and the notes."""
    job = make_job(tmp_path / "job", [{"calls": calls}])
    out = tmp_path / SUFFIX.get(form, "rows.jsonl")
    result = convert(job, out, ConvertOptions(format=form, **options)).notes
    return [row for _, _, row in read_rows(out, find_format(form))], result


@pytest.mark.parametrize("form", NAMES)
def test_what_is_written_passes_the_formats_own_check(tmp_path: Path, form: str) -> None:
    rows, _ = made(tmp_path, form, tool_rollout([WRITE, BASH]))
    assert len(rows) == 1
    assert find_format(form).check(rows[0]) == []
    assert rows[0].get("reward", rows[0].get("score")) == 1.0


@pytest.mark.parametrize("form", MESSAGE_FORMATS)
def test_content_is_a_string_in_every_message(tmp_path: Path, form: str) -> None:
    """Engines answer a tool call with content null; templates that concatenate it fail."""
    rows, _ = made(tmp_path, form, tool_rollout())
    row = rows[0]
    messages = row.get("messages") or [*row["prompt"], *row["completion"]]
    assert [type(message["content"]) for message in messages] == [str] * len(messages)


@pytest.mark.parametrize(("form", "column"), [("trl-sft", "tools"), ("prime-sft", "tool_defs"), ("skyrl-sft", "tools")])
def test_tools_are_a_json_string_where_arrow_would_fill_in_nulls(tmp_path: Path, form: str, column: str) -> None:
    rows, _ = made(tmp_path, form, tool_rollout([WRITE, BASH]))
    assert json.loads(rows[0][column]) == [WRITE, BASH]


@pytest.mark.parametrize("form", MESSAGE_FORMATS)
def test_a_row_without_tools_announces_none(tmp_path: Path, form: str) -> None:
    """TRL's Llama template prints "Environment: ipython" for tools that are an empty list."""
    rows, _ = made(tmp_path, form, conversation(1))
    row = rows[0] | rows[0].get("extra", {})
    assert [row.get(name) for name in ("tools", "tool_defs")] == [None, None]
    assert find_format(form).check(rows[0]) == []
    assert ("tools" in rows[0]) == (form in ("trl-sft", "skyrl-sft", "verl-sft")), "TRL selects the column by name"


def test_a_parquet_column_of_rows_without_tools_has_a_type(tmp_path: Path) -> None:
    made(tmp_path, "verl-sft", conversation(1))
    assert str(pq.read_schema(tmp_path / "train.parquet").field("tools").type) == "string"


# --- arguments


def test_arguments_are_objects_for_trl_and_strings_for_prime_and_skyrl(tmp_path: Path) -> None:
    for form, wanted in (
        ("trl-sft", ARGUMENTS),
        ("prime-sft", json.dumps(ARGUMENTS)),
        ("skyrl-sft", json.dumps(ARGUMENTS)),
    ):
        rows, _ = made(tmp_path / form, form, tool_rollout())
        messages = rows[0].get("messages") or rows[0]["prompt"]
        assert messages[1]["tool_calls"][0]["function"]["arguments"] == wanted


def test_malformed_arguments_leave_a_reply_out_where_trainers_parse_them(tmp_path: Path) -> None:
    cut = answered(conversation(1)[0], call_message(arguments='{"path": "/app'), [WRITE])
    for form in ("trl-sft", "prime-sft", "skyrl-sft"):
        with pytest.raises(NothingWritten) as caught:
            made(tmp_path / form, form, [cut])
        assert "a tool call's arguments are not a JSON object" in caught.value.notes[0]
    rows, _ = made(tmp_path / "ids", "trl-sft-ids", [cut])
    assert rows[0]["sampled_tokens"] == 4


@pytest.mark.parametrize(
    "arguments", ['{"a": NaN}', '{"a": "\\ud83d"}', '{"a": 123456789012345678901234567890}', "[1]"]
)
def test_arguments_that_strict_json_cannot_represent_give_no_row(tmp_path: Path, arguments: str) -> None:
    odd = answered(conversation(1)[0], call_message(arguments=arguments), [WRITE])
    with pytest.raises(NothingWritten):
        made(tmp_path, "trl-sft", [odd])


def test_a_malformed_call_in_the_prompt_is_written_as_benchflow_does(tmp_path: Path) -> None:
    calls = tool_rollout()
    calls[1]["request"]["body"]["messages"][1] = call_message(arguments="{bad")
    rows, _ = made(tmp_path, "trl-sft", calls)
    arguments = rows[0]["prompt"][1]["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"_malformed_json_arguments": "{bad"}


# --- verl


def test_verl_rows_are_structs(tmp_path: Path) -> None:
    rows, result = made(tmp_path, "verl-sft", tool_rollout())
    schema = pq.read_schema(tmp_path / "train.parquet")
    assert str(schema.field("tools").type).startswith("list<element: struct<")
    assert rows[0]["tools"] == [WRITE]
    assert rows[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert result == []


def test_verl_arguments_become_strings_where_structs_would_be_filled_with_nulls(tmp_path: Path) -> None:
    rows, result = made(tmp_path, "verl-sft", other_call())
    arguments = [m["tool_calls"][0]["function"]["arguments"] for m in rows[0]["messages"] if m["tool_calls"]]
    assert [json.loads(argument) for argument in arguments] == [ARGUMENTS, {"command": "cat /app/answer.txt"}]
    assert arguments[0] == json.dumps(ARGUMENTS), "as a template's tojson writes it"
    assert result[0].startswith("tool calls differ in their arguments")
    assert result[1].startswith("tools differ in their parameters: Parquet fills each with the others' keys")


def test_verl_arguments_keep_their_order(tmp_path: Path) -> None:
    calls = tool_rollout()
    answered(calls[1], call_message("write", dict(reversed(ARGUMENTS.items())), "call_2"), [WRITE])
    rows, _ = made(tmp_path, "verl-sft", calls)
    arguments = [m["tool_calls"][0]["function"]["arguments"] for m in rows[0]["messages"] if m["tool_calls"]]
    assert arguments == [json.dumps(ARGUMENTS), json.dumps(dict(reversed(ARGUMENTS.items())))]


def test_verl_tools_without_parameters_can_be_written(tmp_path: Path) -> None:
    bare = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    rows, _ = made(tmp_path, "verl-sft", tool_rollout([bare]))
    assert rows[0]["tools"][0]["function"]["name"] == "now"


def test_verl_rows_carry_enable_thinking(tmp_path: Path) -> None:
    calls = tool_rollout()
    for call in calls:
        call["request"]["body"]["chat_template_kwargs"] = {"enable_thinking": False}
    rows, _ = made(tmp_path / "verl", "verl-sft", calls)
    assert rows[0]["enable_thinking"] is False
    rows, _ = made(tmp_path / "trl", "trl-sft", calls)
    assert rows[0]["chat_template_kwargs"] == {"enable_thinking": False}


def test_parquet_rows_with_other_columns_and_types_in_one_file(tmp_path: Path) -> None:
    """Rows of two agents: one has tools, a usage and floats where the other has whole numbers."""
    plain = conversation(1)
    plain[0]["response"]["body"].pop("usage", None)
    job = make_job(tmp_path / "job", [{"calls": plain, "reward": 1}, {"calls": tool_rollout(), "reward": 0.5}])
    for form in ("verl-sft", "prime-sft"):
        made = convert(job, tmp_path / f"{form}.parquet", ConvertOptions(format=form))
        assert made.rows == 2
        assert pq.read_table(tmp_path / f"{form}.parquet").column("reward").to_pylist() == [1.0, 0.5]


def test_tools_that_fit_into_no_table_are_a_sentence(tmp_path: Path) -> None:
    odd = copy.deepcopy(BASH)
    odd["function"]["parameters"]["properties"] = {"command": {"type": ["string", "null"]}}
    job = make_job(tmp_path / "job", [{"calls": tool_rollout([BASH])}, {"calls": tool_rollout([odd])}])
    with pytest.raises(TrainError, match="the rows do not fit into one Parquet table"):
        convert(job, tmp_path / "rows/t.parquet", ConvertOptions(format="verl-sft"))
    assert list((tmp_path / "rows").iterdir()) == []


# --- OpenEnv


def test_an_episode_has_its_tool_trace_and_a_number_for_reward(tmp_path: Path) -> None:
    rows, _ = made(tmp_path, "openenv-episodes", tool_rollout())
    (row,) = rows
    assert (row["reward"], row["done"], row["task"], row["verify_metrics"]) == (
        1.0,
        True,
        "write-number",
        {"reward": 1.0},
    )
    (traced,) = row["tool_trace"]
    assert (traced["tool_name"], traced["arguments"]) == ("write", ARGUMENTS)
    assert traced["result"] == {"data": "ok", "done": True, "metadata": {"tool_call_id": "call_1"}, "error": None}
    metadata = json.loads((tmp_path / "episodes/metadata.json").read_text())
    assert metadata == {"format": "openenv-episodes", "episodes": 1, "results": "results.jsonl"}


def test_trials_of_one_name_are_different_episodes(tmp_path: Path) -> None:
    for trial in ("trial-01", "trial-02"):
        for job in ("a", "b"):
            make_job(tmp_path / "jobs" / trial / job, [{"name": "t__0"}, {"name": "t__1"}])
    convert(tmp_path / "jobs", tmp_path / "episodes", ConvertOptions(format="openenv-episodes"))
    ids = [row["episode_id"] for _, _, row in read_rows(tmp_path / "episodes", find_format("openenv-episodes"))]
    assert len(ids) == 8 == len(set(ids)) and "trial-01/a/t__0" in ids


@pytest.mark.parametrize("info", [{"rollout_name": "t__0"}, {}, {"rollout_name": "t__0", "rollout_dir": None}])
def test_rows_of_one_name_are_different_episodes(tmp_path: Path, info: dict[str, Any]) -> None:
    source = tmp_path / "results.jsonl"
    source.write_text("".join(json.dumps(results_line(info=info)) + "\n" for _ in range(3)))
    convert(source, tmp_path / "episodes", ConvertOptions(format="openenv-episodes"))
    rows = [row for _, _, row in read_rows(tmp_path / "episodes", find_format("openenv-episodes"))]
    assert len({row["episode_id"] for row in rows}) == 3


def test_an_unscored_rollout_gives_no_episode_and_no_grpo_row(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"reward": None}])
    for form in ("openenv-episodes", "trl-grpo"):
        with pytest.raises(NothingWritten) as caught:
            convert(job, tmp_path / SUFFIX.get(form, "rows.jsonl"), ConvertOptions(format=form))
        assert "not scored, and the format needs a reward" in caught.value.notes[0]
    assert [path.name for path in tmp_path.iterdir()] == ["job"], "no empty folder either"


# --- exact ids


def test_exact_rows_train_what_was_sampled_and_nothing_else(tmp_path: Path) -> None:
    calls = tool_rollout()
    rows, _ = made(tmp_path / "sft", "trl-sft-ids", calls)
    (row,) = rows
    last = calls[1]["metadata"]["token_capture"]
    assert row["input_ids"] == last["prompt_token_ids"] + last["completions"][0]["token_ids"]
    assert sum(label != -100 for label in row["labels"]) == sampled_count(calls) == row["sampled_tokens"]
    rows, _ = made(tmp_path / "grpo", "trl-grpo", calls)
    (row,) = rows
    assert row["prompt_ids"] == calls[0]["metadata"]["token_capture"]["prompt_token_ids"]
    assert row["prompt_ids"] + row["completion_ids"] == last["prompt_token_ids"] + last["completions"][0]["token_ids"]
    recorded = [value for call in calls for value in call["metadata"]["token_capture"]["completions"][0]["logprobs"]]
    assert [value for mask, value in zip(row["env_mask"], row["logprobs"], strict=True) if mask] == recorded
    assert {value for mask, value in zip(row["env_mask"], row["logprobs"], strict=True) if not mask} == {0.0}
    assert (row["advantage"], row["group"]) == (None, None)


# --- checks


def good(form: str) -> dict[str, Any]:
    call = call_message(arguments=json.dumps(ARGUMENTS)) | {"content": ""}
    messages = [{"role": "user", "content": "go"}, call, {"role": "tool", "tool_call_id": "call_1", "content": "ok"}]
    final = {"role": "assistant", "content": "done"}
    if form == "trl-sft":
        return {"prompt": messages, "completion": [final], "tools": json.dumps([WRITE])}
    return {"messages": [*messages, final], "tool_defs": json.dumps([WRITE])}


@pytest.mark.parametrize("form", ["trl-sft", "prime-sft"])
def test_a_good_row_has_nothing_wrong(form: str) -> None:
    assert find_format(form).check(good(form)) == []


def spoil(row: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *way, last = path.split(".")
    at: Any = row
    for name in way:
        at = at[int(name) if name.isdigit() else name]
    at[int(last) if last.isdigit() else last] = value
    return row


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("messages.0", "go", "messages[0] must be object"),
        ("messages.3.reasoning_content", "hm", "messages[3] has banned keys: reasoning_content"),
        ("messages.0.role", "human", "messages[0] role 'human' invalid"),
        ("messages.2.role", "system", "messages[2]: system message must be at index 0"),
        ("messages.3.content", None, "messages[3] needs content or tool_calls"),
        ("messages.1.content", None, 'messages[1] has null content; templates concatenate it, write ""'),
        ("messages.0.tool_calls", [], "messages[0]: only assistant messages may contain tool_calls"),
        ("messages.2.tool_call_id", None, "messages[2]: tool message requires tool_call_id"),
        ("messages.2.tool_call_id", "x", "messages[2]: tool message references unknown tool_call_id 'x'"),
        ("messages.1.tool_calls", "write", "messages[1]: tool_calls must be a list"),
        ("messages.1.tool_calls.0.id", "", "messages[1].tool_calls[0].id must be a non-empty string"),
        ("messages.1.tool_calls.0.type", "tool", "messages[1].tool_calls[0].type must be 'function'"),
        (
            "messages.1.tool_calls.0.function.name", "rm",
            "messages[1].tool_calls[0].function.name 'rm' not found in tool_defs",
        ),
        (
            "messages.1.tool_calls.0.function.arguments", "{",
            "messages[1].tool_calls[0].function.arguments is not valid JSON",
        ),
        (
            "messages.1.tool_calls.0.function.arguments", "[]",
            "messages[1].tool_calls[0].function.arguments must be a JSON object",
        ),
        ("messages", [{"role": "user", "content": "go"}], "no assistant message"),
        ("messages", [], "messages must be a non-empty message list"),
        ("tool_defs", "[]", "messages[1]: assistant tool_calls require non-empty tool_defs"),
        ("tool_defs", "[{}]", "tool_defs[0] missing function name"),
        ("tool_defs", "{", "tool_defs is not valid JSON"),
    ],
)  # fmt: skip
def test_problems_are_named_in_benchflows_words(path: str, value: Any, sentence: str) -> None:
    assert sentence in find_format("prime-sft").check(spoil(good("prime-sft"), path, value))


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("tool_defs", [], "TRL rows must use tools, not tool_defs"),
        ("prompt", [], "prompt must be a non-empty message list"),
        ("completion", [], "completion must contain exactly one assistant message"),
        ("completion.0.role", "user", "completion must contain exactly one assistant message"),
    ],
)
def test_trl_rows_have_their_own_rules(path: str, value: Any, sentence: str) -> None:
    assert sentence in find_format("trl-sft").check(spoil(good("trl-sft"), path, value))


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"input_ids": [1, 2], "labels": [-100]}, "labels has 1 entries for 2 input_ids"),
        ({"input_ids": [1, 2], "labels": [-100, 3]}, "labels[1] is 3, neither -100 nor the id 2 at its place"),
        ({"input_ids": [1, True], "labels": [-100, -100]}, "input_ids[1] is True, not a token id"),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, "no label is trained"),
        ({"input_ids": [1, 2]}, "labels must be a list"),
    ],
)
def test_exact_rows_are_checked_id_by_id(row: dict[str, Any], sentence: str) -> None:
    assert sentence in find_format("trl-sft-ids").check(row)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"env_mask": [1]}, "env_mask has 1 entries for 2 completion_ids"),
        ({"env_mask": [0, 0], "logprobs": [0.0, 0.0]}, "no token was sampled"),
        ({"logprobs": [-0.5, None]}, "logprobs[1] is None, not a finite number"),
        ({"logprobs": [0.5, 0.0]}, "logprobs[0] is 0.5 where env_mask is 1"),
        ({"logprobs": [-0.5, -0.5]}, "logprobs[1] is -0.5 where env_mask is 0"),
        ({"reward": True}, "reward must be a number or null"),
    ],
)
def test_grpo_rows_are_checked(change: dict[str, Any], sentence: str) -> None:
    row = {"prompt_ids": [1], "completion_ids": [2, 3], "env_mask": [1, 0], "logprobs": [-0.5, 0.0], "reward": 1.0}
    assert find_format("trl-grpo").check(row) == []
    assert sentence in find_format("trl-grpo").check(row | change)


def test_an_episode_without_a_number_for_reward_is_refused() -> None:
    row = {
        "episode_id": "a", "messages": [], "reward": None, "done": True, "tool_trace": [], "metrics": {},
        "verify_metrics": {}, "artifacts": {}, "extra": {},
    }  # fmt: skip
    assert find_format("openenv-episodes").check(row) == ["reward must be a number"]
    assert find_format("openenv-episodes").check(row | {"reward": 0.5}) == []


def test_verl_needs_a_parquet_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(BadInput, match="is not a Parquet file"):
        list(read_rows(tmp_path / "rows.jsonl", find_format("verl-sft")))
    (tmp_path / "rows.parquet").write_text("{}\n")
    with pytest.raises(BadInput, match="is not a readable Parquet file"):
        list(read_rows(tmp_path / "rows.parquet", find_format("verl-sft")))


def test_plain_history_equals_each_call_converted_alone() -> None:
    """Only its new messages are looked at; another system prompt, or an edited message, begins anew."""
    system, hi = {"role": "system", "content": None}, {"role": "user", "content": [{"text": "a"}, {"text": "b"}]}
    late, tool = {"role": "developer", "content": "be brief"}, {"role": "tool", "tool_call_id": "c", "content": "ok"}
    calls = [[system, hi], [system, hi, late, tool], [late, hi, tool], [hi], [hi, system], [hi, system, hi]]
    history = PlainHistory()
    assert [history.plain(messages) for messages in calls] == [plain(messages).messages for messages in calls]
