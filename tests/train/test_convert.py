"""`bench train convert`: which rollouts and calls become rows, what is said of the others, what a failure leaves."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner, Result

from capture.errors import FileFormatError
from tests.train.build import GOLDEN, broken, conversation, failed, line, make_job, make_rollout, uncaptured
from tests.train.tool_calls import ASK, tool_job, tool_rollout
from train.cli import app
from train.errors import BadInput, NoSuchPath, NothingWritten, TrainError
from train.groups.groups import GroupOptions
from train.groups.withhold import WithheldReason
from train.rows.convert import Options, convert
from train.rows.skip_reasons import REASONS, WITHHELD

ROOT = Path(__file__).parents[2]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in path.read_text().splitlines()]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["convert", *(str(one) for one in arguments)])


def options(**given: Any) -> Options:
    return Options(**{"format": "trl-sft", **given})


def told(made: Any) -> str:
    return "\n".join(made.told)


# --- row modes


def test_the_seeds_example_two_rows_of_one_rollout(tmp_path: Path) -> None:
    job = tool_job(tmp_path / "jobs/rl-capture")
    out = tmp_path / "rows/rl-capture.jsonl"
    result = run(job, "--format", "trl-sft", "--row-mode", "exchange", "--out", out)
    assert result.exit_code == 0
    assert result.stdout == f"Converted 2 row(s) from 1 rollout(s) -> {out}\n"
    first, second = rows_of(out)
    assert first["prompt"] == ASK
    assert first["completion"][0]["tool_calls"][0]["function"]["arguments"] == {
        "path": "/app/answer.txt",
        "content": "42",
    }
    assert second["completion"] == [{"role": "assistant", "content": "Done: 42 is written."}]
    assert [first["exchange_index"], second["exchange_index"]] == [0, 1]


def test_the_default_is_one_row_a_rollout_with_the_last_reply(tmp_path: Path) -> None:
    job = tool_job(tmp_path / "job")
    made = convert(job, tmp_path / "o.jsonl", options())
    (row,) = rows_of(tmp_path / "o.jsonl")
    assert (made.rows, made.rollouts) == (1, 1)
    assert [message["role"] for message in row["prompt"]] == ["user", "assistant", "tool"]
    assert row["completion"][0]["content"] == "Done: 42 is written."


def test_a_row_a_branch_where_every_reply_trains(tmp_path: Path) -> None:
    calls = conversation(3)
    other = conversation(2, first=500, start=3)
    for one in other:  # a second conversation under another question
        one["request"]["body"]["messages"][0]["content"] = "Name two rivers."
    job = make_job(tmp_path / "job", [{"calls": calls + other}])
    convert(job, tmp_path / "o.jsonl", options(format="prime-sft"))
    rows = rows_of(tmp_path / "o.jsonl")
    assert [[m["content"] for m in row["messages"] if m["role"] == "assistant"] for row in rows] == [
        ["reply 0", "reply 1", "reply 2"],
        ["reply 0", "reply 1"],
    ]


def test_a_reply_that_came_back_in_other_tokens_is_the_same_turn_for_message_rows(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"calls": broken(3)}])
    convert(job, tmp_path / "o.jsonl", options(format="prime-sft"))
    (row,) = rows_of(tmp_path / "o.jsonl")
    assert [m["content"] for m in row["messages"] if m["role"] == "assistant"] == ["reply 0", "reply 1", "reply 2"]


def test_branches_that_share_a_reply_say_that_it_trains_twice(tmp_path: Path) -> None:
    calls = conversation(2)
    fork = copy.deepcopy(calls[1])
    fork["metadata"]["call"] = 2
    fork["request"]["body"]["messages"][-1]["content"] = "another question"
    job = make_job(tmp_path / "job", [{"calls": [*calls, fork]}])
    made = convert(job, tmp_path / "o.jsonl", options(format="prime-sft"))
    assert made.rows == 2
    assert "1 reply(s) stand in more than one branch" in told(made)


def test_a_reply_that_came_back_changed_cuts_the_conversation_and_is_told(tmp_path: Path) -> None:
    calls = conversation(2)
    calls[1]["request"]["body"]["messages"][1]["content"] = "what the agent made of it"
    job = make_job(tmp_path / "job", [{"calls": calls}])
    made = convert(job, tmp_path / "o.jsonl", options(format="prime-sft"))
    assert [row["messages"][-1]["content"] for row in rows_of(tmp_path / "o.jsonl")] == ["reply 0", "reply 1"]
    assert "1 reply(s) did not come back in the next prompt as they were" in told(made)


def test_segments_of_a_broken_rollout_are_rows_of_their_own(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"calls": broken(2)}])
    with pytest.raises(NothingWritten) as caught:
        convert(job, tmp_path / "o.jsonl", options(format="trl-sft-ids"))
    assert "--row-mode segment keeps every part that is exact" in "\n".join(caught.value.told)
    made = convert(job, tmp_path / "o.jsonl", options(format="trl-sft-ids", row_mode="segment"))
    assert made.rows == 2
    assert sum(row["sampled_tokens"] for row in rows_of(tmp_path / "o.jsonl")) == 8


def test_a_shared_sampled_span_is_trained_once(tmp_path: Path) -> None:
    calls = conversation(2)
    fork = line(2, [*calls[1]["metadata"]["token_capture"]["prompt_token_ids"][:16], 7, 8, 9], [1, 2, 3])
    job = make_job(tmp_path / "job", [{"calls": [*calls, fork]}])
    convert(job, tmp_path / "o.jsonl", options(format="trl-sft-ids", row_mode="segment"))
    rows = rows_of(tmp_path / "o.jsonl")
    trained = [sum(label != -100 for label in row["labels"]) for row in rows]
    assert trained == [8, 3], "the first reply is context in the second row"


def test_a_rollout_that_branches_is_no_row_of_trl_grpo(tmp_path: Path) -> None:
    calls = conversation(2)
    fork = line(2, [*calls[1]["metadata"]["token_capture"]["prompt_token_ids"][:16], 7, 8, 9], [1, 2, 3])
    job = make_job(tmp_path / "job", [{"calls": [*calls, fork]}, {}])
    made = convert(job, tmp_path / "o.jsonl", options(format="trl-grpo"))
    assert made.rows == 1
    assert "left out 1 rollout(s): its calls branch into several sequences" in told(made)


def test_the_choice_the_agent_went_on_with_is_the_reply(tmp_path: Path) -> None:
    first, second = conversation(2)
    choices = first["response"]["body"]["choices"]
    other = copy.deepcopy(choices[0]) | {"index": 0}
    other["message"]["content"] = "not taken up"
    first["response"]["body"]["choices"] = [other, choices[0] | {"index": 1}]
    capture = first["metadata"]["token_capture"]
    taken = capture["completions"][0] | {"index": 1}
    capture["completions"] = [{**taken, "index": 0, "token_ids": [5, 6, 7, 8]}, taken]
    job = make_job(tmp_path / "job", [{"calls": [first, second]}])
    convert(job, tmp_path / "m.jsonl", options(row_mode="exchange"))
    assert rows_of(tmp_path / "m.jsonl")[0]["completion"][0]["content"] == "reply 0"
    convert(job, tmp_path / "i.jsonl", options(format="trl-sft-ids", row_mode="exchange"))
    assert rows_of(tmp_path / "i.jsonl")[0]["labels"][-4:] == taken["token_ids"]


# --- what is left out, and said


def test_every_rollout_left_out_is_counted_by_its_reason(tmp_path: Path) -> None:
    job = make_job(
        tmp_path / "job",
        [
            {"reward": 1.0},
            {"reward": 0.0},
            {"reward": 1.0, "error": "Agent prompt exceeded wall-clock budget 900s"},
            {"reward": None, "error": "no"},
            {"calls": None},
            {"reward": None},
        ],
        state="running",
    )
    make_rollout(job, name="still-running__1", finished=False)
    result = run(job, "--format", "trl-sft", "--min-reward", "0.5", "-o", tmp_path / "o.jsonl")
    assert result.stdout.startswith("Converted 1 row(s) from 1 rollout(s) -> ")
    assert result.stderr.splitlines() == [
        "left out 1 rollout(s): not finished: no result.json yet",
        "left out 1 rollout(s): ended in an error; --include-errored keeps those that were scored",
        "left out 1 rollout(s): ended in an error, without a reward",
        "left out 2 rollout(s): reward below --min-reward, or none",
        "left out 1 rollout(s): no log of model calls",
    ]


def test_scored_errors_come_in_when_asked_for(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{}, {"error": "timeout"}, {"result": {"partial_trajectory": True}}])
    assert convert(job, tmp_path / "o.jsonl", options()).rows == 1
    assert convert(job, tmp_path / "o.jsonl", options(include_errored=True)).rows == 3


def test_failed_cut_and_side_calls_are_no_rows(tmp_path: Path) -> None:
    calls = conversation(2)
    title = line(2, [1, 2], [3], call_purpose="title")
    cut = line(3, [1, 2], [3], outcome="aborted")
    job = make_job(tmp_path / "job", [{"calls": [*calls, title, cut, failed(4)]}])
    made = convert(job, tmp_path / "o.jsonl", options(row_mode="exchange"))
    assert made.rows == 2
    assert made.told == [
        "left out 1 call(s): the engine's answer was an error",
        "left out 1 call(s): cut off before the reply was over",
        "left out 1 call(s): a side call (title, summary, sub-agent), not the agent's own work",
    ]


def test_a_rollout_without_capture_gives_message_rows_and_no_ids(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"calls": uncaptured(1)}])
    assert convert(job, tmp_path / "o.jsonl", options()).rows == 1
    with pytest.raises(NothingWritten) as caught:
        convert(job, tmp_path / "i.jsonl", options(format="trl-sft-ids"))
    assert "BENCHFLOW_CAPTURE_TOKEN_LOGPROBS=1" in caught.value.told[0]


def test_an_image_is_no_text(tmp_path: Path) -> None:
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    job = make_job(tmp_path / "job", [{}, {"calls": [line(0, [1], [2], messages=picture)]}])
    made = convert(job, tmp_path / "o.jsonl", options())
    assert (made.rows, made.told) == (1, ["left out 1 call(s): images or other parts that are no text"])


def test_reasoning_is_left_out_and_said(tmp_path: Path) -> None:
    calls = conversation(1)
    calls[0]["response"]["body"]["choices"][0]["message"]["reasoning_content"] = "two colours, hm"
    made = convert(make_job(tmp_path / "job", [{"calls": calls}]), tmp_path / "o.jsonl", options())
    assert "two colours, hm" not in (tmp_path / "o.jsonl").read_text()
    assert "1 row(s) end in a reply whose reasoning is left out" in told(made)


def test_a_reply_that_was_cut_trains_a_stop_token_it_never_sampled_and_that_is_told(tmp_path: Path) -> None:
    calls = conversation(1)
    calls[0]["response"]["body"]["choices"][0]["finish_reason"] = "length"
    job = make_job(tmp_path / "job", [{"calls": calls}])
    assert "1 row(s) end in a reply that was cut for its length" in told(convert(job, tmp_path / "o.jsonl", options()))
    assert convert(job, tmp_path / "i.jsonl", options(format="trl-sft-ids")).told == []


def test_plain_sampling_can_be_required(tmp_path: Path) -> None:
    plain = {
        "sent": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
        "session": {},
        "engine_defaults": None,
    }
    cold = {"sent": {**plain["sent"], "temperature": 0.7}, "session": {}, "engine_defaults": None}
    job = make_job(
        tmp_path / "job", [{"calls": conversation(2, sampling=plain)}, {"calls": conversation(2, sampling=cold)}]
    )
    for form in ("trl-grpo", "trl-sft"):
        made = convert(job, tmp_path / f"{form}.jsonl", options(format=form, require_plain_sampling=True))
        assert made.rows == 1
        assert "left out 1 row(s): sampled otherwise" in told(made)


def test_trl_grpo_says_once_a_rollout_how_it_was_sampled(tmp_path: Path) -> None:
    cold = {
        "sent": {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
        "session": {},
        "engine_defaults": None,
    }
    job = make_job(tmp_path / "job", [{"calls": conversation(3, sampling=cold)}])
    made = convert(job, tmp_path / "o.jsonl", options(format="trl-grpo"))
    (sentence,) = made.told
    assert "temperature 0.7" in sentence and "importance ratios" in sentence and "write-number__00000001" in sentence
    assert json.loads(rows_of(tmp_path / "o.jsonl")[0]["sampling"])[0]["sent"]["temperature"] == 0.7


# --- redaction

SECRET = "sk-" + "a1B2" * 8


def test_redact_takes_secrets_out_of_message_rows(tmp_path: Path) -> None:
    calls = conversation(1)
    calls[0]["request"]["body"]["messages"][0]["content"] = f"my key is {SECRET}"
    job = make_job(tmp_path / "job", [{"calls": calls}])
    convert(job, tmp_path / "o.jsonl", options())
    assert SECRET in (tmp_path / "o.jsonl").read_text()
    convert(job, tmp_path / "o.jsonl", options(redact=True))
    assert "my key is ***REDACTED***" in (tmp_path / "o.jsonl").read_text()


def test_ids_that_spell_a_secret_are_left_out_with_redact(tmp_path: Path) -> None:
    calls = conversation(1)
    calls[0]["request"]["body"]["messages"][0]["content"] = f"my key is {SECRET}"
    job = make_job(tmp_path / "job", [{"calls": calls}, {}])
    made = convert(job, tmp_path / "o.jsonl", options(format="trl-sft-ids", redact=True))
    assert (made.rows, made.told) == (
        1,
        ["left out 1 row(s): holds what looks like a secret, and token ids cannot be redacted"],
    )


# --- groups


def test_groups_come_whole_one_after_the_other_with_advantages(tmp_path: Path) -> None:
    job = make_job(
        tmp_path / "job",
        [{"task": task, "reward": reward} for reward in (0.0, 1.0) for task in ("a", "b")],
    )
    convert(job, tmp_path / "o.jsonl", options(format="trl-grpo", group=GroupOptions()))
    rows = rows_of(tmp_path / "o.jsonl")
    assert [row["task_id"] for row in rows] == ["a", "a", "b", "b"], "TRL takes consecutive rows as a group"
    assert [round(row["advantage"], 3) for row in rows] == [-0.707, 0.707] * 2
    assert rows[0]["group"] == "task=a|agent=pi-acp|model=vllm/my-policy|job=job"
    assert (rows[0]["advantage_kind"], rows[0]["ddof"], rows[0]["eps"], rows[0]["group_mean"]) == ("grpo", 1, 1e-4, 0.5)


def test_a_group_of_one_has_no_advantage(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{}])
    convert(job, tmp_path / "o.jsonl", options(group=GroupOptions()))
    assert [row["advantage"] for row in rows_of(tmp_path / "o.jsonl")] == [None]


def test_every_row_of_a_rollout_carries_the_rollouts_one_advantage(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"reward": 0.0, "calls": conversation(3)}, {"reward": 1.0}])
    convert(job, tmp_path / "o.jsonl", options(row_mode="exchange", group=GroupOptions()))
    found = [(row["rollout"][-1], round(row["advantage"], 3)) for row in rows_of(tmp_path / "o.jsonl")]
    assert found == [("1", -0.707)] * 3 + [("2", 0.707)] * 2, "statistics over rollouts, not rows"


def test_a_scored_timeout_stays_in_its_group(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"reward": 0.0, "error": "timeout"}, {"reward": 1.0}])
    assert convert(job, tmp_path / "o.jsonl", options(group=GroupOptions())).rows == 2


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"reward": None}, "left out 2 rollout(s): in a group with an unscored rollout"),
        ({"calls": None}, "left out 2 rollout(s): in a group with a rollout of no model calls"),
        ({"calls": broken(2)}, "left out 2 rollout(s): in a group of which some have a token sequence and some not"),
    ],
)
def test_a_group_with_one_bad_member_is_withheld_whole(tmp_path: Path, spec: dict[str, Any], sentence: str) -> None:
    job = make_job(tmp_path / "job", [{"reward": 0.0}, spec, {"task": "other"}, {"task": "other"}])
    made = convert(job, tmp_path / "o.jsonl", options(group=GroupOptions()))
    assert {row["task_id"] for row in rows_of(tmp_path / "o.jsonl")} == {"other"}
    assert sentence in made.told


def test_a_group_that_is_not_full_is_withheld(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"reward": float(k)} for k in range(3)])
    made = convert(job, tmp_path / "o.jsonl", options(group=GroupOptions(size=2)))
    assert made.rows == 2
    assert "left out 1 rollout(s): in a group that is not full" in made.told


def test_a_member_that_cannot_be_a_row_takes_its_group_with_it(tmp_path: Path) -> None:
    calls = conversation(2)
    fork = line(2, [*calls[1]["metadata"]["token_capture"]["prompt_token_ids"][:16], 7, 8, 9], [1, 2, 3])
    job = make_job(
        tmp_path / "job", [{"reward": 0.0}, {"calls": [*calls, fork]}, {"task": "b", "reward": 0.0}, {"task": "b"}]
    )
    made = convert(job, tmp_path / "o.jsonl", options(format="trl-grpo", group=GroupOptions()))
    assert [row["task_id"] for row in rows_of(tmp_path / "o.jsonl")] == ["b", "b"]
    assert "left out 1 rollout(s): in a group of which another rollout cannot be a row" in made.told


def test_a_failed_attempt_that_was_retried_is_no_member(tmp_path: Path) -> None:
    retry = {"max_retries": 2, "exclude_categories": ["timeout"]}
    bad = {"reward": None, "error": "pipe closed", "error_category": "pipe_closed"}
    job = make_job(tmp_path / "job", [bad, {"reward": 1.0}, {"reward": 1.0, "task": "b"}], retry=retry)
    made = convert(job, tmp_path / "o.jsonl", options(group=GroupOptions()))
    assert made.rows == 2
    assert "left out 1 rollout(s): a failed attempt that a retry stands in for" in made.told


def test_min_reward_filters_after_the_group_was_counted(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"reward": 0.0}, {"reward": 1.0}])
    convert(job, tmp_path / "o.jsonl", options(group=GroupOptions(), min_reward=0.5))
    assert [round(row["advantage"], 3) for row in rows_of(tmp_path / "o.jsonl")] == [0.707]
    with pytest.raises(BadInput, match="would break the groups"):
        convert(job, tmp_path / "o.jsonl", options(format="trl-grpo", group=GroupOptions(), min_reward=0.5))


def test_the_groups_options_are_the_streams(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"reward": 0.0}, {"reward": 1.0}])
    result = run(job, "--format", "trl-grpo", "-o", tmp_path / "o.jsonl", "--group-advantage", "--advantage", "rloo")
    assert result.exit_code == 0
    assert [row["advantage"] for row in rows_of(tmp_path / "o.jsonl")] == [-1.0, 1.0]


# --- files


def test_expected_rows_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    job, out = tool_job(tmp_path / "job"), tmp_path / "rows/o.jsonl"
    out.parent.mkdir()
    out.write_text("as it was")
    with pytest.raises(NothingWritten, match="row count 1 != expected 2"):
        convert(job, out, options(expected_rows=2))
    assert out.read_text() == "as it was"
    assert [one.name for one in out.parent.iterdir()] == ["o.jsonl"]
    assert convert(job, out, options(expected_rows=1)).rows == 1


def test_no_row_is_no_file_and_code_1(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"reward": None, "error": "no"}])
    result = run(job, "-o", tmp_path / "rows/o.jsonl")
    assert result.exit_code == 1
    assert "left out 1 rollout(s): ended in an error, without a reward" in result.stderr
    assert list((tmp_path / "rows").iterdir()) == []


def test_the_manifest_counts_in_benchflows_words(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"calls": tool_rollout()}, {"calls": None}, {"reward": None, "error": "no"}])
    manifest = tmp_path / "m.json"
    assert run(job, "--format", "trl-sft", "-o", tmp_path / "o.jsonl", "--manifest", manifest).exit_code == 0
    found = json.loads(manifest.read_text())
    assert list(found) == sorted(found)
    wanted = {
        "format": "trl-sft", "rollouts_seen": 3, "rows_written": 1, "rows_with_tool_calls": 1,
        "skipped_no_trajectory": 1, "skipped_terminal_error": 1, "skipped_reward": 0, "exchanges_seen": 2,
        "sources": [str(job)],
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted


def test_the_output_must_not_be_the_input(tmp_path: Path) -> None:
    job = tool_job(tmp_path / "job")
    journal = next(job.glob("*/trajectory/llm_trajectory.jsonl"))
    before = journal.read_bytes()
    with pytest.raises(BadInput, match="--out must differ from the source JSONL path"):
        convert(journal, journal, options())
    assert journal.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere", "-o", "o.jsonl"], "No such path: nowhere"),
        (["job", "-o", "o.jsonl", "--format", "alpaca"], "--format must be 'prime-sft'"),
        (["job", "-o", "o.jsonl", "--row-mode", "turn"], "--row-mode must be"),
        (["job", "-o", "o.jsonl", "--format", "verl-sft"], "give --out a name that ends in .parquet"),
        (["job", "-o", "o.parquet", "--format", "trl-grpo"], "give --out a name that ends in .jsonl"),
        (["job", "-o", "e", "--format", "openenv-episodes", "--row-mode", "exchange"], "one row a rollout"),
        (["job", "-o", "o.jsonl", "--group-advantage", "--group-by", "team"], "--group-by: 'team' is not a key"),
        (["job", "-o", "o.jsonl", "--group-advantage", "--advantage", "best"], "--advantage must be"),
        (["job", "-o", "job/summary.json/o.jsonl"], "cannot write"),
    ],
)
def test_a_mistake_is_one_sentence_and_code_2(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    tool_job(tmp_path / "job")
    answer = subprocess.run(
        [sys.executable, "-m", "train", "convert", *arguments],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert answer.returncode == 2
    assert sentence in answer.stderr and len(answer.stderr.splitlines()) == 1
    assert sorted(one.name for one in tmp_path.iterdir()) == ["job"]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """The limit on a file's size stands in for a full disk: the write fails in the same place."""
    job = make_job(tmp_path / "job", [{} for _ in range(40)])
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000));"
        "sys.argv = ['train', 'convert', 'job', '-o', 'rows/o.jsonl']; from train.cli import main; main()"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert answer.returncode == 2
    assert answer.stderr.splitlines()[-1].startswith("train: cannot write rows/o.jsonl")
    assert list((tmp_path / "rows").iterdir()) == []
    assert job.is_dir()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_ctrl_c_and_its_kind_leave_no_half_file(tmp_path: Path, number: signal.Signals, code: int) -> None:
    job = make_job(tmp_path / "job", [{}])
    journal = next(job.glob("*/trajectory/llm_trajectory.jsonl"))
    journal.unlink()
    os.mkfifo(journal)  # is_file() is false for a pipe, so stand a slow log behind a link
    slow = journal.rename(tmp_path / "pipe")
    journal.write_bytes(json.dumps(conversation(1)[0]).encode() + b"\n")
    process = subprocess.Popen(
        [sys.executable, "-c", f"""
import sys, train.rollouts.rollouts as rollouts
read = rollouts.Rollout.calls
def slow(self):
    print("reading", flush=True)
    open({str(slow)!r}).read()
    yield from read(self)
rollouts.Rollout.calls = slow
sys.argv = ["train", "convert", "job", "-o", "rows/o.jsonl"]
from train.cli import main
main()
"""],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # under nohup SIGHUP is ignored
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "reading\n"
    time.sleep(0.2)
    process.send_signal(number)
    assert process.wait(timeout=20) == code
    assert list((tmp_path / "rows").iterdir()) == []


def test_a_half_written_line_costs_itself_only(tmp_path: Path) -> None:
    whole = json.dumps(conversation(1)[0]).encode() + b"\n"
    job = make_job(tmp_path / "job", [{"journal": whole + whole[:200]}])
    warned: list[str] = []
    made = convert(job, tmp_path / "o.jsonl", options(), on_warning=warned.append)
    assert made.rows == 1
    assert any("cut off while it was being written" in one for one in warned)


def test_two_rollouts_of_one_name_are_both_there(tmp_path: Path) -> None:
    for job in ("one", "two"):
        make_job(tmp_path / "jobs" / job, [{"name": "task__1"}])
    convert(tmp_path / "jobs", tmp_path / "o.jsonl", options())
    assert [row["source_rollout_dir"] for row in rows_of(tmp_path / "o.jsonl")] == ["one/task__1", "two/task__1"]


def test_a_bare_folder_of_the_stand_alone_proxy_has_rows_without_a_reward(tmp_path: Path) -> None:
    journal = tmp_path / "captures/default/trajectory/llm_trajectory.jsonl"
    journal.parent.mkdir(parents=True)
    journal.write_text("".join(json.dumps(one) + "\n" for one in conversation(2)))
    convert(tmp_path / "captures", tmp_path / "o.jsonl", options(format="trl-sft-ids"))
    assert [row["reward"] for row in rows_of(tmp_path / "o.jsonl")] == [None]


def test_memory_does_not_grow_with_the_number_of_rollouts(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        job = make_job(tmp_path / f"job-{count}", [{"calls": conversation(4)} for _ in range(count)])
        script = (
            "import resource, sys; from train.cli import app;"
            f"app(['convert', {str(job)!r}, '-o', {str(tmp_path / 'o.jsonl')!r}], standalone_mode=False);"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
        )
        answer = subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        return int(answer.stderr.splitlines()[-1])

    assert peak(400) < peak(4) + 8_000, "kilobytes"


# --- dialects


def test_an_anthropic_call_is_chat_too(tmp_path: Path) -> None:
    one = line(0, [1, 2], [3])
    one["request"] |= {"path": "/v1/messages"}
    one["request"]["body"] = {
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
    one["response"]["body"] = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "done"}]}
    job = make_job(tmp_path / "job", [{"calls": [one]}])
    convert(job, tmp_path / "o.jsonl", options())
    (row,) = rows_of(tmp_path / "o.jsonl")
    assert [message["role"] for message in row["prompt"]] == ["system", "user", "assistant", "tool"]
    assert row["prompt"][2]["tool_calls"][0]["function"] == {"name": "write", "arguments": {"path": "a"}}
    assert row["completion"] == [{"role": "assistant", "content": "done"}]
    assert json.loads(row["tools"])[0]["function"]["name"] == "write"


