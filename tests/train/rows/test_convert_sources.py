"""What rows are made from: calls of each dialect, files of rows, logs with damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from capture.errors import FileFormatError
from tests.train.build import GOLDEN, conversation, line, make_job
from tests.train.conversion import options, results_line, rows_of
from train.errors import BadInput, NothingWritten
from train.groups.groups import GroupOptions
from train.rows.convert import convert

ROOT = Path(__file__).parents[3]


def test_a_half_written_line_loses_only_itself(tmp_path: Path) -> None:
    whole = json.dumps(conversation(1)[0]).encode() + b"\n"
    job = make_job(tmp_path / "job", [{"journal": whole + whole[:200]}])
    warned: list[str] = []
    made = convert(job, tmp_path / "o.jsonl", options(), on_warning=warned.append)
    assert made.rows == 1
    assert any("cut off while it was being written" in warning for warning in warned)


def test_two_rollouts_of_one_name_are_both_there(tmp_path: Path) -> None:
    for job in ("one", "two"):
        make_job(tmp_path / "jobs" / job, [{"name": "task__1"}])
    convert(tmp_path / "jobs", tmp_path / "o.jsonl", options())
    assert [row["source_rollout_dir"] for row in rows_of(tmp_path / "o.jsonl")] == ["one/task__1", "two/task__1"]


def test_a_bare_folder_of_the_stand_alone_proxy_has_rows_without_a_reward(tmp_path: Path) -> None:
    journal = tmp_path / "captures/default/trajectory/llm_trajectory.jsonl"
    journal.parent.mkdir(parents=True)
    journal.write_text("".join(json.dumps(call) + "\n" for call in conversation(2)))
    convert(tmp_path / "captures", tmp_path / "o.jsonl", options(format="trl-sft-ids"))
    assert [row["reward"] for row in rows_of(tmp_path / "o.jsonl")] == [None]


def test_an_anthropic_call_is_chat_too(tmp_path: Path) -> None:
    call = line(0, [1, 2], [3])
    call["request"] |= {"path": "/v1/messages"}
    call["request"]["body"] = {
        "model": "m",
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": [{"name": "write", "input_schema": {"type": "object", "properties": {}}}],
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm"},
                {"type": "tool_use", "id": "t1", "name": "write", "input": {"path": "a"}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "ok"}]},
        ],
    }  # fmt: skip
    call["response"]["body"] = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "done"}]}
    job = make_job(tmp_path / "job", [{"calls": [call]}])
    convert(job, tmp_path / "o.jsonl", options())
    (row,) = rows_of(tmp_path / "o.jsonl")
    assert [message["role"] for message in row["prompt"]] == ["system", "user", "assistant", "tool"]
    assert row["prompt"][2]["tool_calls"][0]["function"] == {"name": "write", "arguments": {"path": "a"}}
    assert row["completion"] == [{"role": "assistant", "content": "done"}]
    assert json.loads(row["tools"])[0]["function"]["name"] == "write"


def test_a_responses_call_is_chat_too(tmp_path: Path) -> None:
    call = line(0, [1, 2], [3])
    call["request"] |= {"path": "/v1/responses"}
    call["request"]["body"] = {
        "model": "m", "instructions": "Be brief.",
        "tools": [{"type": "function", "name": "write", "parameters": {"type": "object", "properties": {}}}],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
            {"type": "function_call", "call_id": "t1", "name": "write", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "t1", "output": "ok"},
        ],
    }  # fmt: skip
    call["response"]["body"] = {
        "output": [
            {"type": "reasoning", "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]},
        ]
    }
    job = make_job(tmp_path / "job", [{"calls": [call]}])
    convert(job, tmp_path / "o.jsonl", options())
    (row,) = rows_of(tmp_path / "o.jsonl")
    assert [message["role"] for message in row["prompt"]] == ["system", "user", "assistant", "tool"]
    assert row["completion"] == [{"role": "assistant", "content": "done"}]


def test_a_text_completion_has_ids_and_no_messages(tmp_path: Path) -> None:
    call = line(0, [1, 2], [3, 4])
    call["request"] |= {"path": "/v1/completions", "body": {"model": "m", "prompt": "Once"}}
    call["response"]["body"] = {"choices": [{"index": 0, "text": " upon a time"}]}
    job = make_job(tmp_path / "job", [{"calls": [call]}])
    assert convert(job, tmp_path / "i.jsonl", options(format="trl-sft-ids")).rows == 1
    with pytest.raises(NothingWritten) as caught:
        convert(job, tmp_path / "m.jsonl", options())
    assert "not a chat; trl-sft-ids takes text completions" in caught.value.notes[0]


# --- files of rows


def test_a_results_file_is_a_source_of_message_rows(tmp_path: Path) -> None:
    source = tmp_path / "results.jsonl"
    bad = results_line(reward=None, error={"error": "timeout"}, is_completed=False)
    source.write_text("".join(json.dumps(row) + "\n" for row in (results_line(), bad)))
    made = convert(source, tmp_path / "o.jsonl", options())
    (row,) = rows_of(tmp_path / "o.jsonl")
    assert row["completion"] == [{"role": "assistant", "content": "done"}]
    assert made.notes == ["left out 1 rollout(s): ended in an error, without a reward"]
    with pytest.raises(BadInput, match="has no token ids"):
        convert(source, tmp_path / "o.jsonl", options(format="trl-grpo"))
    with pytest.raises(BadInput, match="--group-advantage needs a job folder"):
        convert(source, tmp_path / "o.jsonl", options(group=GroupOptions()))


def test_a_results_file_of_benchflow_0_7_where_zero_means_unscored(tmp_path: Path) -> None:
    source = tmp_path / "results.jsonl"
    old = results_line(reward=0.0, error={"error": "sandbox"}, info={"task_id": "t", "unknown": 1}, surprise=[])
    source.write_text(json.dumps(old) + "\n" + json.dumps(results_line(info={"task_id": "t"}, reward=0.0)) + "\n")
    made = convert(source, tmp_path / "o.jsonl", options(include_errored=True))
    assert [row["reward"] for row in rows_of(tmp_path / "o.jsonl")] == [0.0]
    assert made.notes == ["left out 1 rollout(s): ended in an error, without a reward"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"prompt": [], "completion": []}\n{"prom', "line 2: invalid JSON"),
        ("[1]\n", "line 1: top-level record must be an object"),
        ("", "is empty"),
    ],
)
def test_a_broken_file_of_rows_names_the_line(tmp_path: Path, content: str, sentence: str) -> None:
    source = tmp_path / "results.jsonl"
    source.write_text(content)
    with pytest.raises((BadInput, FileFormatError), match=sentence):
        convert(source, tmp_path / "o.jsonl", options())
    assert not (tmp_path / "o.jsonl").exists()


def test_golden_lines_keep_their_ids(tmp_path: Path) -> None:
    """The golden lines are the proxy's own, of recorded engine bytes; each is a rollout here."""
    golden = dict(sorted(GOLDEN.items()))
    job = make_job(tmp_path / "job", [{"name": name, "calls": [call]} for name, call in golden.items()])
    convert(job, tmp_path / "o.jsonl", options(format="trl-sft-ids", row_mode="exchange"))
    rows = {row["rollout"]: row for row in rows_of(tmp_path / "o.jsonl")}
    complete = {
        name: call["metadata"]["token_capture"]
        for name, call in golden.items()
        if call["metadata"]["outcome"] == "ok" and not call["metadata"]["token_capture"]["unavailable"]
    }
    assert rows.keys() == complete.keys() and len(rows) > 2
    for name, capture in complete.items():
        assert rows[name]["input_ids"] == capture["prompt_token_ids"] + capture["completions"][0]["token_ids"]
        assert rows[name]["sampled_tokens"] == len(capture["completions"][0]["token_ids"])


