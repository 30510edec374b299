"""`bench train convert`: which rollouts and calls become rows, and the notes about the others."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.forked import run_command
from tests.train.build import broken, conversation, failed, line, make_job, make_rollout, uncaptured
from tests.train.conversion import notes_of, options, rows_of, run
from tests.train.tool_calls import ASK, tool_job, tool_rollout
from train.errors import NothingWritten
from train.groups.groups import GroupOptions
from train.rows.convert import convert

ROOT = Path(__file__).parents[3]


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
    for call in other:  # a second conversation under another question
        call["request"]["body"]["messages"][0]["content"] = "Name two rivers."
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
    assert "1 reply(s) are in more than one branch" in notes_of(made)


def test_a_changed_reply_cuts_the_conversation_with_a_note(tmp_path: Path) -> None:
    calls = conversation(2)
    calls[1]["request"]["body"]["messages"][1]["content"] = "what the agent made of it"
    job = make_job(tmp_path / "job", [{"calls": calls}])
    made = convert(job, tmp_path / "o.jsonl", options(format="prime-sft"))
    assert [row["messages"][-1]["content"] for row in rows_of(tmp_path / "o.jsonl")] == ["reply 0", "reply 1"]
    assert "1 reply(s) came back changed in the next prompt" in notes_of(made)


def test_segments_of_a_broken_rollout_are_rows_of_their_own(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"calls": broken(2)}])
    with pytest.raises(NothingWritten) as caught:
        convert(job, tmp_path / "o.jsonl", options(format="trl-sft-ids"))
    assert "--row-mode segment keeps every part that is exact" in "\n".join(caught.value.notes)
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


def test_a_rollout_that_branches_gives_no_row_of_trl_grpo(tmp_path: Path) -> None:
    calls = conversation(2)
    fork = line(2, [*calls[1]["metadata"]["token_capture"]["prompt_token_ids"][:16], 7, 8, 9], [1, 2, 3])
    job = make_job(tmp_path / "job", [{"calls": [*calls, fork]}, {}])
    made = convert(job, tmp_path / "o.jsonl", options(format="trl-grpo"))
    assert made.rows == 1
    assert "left out 1 rollout(s): its calls branch into several sequences" in notes_of(made)


def test_the_choice_the_agent_continued_with_is_the_reply(tmp_path: Path) -> None:
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


# --- what is left out


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


def test_failed_cut_and_side_calls_give_no_rows(tmp_path: Path) -> None:
    calls = conversation(2)
    title = line(2, [1, 2], [3], call_purpose="title")
    cut = line(3, [1, 2], [3], outcome="aborted")
    job = make_job(tmp_path / "job", [{"calls": [*calls, title, cut, failed(4)]}])
    made = convert(job, tmp_path / "o.jsonl", options(row_mode="exchange"))
    assert made.rows == 2
    assert made.notes == [
        "left out 1 call(s): the engine's answer was an error",
        "left out 1 call(s): cut off before the reply was complete",
        "left out 1 call(s): a side call (title, summary, sub-agent), not the agent's own work",
    ]


def test_a_rollout_without_capture_gives_message_rows_and_no_ids(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"calls": uncaptured(1)}])
    assert convert(job, tmp_path / "o.jsonl", options()).rows == 1
    with pytest.raises(NothingWritten) as caught:
        convert(job, tmp_path / "i.jsonl", options(format="trl-sft-ids"))
    assert "BENCHFLOW_CAPTURE_TOKEN_LOGPROBS=1" in caught.value.notes[0]


def test_a_message_with_an_image_gives_no_row(tmp_path: Path) -> None:
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    job = make_job(tmp_path / "job", [{}, {"calls": [line(0, [1], [2], messages=picture)]}])
    made = convert(job, tmp_path / "o.jsonl", options())
    assert (made.rows, made.notes) == (1, ["left out 1 call(s): images or other parts that are not text"])


def test_reasoning_is_left_out_with_a_note(tmp_path: Path) -> None:
    calls = conversation(1)
    calls[0]["response"]["body"]["choices"][0]["message"]["reasoning_content"] = "two colours, hm"
    made = convert(make_job(tmp_path / "job", [{"calls": calls}]), tmp_path / "o.jsonl", options())
    assert "two colours, hm" not in (tmp_path / "o.jsonl").read_text()
    assert "1 row(s) end in a reply whose reasoning is left out" in notes_of(made)


def test_a_reply_that_was_cut_is_noted_for_its_stop_token(tmp_path: Path) -> None:
    calls = conversation(1)
    calls[0]["response"]["body"]["choices"][0]["finish_reason"] = "length"
    job = make_job(tmp_path / "job", [{"calls": calls}])
    assert "1 row(s) end in a reply that was cut at its length limit" in notes_of(
        convert(job, tmp_path / "o.jsonl", options())
    )
    assert convert(job, tmp_path / "i.jsonl", options(format="trl-sft-ids")).notes == []


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
        assert "left out 1 row(s): sampled otherwise" in notes_of(made)


def test_trl_grpo_notes_the_sampling_once_per_rollout(tmp_path: Path) -> None:
    cold = {
        "sent": {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
        "session": {},
        "engine_defaults": None,
    }
    job = make_job(tmp_path / "job", [{"calls": conversation(3, sampling=cold)}])
    made = convert(job, tmp_path / "o.jsonl", options(format="trl-grpo"))
    (sentence,) = made.notes
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
    assert (made.rows, made.notes) == (
        1,
        ["left out 1 row(s): has what looks like a secret, and token ids cannot be redacted"],
    )


def test_the_manifest_counts_in_benchflows_words(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"calls": tool_rollout()}, {"calls": None}, {"reward": None, "error": "no"}])
    manifest = tmp_path / "m.json"
    result = run(job, "--format", "trl-sft", "-o", tmp_path / "o.jsonl", "--manifest", manifest)
    assert result.exit_code == 0 and result.stdout.splitlines()[1:] == [f"Stats: {manifest}"]
    found = json.loads(manifest.read_text())
    assert list(found) == sorted(found)
    wanted = {
        "format": "trl-sft", "rollouts_seen": 3, "rows_written": 1, "rows_with_tool_calls": 1,
        "skipped_no_trajectory": 1, "skipped_terminal_error": 1, "skipped_reward": 0, "exchanges_seen": 2,
        "skipped_missing_tools": 0, "skipped_missing_tool_defs": 0, "skipped_provider_error": 0, "rows_compacted": 0,
        "messages_dropped": 0, "sources": [str(job)],
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere", "-o", "o.jsonl"], "No such path: nowhere"),
        (["job", "-o", "o.jsonl", "--format", "alpaca"], "--format must be 'prime-sft'"),
        (["job", "-o", "o.jsonl", "--row-mode", "turn"], "--row-mode must be"),
        (["job", "-o", "o.jsonl", "--format", "verl-sft"], "give --out a name that ends in .parquet"),
        (["job", "-o", "o.parquet", "--format", "trl-grpo"], "give --out a name that ends in .jsonl"),
        (["job", "-o", "e", "--format", "openenv-episodes", "--row-mode", "exchange"], "one row per rollout"),
        (["job", "-o", "o.jsonl", "--group-advantage", "--group-by", "team"], "--group-by: 'team' is not a key"),
        (["job", "-o", "o.jsonl", "--group-advantage", "--advantage", "best"], "--advantage must be"),
        (["job", "-o", "job/summary.json/o.jsonl"], "cannot write"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    tool_job(tmp_path / "job")
    answer = run_command(["train", "convert", *arguments], cwd=tmp_path)
    assert answer.returncode == 2
    assert sentence in answer.stderr and len(answer.stderr.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job"]


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
def test_no_rollout_is_left_out_silently(tmp_path: Path, kind: str, form: str, mode: str) -> None:
    if form == "openenv-episodes" and mode != "rollout":
        return
    job = make_job(tmp_path / "job", [STRANGE[kind]])
    for group in (None, GroupOptions()):
        out = tmp_path / ("episodes" if form == "openenv-episodes" else "o.jsonl")
        try:
            made = convert(job, out, options(format=form, row_mode=mode, group=group))
        except NothingWritten as error:
            assert error.notes and all(sentence.startswith("left out 1 ") for sentence in error.notes)
        else:
            assert made.rows >= 1 and made.rollouts == 1