def test_a_responses_call_is_chat_too(tmp_path: Path) -> None:
    one = line(0, [1, 2], [3])
    one["request"] |= {"path": "/v1/responses"}
    one["request"]["body"] = {
        "model": "m", "instructions": "Be brief.",
        "tools": [{"type": "function", "name": "write", "parameters": {"type": "object", "properties": {}}}],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
            {"type": "function_call", "call_id": "t1", "name": "write", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "t1", "output": "ok"},
        ],
    }  # fmt: skip
    one["response"]["body"] = {
        "output": [
            {"type": "reasoning", "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]},
        ]
    }
    job = make_job(tmp_path / "job", [{"calls": [one]}])
    convert(job, tmp_path / "o.jsonl", options())
    (row,) = rows_of(tmp_path / "o.jsonl")
    assert [message["role"] for message in row["prompt"]] == ["system", "user", "assistant", "tool"]
    assert row["completion"] == [{"role": "assistant", "content": "done"}]


def test_a_text_completion_has_ids_and_no_messages(tmp_path: Path) -> None:
    one = line(0, [1, 2], [3, 4])
    one["request"] |= {"path": "/v1/completions", "body": {"model": "m", "prompt": "Once"}}
    one["response"]["body"] = {"choices": [{"index": 0, "text": " upon a time"}]}
    job = make_job(tmp_path / "job", [{"calls": [one]}])
    assert convert(job, tmp_path / "i.jsonl", options(format="trl-sft-ids")).rows == 1
    with pytest.raises(NothingWritten) as caught:
        convert(job, tmp_path / "m.jsonl", options())
    assert "no chat; trl-sft-ids takes text completions" in caught.value.told[0]


# --- files of rows


def results_line(**given: Any) -> dict[str, Any]:
    row = {
        "example_id": 0,
        "prompt": [{"role": "user", "content": "Write 42."}],
        "completion": [{"role": "assistant", "content": "ok"}, {"role": "assistant", "content": "done"}],
        "info": {"task_id": "write-number", "agent": "pi-acp", "training_ready": True, "schema_version": 2},
        "reward": 1.0,
        "error": None,
        "is_completed": True,
    }
    return row | given


def test_a_results_file_is_a_source_of_message_rows(tmp_path: Path) -> None:
    source = tmp_path / "results.jsonl"
    bad = results_line(reward=None, error={"error": "timeout"}, is_completed=False)
    source.write_text("".join(json.dumps(row) + "\n" for row in (results_line(), bad)))
    made = convert(source, tmp_path / "o.jsonl", options())
    (row,) = rows_of(tmp_path / "o.jsonl")
    assert row["completion"] == [{"role": "assistant", "content": "done"}]
    assert made.told == ["left out 1 rollout(s): ended in an error, without a reward"]
    with pytest.raises(BadInput, match="holds no token ids"):
        convert(source, tmp_path / "o.jsonl", options(format="trl-grpo"))
    with pytest.raises(BadInput, match="--group-advantage needs a job folder"):
        convert(source, tmp_path / "o.jsonl", options(group=GroupOptions()))


def test_a_results_file_of_benchflow_0_7_where_zero_means_unscored(tmp_path: Path) -> None:
    source = tmp_path / "results.jsonl"
    old = results_line(reward=0.0, error={"error": "sandbox"}, info={"task_id": "t", "unknown": 1}, surprise=[])
    source.write_text(json.dumps(old) + "\n" + json.dumps(results_line(info={"task_id": "t"}, reward=0.0)) + "\n")
    made = convert(source, tmp_path / "o.jsonl", options(include_errored=True))
    assert [row["reward"] for row in rows_of(tmp_path / "o.jsonl")] == [0.0]
    assert made.told == ["left out 1 rollout(s): ended in an error, without a reward"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"prompt": [], "completion": []}\n{"prom', "line 2: invalid JSON"),
        ("[1]\n", "line 1: top-level record must be an object"),
        ("", "is empty"),
    ],
)
def test_a_broken_file_of_rows_says_its_line(tmp_path: Path, content: str, sentence: str) -> None:
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