@pytest.mark.parametrize("reward", [True, float("nan"), "1.0"])
def test_an_invalid_reward_is_none_with_a_warning(tmp_path: Path, reward: Any) -> None:
    job = make_job(tmp_path / "job", [{"reward": reward}])
    warned: list[str] = []
    convert(job, tmp_path / "o.jsonl", options(), on_warning=warned.append)
    assert [row["reward"] for row in rows_of(tmp_path / "o.jsonl")] == [None]
    assert "counts as unscored" in warned[0]
    with pytest.raises(NothingWritten):
        convert(job, tmp_path / "o.jsonl", options(format="trl-grpo"))


def test_a_reward_out_of_range_is_written_with_a_warning(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"reward": -2.5}])
    warned: list[str] = []
    convert(job, tmp_path / "o.jsonl", options(), on_warning=warned.append)
    assert [row["reward"] for row in rows_of(tmp_path / "o.jsonl")] == [-2.5]
    assert "outside of 0 to 1" in warned[0]


def test_a_result_that_is_not_json_loses_only_its_rollout(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{}, {}])
    broken_one = sorted(job.glob("*/result.json"))[0]
    broken_one.write_text('{"task_name": ')
    warned: list[str] = []
    assert convert(job, tmp_path / "o.jsonl", options(), on_warning=warned.append).rows == 1
    assert warned == [f"skipping {broken_one}: not a readable JSON object"]


def test_a_file_that_is_not_a_rollout_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(BadInput, match="is not a rollout; give a job folder"):
        convert(tmp_path / "notes.txt", tmp_path / "o.jsonl", options())


def test_a_log_that_cannot_be_read_loses_only_its_rollout(tmp_path: Path) -> None:
    """A capture of a schema that this version does not know."""
    odd = conversation(1)
    odd[0]["metadata"]["token_capture"]["schema_version"] = "benchflow.token_capture.v9"
    job = make_job(tmp_path / "job", [{"calls": odd}, {}])
    made = convert(job, tmp_path / "o.jsonl", options(format="trl-sft-ids", row_mode="segment"))
    assert made.rows == 1
    assert made.notes == [
        "left out 1 rollout(s): none of its calls is complete (bench train token-coverage says why)",
    ]
    assert convert(job, tmp_path / "m.jsonl", options()).rows == 2, "its messages are still there"


def test_unknown_keys_in_a_line_are_ignored(tmp_path: Path) -> None:
    calls = conversation(1)
    calls[0]["surprise"] = {"a": 1}
    calls[0]["metadata"]["token_capture"]["completions"][0]["routing"] = {"source": "vllm/npy-base64"}
    job = make_job(tmp_path / "job", [{"calls": calls, "result": {"surprise": []}}])
    for form in ("trl-sft", "trl-sft-ids"):
        assert convert(job, tmp_path / f"{form}.jsonl", options(format=form)).rows == 1


def test_a_journal_itself_can_be_given(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{}])
    journal = next(job.glob("*/trajectory/llm_trajectory.jsonl"))
    assert convert(journal, tmp_path / "o.jsonl", options(row_mode="exchange")).rows == 2