def test_every_reason_to_withhold_a_group_is_told() -> None:
    assert WITHHELD.keys() == set(get_args(WithheldReason)) and set(WITHHELD.values()) <= REASONS.keys()


def test_a_write_that_fails_is_a_train_error(tmp_path: Path) -> None:
    job = tool_job(tmp_path / "job")
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match="cannot write"):
        convert(job, tmp_path / "file/o.jsonl", options())
    with pytest.raises(NoSuchPath):
        convert(tmp_path / "nowhere", tmp_path / "o.jsonl", options())


# --- odd rewards and odd paths


@pytest.mark.parametrize("reward", [True, float("nan"), "1.0"])
def test_what_is_no_reward_is_none_and_is_told(tmp_path: Path, reward: Any) -> None:
    job = make_job(tmp_path / "job", [{"reward": reward}])
    warned: list[str] = []
    convert(job, tmp_path / "o.jsonl", options(), on_warning=warned.append)
    assert [row["reward"] for row in rows_of(tmp_path / "o.jsonl")] == [None]
    assert "counts as unscored" in warned[0]
    with pytest.raises(NothingWritten):
        convert(job, tmp_path / "o.jsonl", options(format="trl-grpo"))


def test_a_reward_beyond_its_range_is_kept_and_told(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"reward": -2.5}])
    warned: list[str] = []
    convert(job, tmp_path / "o.jsonl", options(), on_warning=warned.append)
    assert [row["reward"] for row in rows_of(tmp_path / "o.jsonl")] == [-2.5]
    assert "outside of 0 to 1" in warned[0]


def test_a_result_that_is_no_json_costs_its_rollout_only(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{}, {}])
    broken_one = sorted(job.glob("*/result.json"))[0]
    broken_one.write_text('{"task_name": ')
    warned: list[str] = []
    assert convert(job, tmp_path / "o.jsonl", options(), on_warning=warned.append).rows == 1
    assert warned == [f"skipping {broken_one}: not a readable JSON object"]


def test_a_file_that_is_no_rollout_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(BadInput, match="is no rollout; give a job folder"):
        convert(tmp_path / "notes.txt", tmp_path / "o.jsonl", options())


def test_a_log_that_cannot_be_read_costs_its_rollout_only(tmp_path: Path) -> None:
    """A capture of a schema that this version does not know."""
    odd = conversation(1)
    odd[0]["metadata"]["token_capture"]["schema_version"] = "benchflow.token_capture.v9"
    job = make_job(tmp_path / "job", [{"calls": odd}, {}])
    made = convert(job, tmp_path / "o.jsonl", options(format="trl-sft-ids", row_mode="segment"))
    assert made.rows == 1
    assert made.told == [
        "left out 1 rollout(s): none of its calls is complete (bench train token-coverage says why)",
    ]
    assert convert(job, tmp_path / "m.jsonl", options()).rows == 2, "its messages are still there"


def test_an_unknown_format_key_in_a_line_is_no_matter(tmp_path: Path) -> None:
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


STRANGE: dict[str, dict[str, Any]] = {
    "no log": {"calls": None},
    "an empty log": {"journal": b""},
    "a log of nonsense": {"journal": b"nonsense\n"},
    "only a failed call": {"calls": [failed()]},
    "only a side call": {"calls": [line(0, [1], [2], call_purpose="title")]},
    "only a cut call": {"calls": [line(0, [1], [2], outcome="truncated")]},
    "nothing sampled": {"calls": [line(0, [1], [], text="")]},
    "no capture": {"calls": uncaptured(2)},
    "broken": {"calls": broken(3)},
    "no reward": {"reward": None},
    "an error": {"reward": None, "error": "no"},
}


@pytest.mark.parametrize("mode", ["rollout", "exchange", "segment"])
@pytest.mark.parametrize("form", ["prime-sft", "trl-sft", "openenv-episodes", "trl-sft-ids", "trl-grpo"])
@pytest.mark.parametrize("kind", STRANGE)
def test_no_rollout_is_ever_left_out_in_silence(tmp_path: Path, kind: str, form: str, mode: str) -> None:
    if form == "openenv-episodes" and mode != "rollout":
        return
    job = make_job(tmp_path / "job", [STRANGE[kind]])
    for group in (None, GroupOptions()):
        out = tmp_path / ("episodes" if form == "openenv-episodes" else "o.jsonl")
        try:
            made = convert(job, out, options(format=form, row_mode=mode, group=group))
        except NothingWritten as error:
            assert error.told and all(sentence.startswith("left out 1 ") for sentence in error.told)
        else:
            assert made.rows >= 1 and made.rollouts == 1
