"""The stream from Python: records of finished rollouts, whole groups, and how the end of a job is reported."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from capture.schemas import examples
from tests.schemas import validator
from tests.train.build import (
    CRASH,
    broken,
    conversation,
    dead_pid,
    end_job,
    failed,
    finish_rollout,
    line,
    make_job,
    make_rollout,
    trials,
    uncaptured,
    write,
)  # fmt: skip
from train import BadInput, JobStopped, NoSuchPath, RolloutRecord, StreamTimeout, astream_rollouts, stream_rollouts
from train.groups.groups import DEFAULT_BY, GroupOptions
from train.rows.convert import ConvertOptions, convert
from train.stream.records import Encode
from train.stream.stream import Stream, StreamOptions
from train.view.api import View

SCHEMA = validator("rollout_stream.v1")


def once(path: Path, **options: Any) -> tuple[list[RolloutRecord], list[list[RolloutRecord]], list[str]]:
    """Records, withheld groups and warnings of one reading."""
    withheld: list[list[RolloutRecord]] = []
    warnings: list[str] = []
    options = {"follow": False, "on_withheld": withheld.append, "on_warning": warnings.append, **options}
    records = list(stream_rollouts(path, **options))
    for row in [*records, *(row for rows in withheld for row in rows)]:
        SCHEMA.validate(row)
    return records, withheld, warnings


def test_a_record_has_every_field_of_the_seed(tmp_path: Path) -> None:
    timed_out = "Agent prompt exceeded wall-clock budget 900s"
    spec = {"name": "wyckoff__6a869c0f", "task": "wyckoff", "reward": 0.0, "error": timed_out, "calls": uncaptured(18)}
    make_job(tmp_path / "trial-01/2026-11-04__17-52-13", [spec])
    [row], _, _ = once(tmp_path)
    seed = {
        "schema_version": "benchflow.rollout-stream.v1",
        "rollout": "wyckoff__6a869c0f",
        "rollout_path": "trial-01/2026-11-04__17-52-13/wyckoff__6a869c0f",
        "task": "wyckoff",
        "agent": "pi-acp",
        "model": "vllm/my-policy",
        "reward": 0.0,
        "scored": True,
        "outcome": "failed",
        "error": timed_out,
        "advantage": None,
        "retried": False,
    }
    assert seed.items() <= row.items()
    capture = {"calls": 18, "captured_calls": 0, "training_grade": False, "status": "capture_off"}
    assert capture.items() <= row["token_capture"].items()
    assert (row["job"], row["group_complete"], row["replaces"]) == ("2026-11-04__17-52-13", None, None)
    assert row["group_id"] == "task=wyckoff|agent=pi-acp|model=vllm/my-policy|job=trial-01/2026-11-04__17-52-13"
    assert (row["calls"], row["sequences"], row["segments"]) == ([], [], [])


def test_a_training_grade_rollout_carries_its_calls_its_sequence_and_its_segment(tmp_path: Path) -> None:
    calls = conversation(2)
    [row], _, _ = once(make_job(tmp_path / "job", [{"calls": calls}]))
    first, second = (call["metadata"]["token_capture"] for call in calls)
    assert [call["index"] for call in row["calls"]] == [0, 1]
    assert row["calls"][1]["prompt_token_ids"] == second["prompt_token_ids"]
    assert row["calls"][0]["completions"] == [
        {name: first["completions"][0][name] for name in ("index", "token_ids", "logprobs")}
    ]
    [path] = row["sequences"]
    assert path["prompt_ids"] == first["prompt_token_ids"]
    assert path["prompt_ids"] + path["completion_ids"] == (
        second["prompt_token_ids"] + second["completions"][0]["token_ids"]
    )
    assert path["completion_mask"] == [1] * 4 + [0] * 3 + [1] * 4
    sampled = [*first["completions"][0]["logprobs"], *second["completions"][0]["logprobs"]]
    assert [
        value for value, bit in zip(path["completion_logprobs"], path["completion_mask"], strict=True) if bit
    ] == sampled
    assert [
        value for value, bit in zip(path["completion_logprobs"], path["completion_mask"], strict=True) if not bit
    ] == [0.0] * 3
    [segment] = row["segments"]
    assert segment["action_mask"] == path["completion_mask"] and segment["trainable"] and segment["start"] is None
    assert segment["call_spans"] == [{"call": 0, "offset": 0, "length": 4}, {"call": 1, "offset": 7, "length": 4}]


def test_a_broken_rollout_keeps_its_exact_parts_as_segments(tmp_path: Path) -> None:
    [row], _, _ = once(make_job(tmp_path / "job", [{"calls": broken()}]))
    assert row["sequences"] == [] and not row["token_capture"]["training_grade"]
    assert [segment["calls"] for segment in row["segments"]] == [[0], [1]]
    assert len(row["token_capture"]["breaks"]) == 1


def test_rollouts_come_in_the_order_they_finished(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"name": "c", "at": 1}, {"name": "a", "at": 3}, {"name": "b", "at": 2}])
    assert [row["rollout"] for row in once(job)[0]] == ["c", "b", "a"]


def test_three_repeats_that_scored_the_same_have_advantage_zero(tmp_path: Path) -> None:
    root = trials(tmp_path, [{"task": "econ"}] * 3, [{"task": "wyckoff", "reward": 0.0}] * 3)
    records, withheld, _ = once(root, group_size=3, group_by="model,agent,task")
    assert [(row["rollout_path"].split("/")[0], row["task"], row["advantage"]) for row in records] == [
        (f"trial-0{number}", task, 0.0) for task in ("econ", "wyckoff") for number in (1, 2, 3)
    ]
    assert withheld == [] and all(row["group_complete"] for row in records)


def test_stream_rows_and_view_make_the_same_groups_whatever_the_files_times(tmp_path: Path) -> None:
    """A job that was copied has other file times than its rollouts' `finished_at`."""
    rewards = [1.0, 0.0, 0.5, 0.25, 1.0]
    job = make_job(tmp_path / "job", [{"name": f"t__{n}", "at": n, "reward": r} for n, r in enumerate(rewards)])
    for n in range(len(rewards)):
        os.utime(job / f"t__{n}/result.json", (1e9 - n, 1e9 - n))
    records, withheld, _ = once(job, group_size=2)
    streamed = {row["rollout"]: row["advantage"] for row in records}
    groups = GroupOptions(size=2)
    convert(job, tmp_path / "rows.jsonl", ConvertOptions(format="trl-sft", group=groups))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    view = View(job, grouping=groups)
    view.index.scan()
    while view.index.read_next():
        pass
    viewed = {row["name"]: row["advantage"] for row in view.answer("job", {})["rows"]}
    assert list(streamed) == ["t__0", "t__1", "t__2", "t__3"]
    assert {row["rollout"]: row["advantage"] for row in rows} == streamed
    assert viewed == {**streamed, "t__4": None} and [row["rollout"] for row in withheld[0]] == ["t__4"]


def test_a_groups_lines_say_how_the_advantage_was_counted(tmp_path: Path) -> None:
    root = trials(tmp_path, [{"reward": 1.0}, {"reward": 0.0}, {"reward": 0.0}])
    records, _, _ = once(root, group_size=3, group_by="task,agent,model")
    assert [row["advantage"] for row in records] == pytest.approx([1.15450, -0.57725, -0.57725], abs=1e-5)
    record = {"advantage_kind": "grpo", "group_size": 3, "group_mean": 1 / 3, "ddof": 1, "eps": 1e-4}
    assert all(record.items() <= row.items() for row in records)
    records, _, _ = once(root, group_size=3, group_by=["task"], advantage="rloo", std_ddof=0, eps=0.0)
    assert [row["advantage"] for row in records] == pytest.approx([1.0, -0.5, -0.5])
    assert (records[0]["advantage_kind"], records[0]["ddof"], records[0]["eps"]) == ("rloo", 0, 0.0)


def test_repeats_form_no_group_while_the_job_is_a_key(tmp_path: Path) -> None:
    records, withheld, _ = once(trials(tmp_path, [{}] * 3), group_size=3)
    assert records == [] and [len(rows) for rows in withheld] == [1, 1, 1]
    assert {row["withheld"] for rows in withheld for row in rows} == {"group_incomplete"}  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("odd", "reason", "words"),
    [
        ({"reward": None, "error": "the verifier crashed"}, "unscored", "the verifier crashed"),
        ({"calls": []}, "no_model_calls", "no call that a model answered"),
        ({"calls": None}, "no_model_calls", "no call that a model answered"),
        ({"calls": [failed()]}, "no_model_calls", "no call that a model answered"),
        ({"calls": broken()}, "mixed_sequences", "1 of 3 members have no token sequence"),
        ({"calls": uncaptured()}, "mixed_sequences", "1 of 3 members have no token sequence"),
        ({"result": {"task_digest": "sha256:other"}}, "mixed_tasks", "2 different versions of the task"),
    ],
)
def test_a_group_is_withheld_whole(tmp_path: Path, odd: dict[str, Any], reason: str, words: str) -> None:
    good = {"result": {"task_digest": "sha256:same"}}
    root = trials(tmp_path, [good, {**good, **odd}, good], [{"task": "whole"}] * 3)
    records, withheld, _ = once(root, group_size=3, group_by="task,agent,model")
    assert [row["task"] for row in records] == ["whole"] * 3
    [rows] = withheld
    assert [row["rollout_path"].split("/")[0] for row in rows] == ["trial-01", "trial-02", "trial-03"]
    for row in rows:
        assert row["withheld"] == reason and words in row["withheld_detail"] and row["advantage"] is None


def test_a_time_out_or_a_refusal_at_its_end_keeps_a_rollout_in_its_group(tmp_path: Path) -> None:
    cut = line(2, [1, 2], [3], outcome="aborted")
    cut["metadata"]["token_capture"]["unavailable"] = {
        "logprobs": {"reason": "request_failed", "code": "stream_aborted", "detail": "the agent left"}
    }
    job = make_job(
        tmp_path / "job",
        [
            {"reward": 1.0},
            {"reward": 0.0, "error": "timed out", "calls": [*conversation(2), cut]},
            {"reward": 0.0, "calls": [*conversation(2), failed(2)]},
        ],
    )
    records, withheld, _ = once(job, group_size=3)
    assert withheld == [] and [len(row["sequences"]) for row in records] == [1, 1, 1]
    assert [round(row["advantage"] or 0, 2) for row in records] == [1.15, -0.58, -0.58]


def test_a_scored_rollout_that_ended_in_an_error_stays_in_its_group(tmp_path: Path) -> None:
    late = {"reward": 0.0, "error": "Agent prompt exceeded wall-clock budget 900s"}
    records, withheld, _ = once(trials(tmp_path, [{}, late]), group_size=2, group_by="task")
    assert withheld == [] and [row["error"] for row in records] == [None, late["error"]]


def test_calls_past_the_proxy_do_not_withhold_a_group(tmp_path: Path) -> None:
    native = {"calls": None, "result": {"usage_tracking": {"endpoint_kind": "agent_native"}}}
    records, withheld, _ = once(trials(tmp_path, [native, native]), group_size=2, group_by="task")
    assert len(records) == 2 and withheld == []


def test_a_group_of_one_has_no_advantage(tmp_path: Path) -> None:
    [row], _, _ = once(make_job(tmp_path / "job"), group_size=1)
    assert row["advantage"] is None and row["group_complete"] is True


def test_a_retried_attempt_counts_in_no_group(tmp_path: Path) -> None:
    specs = [{"name": "t__1", "task": "t", **CRASH}, {"name": "t__2", "task": "t"}, {"name": "t__3", "task": "t"}]
    job = make_job(tmp_path / "job", specs, retry={"max_retries": 2, "exclude_categories": ["timeout"]})
    records, withheld, _ = once(job, group_size=2)
    assert [(row["rollout"], row["replaces"]) for row in records] == [("t__2", "t__1"), ("t__3", None)]
    [[left]] = withheld
    assert (left["rollout"], left["withheld"], left["retried"]) == ("t__1", "retried", True)
    ungrouped, _, _ = once(job)
    assert [(row["rollout"], row["retried"], row["replaces"]) for row in ungrouped] == [
        ("t__1", True, None), ("t__2", False, "t__1"), ("t__3", False, None),
    ]  # fmt: skip


def test_a_failed_attempt_without_a_retry_counts_when_the_job_has_ended(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [CRASH, {}], retry={"max_retries": 2})
    # The second rollout replaces the first here; alone, the first is unscored and retried no more.
    alone = make_job(tmp_path / "alone", [CRASH], retry={"max_retries": 2})
    assert [row["retried"] for row in once(job)[0]] == [True, False]
    assert [row["retried"] for row in once(alone)[0]] == [False]
    [[row]] = once(alone, group_size=1)[1]
    assert row["withheld"] == "unscored"


def test_while_the_job_runs_a_failed_attempt_waits_for_its_retry(tmp_path: Path) -> None:
    job = make_job(
        tmp_path / "job", [{"name": "t__1", "task": "t", **CRASH}], state="running", retry={"max_retries": 2}
    )
    assert [row["retried"] for row in once(job)[0]] == [True]
    made: list[str] = []

    def go_on() -> None:
        make_rollout(job, name="t__2", task="t", at=5)
        end_job(job)

    records = follow(job, [go_on], group_size=1, on_withheld=lambda rows: made.append(rows[0]["withheld"]))
    assert [row["rollout"] for row in records] == ["t__2"] and made == ["retried"]


def test_a_failed_attempt_counts_after_all_when_the_job_ends_without_its_retry(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"task": "t", **CRASH}], state="running", retry={"max_retries": 2})
    withheld: list[RolloutRecord] = []
    assert follow(job, [lambda: end_job(job)], group_size=1, on_withheld=withheld.extend) == []
    assert [(row.get("withheld"), row["retried"]) for row in withheld] == [("unscored", False)]


def follow(job: Path, steps: list[Callable[[], None]], **options: Any) -> list[RolloutRecord]:
    """The records of `job`, followed to its end; one of the steps is taken whenever the stream waits."""
    left = list(steps)

    def step(seconds: float) -> bool:
        if left:
            left.pop(0)()
        else:
            time.sleep(seconds)
        return False

    by = options.pop("group_by", DEFAULT_BY)
    groups = GroupOptions(by.split(",") if isinstance(by, str) else by, options.pop("group_size", None))
    stream_options = StreamOptions(poll_interval=0.01, timeout=60, groups=groups)
    stream = Stream(job, stream_options, Encode(text=False), wait=step, **options)
    records = [cast(RolloutRecord, row) for row in stream]
    stream.raise_end()
    return records


def test_following_yields_rollouts_as_they_finish_until_the_job_ends(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"name": "a"}, {"name": "b", "finished": False}], state="running")
    seen: list[tuple[str, bool]] = []

    steps = [lambda: finish_rollout(job / "b"), lambda: make_rollout(job, name="c"), lambda: end_job(job)]
    for row in stream_rollouts(job, poll_interval=0.02, timeout=60):
        seen.append((row["rollout"], (job / "summary.json").exists()))
        steps.pop(0)()
    assert seen == [("a", False), ("b", False), ("c", False)]


def test_the_stream_waits_for_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    job = tmp_path / "later/job"
    records = follow(job, [lambda: make_job(job, state="running") and None, lambda: end_job(job)])
    assert len(records) == 1


def test_all_trials_are_waited_for_also_those_that_start_late(tmp_path: Path) -> None:
    first, second = tmp_path / "trial-01/job", tmp_path / "trial-02/job"
    make_job(first, [{"name": "a"}], state="running")
    make_job(second, [], state="running")

    def late() -> None:
        end_job(first)
        make_rollout(second, name="b")

    records = follow(tmp_path, [late, lambda: end_job(second)], group_size=2, group_by="agent,model")
    assert [row["rollout_path"] for row in records] == ["trial-01/job/a", "trial-02/job/b"]


def test_a_missing_trial_of_a_run_is_reported(tmp_path: Path) -> None:
    root = trials(tmp_path / "jobs", [{}, {}])
    for evaluation in root.glob("*/*/evaluation.json"):
        write(evaluation, json.loads(evaluation.read_text()) | {"trials": 3})
    records, _, warnings = once(root)
    assert len(records) == 2
    assert warnings == [f"2026-11-04__17-52-13 was run in 3 trials, and 2 of them are in {root}"]
    assert once(root / "trial-01")[2] == [], "one trial was asked for"


@pytest.mark.parametrize("begun", [True, False])
def test_a_killed_job_is_noticed_within_two_polls(tmp_path: Path, begun: bool) -> None:
    job = make_job(tmp_path / "job", [{}, {}], state="running")
    rows: list[dict[str, Any]] = []
    if not begun:
        write(job / ".evaluation.lock", {"pid": dead_pid(), "host": socket.gethostname()})
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return False

    stream = Stream(job, StreamOptions(poll_interval=0.5), Encode(text=False), wait=wait)
    records = iter(stream)
    rows += [next(records), next(records)]
    write(job / ".evaluation.lock", {"pid": (pid := dead_pid()), "host": socket.gethostname()})
    rows += list(records)
    assert len(waits) <= 2 and len(rows) == 2
    with pytest.raises(
        JobStopped, match=rf"the job's process {pid if begun else ''}.*is gone \(lock .*2 rollouts streamed"
    ):
        stream.raise_end()


def test_a_job_that_ended_without_a_summary_was_stopped(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", state="running")
    with pytest.raises(JobStopped, match="ended without a summary; 1 rollout streamed"):
        follow(job, [(job / ".evaluation.lock").unlink])
    old = make_job(tmp_path / "old", state="running")
    (old / ".evaluation.lock").unlink()
    os.utime(old / "evaluation.json", (1, 1))
    with pytest.raises(JobStopped):
        list(stream_rollouts(old, poll_interval=0.01, timeout=60))


def test_a_user_stopped_job_and_one_that_did_not_finish_in_time_raise_after_the_last_record(tmp_path: Path) -> None:
    stopped = make_job(tmp_path / "stopped", [{}, {}], state="stopped")
    running = make_job(tmp_path / "running", state="running")
    seen: list[str] = []
    with pytest.raises(JobStopped, match="stopped by its user; 2 rollouts streamed"):
        for row in stream_rollouts(stopped):
            seen.append(row["job"])
    words = rf"^job not finished after 0.1s \(running as process {os.getpid()}\); 1 rollout streamed$"
    with pytest.raises(StreamTimeout, match=words):
        for row in stream_rollouts(running, poll_interval=0.02, timeout=0.1):
            seen.append(row["job"])
    assert seen == ["stopped", "stopped", "running"]


def test_bad_arguments_are_refused_at_once(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job")
    with pytest.raises(NoSuchPath, match=r"^no such job folder: .*nowhere$"):
        stream_rollouts(tmp_path / "nowhere", follow=False)
    for options, words in (
        ({"group_size": 0}, "--group-size must be at least 1"),
        ({"group_by": "seed"}, "--group-by: 'seed' is not a key"),
        ({"poll_interval": 0}, "--poll-interval"),
        ({"timeout": float("nan")}, "--timeout"),
        ({"advantage": "gae"}, "--advantage must be one of grpo, dr-grpo, rloo"),
        ({"std_ddof": 2}, "--std-ddof"),
        ({"eps": -1.0}, "--eps"),
    ):
        with pytest.raises(BadInput, match=words):
            stream_rollouts(job, **options)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="is a file; give a job folder"):
        stream_rollouts(job / "summary.json")


def test_a_problem_of_one_rollout_loses_no_other(tmp_path: Path) -> None:
    torn = json.dumps(conversation(1)[0]).encode() + b"\n" + b'{"request": {"bo'
    specs = [
        {"name": "a_no_log", "calls": None}, {"name": "b_torn", "journal": torn}, {"name": "c_nan"},
        {"name": "d_bool", "reward": True}, {"name": "e_no_json"}, {"name": "f_good"},
        {"name": "g_log_no_result", "finished": False}, {"name": "h_binary", "journal": b"\x00\xff\n\n[]\n"},
        {"name": "i_other_version", "calls": [conversation(1)[0]]},
    ]  # fmt: skip
    specs[-1]["calls"][0]["metadata"]["token_capture"]["schema_version"] = "benchflow.token_capture.v9"  # type: ignore[index]
    job = make_job(tmp_path / "job", specs)
    nan = job / "c_nan/result.json"
    nan.write_text(nan.read_text().replace('"reward": 1.0', '"reward": NaN'))
    (job / "e_no_json/result.json").write_text("{")
    records, _, warnings = once(job)
    rows = {row["rollout"]: row for row in records}
    assert sorted(rows) == ["a_no_log", "b_torn", "c_nan", "d_bool", "f_good", "h_binary", "i_other_version"]
    assert {name for name, row in rows.items() if not row["scored"]} == {"c_nan", "d_bool"}
    assert rows["a_no_log"]["token_capture"]["status"] == "no_gateway_capture"
    assert len(rows["b_torn"]["calls"]) == 1 and not rows["b_torn"]["token_capture"]["training_grade"]
    assert rows["f_good"]["token_capture"]["training_grade"]
    assert not rows["i_other_version"]["token_capture"]["training_grade"]
    for words in (
        "e_no_json/result.json: not a readable JSON object",
        "the reward is nan",
        "the reward is true",
        "cut off",
    ):
        assert any(words in warning for warning in warnings), words
    assert len(warnings) == len(set(warnings))


def test_a_log_that_cannot_be_opened_withholds_its_group_and_nothing_else(tmp_path: Path) -> None:
    root = trials(tmp_path, [{}, {}], [{"task": "whole"}] * 2)
    journal = root / "trial-01/2026-11-04__17-52-13/t__00/trajectory/llm_trajectory.jsonl"
    journal.unlink()
    os.symlink("/proc/self/mem", journal)  # there, a file, and unreadable, for root too
    records, withheld, warnings = once(root, group_size=2, group_by="task")
    assert [row["task"] for row in records] == ["whole"] * 2
    assert {row["withheld"] for row in withheld[0]} == {"unreadable_log"}  # type: ignore[typeddict-item]
    assert any("cannot read the journal" in warning for warning in warnings)


async def test_astream_yields_the_same_and_its_callbacks_run_on_the_loop(tmp_path: Path) -> None:
    root = trials(tmp_path, [{}, {"reward": 0.0}], [{"task": "short"}, {"task": "odd", "reward": None}])
    threads: set[int] = set()
    withheld: list[str] = []

    def on_withheld(rows: list[RolloutRecord]) -> None:
        threads.add(threading.get_ident())
        withheld.extend(row["withheld"] for row in rows)

    options: dict[str, Any] = {"group_size": 2, "group_by": "task"}
    records = [row async for row in astream_rollouts(root, on_withheld=on_withheld, **options)]
    await asyncio.sleep(0)
    assert records == list(stream_rollouts(root, **options)) and len(records) == 2
    assert withheld == ["group_incomplete"] * 2 and threads == {threading.get_ident()}


async def test_leaving_astream_ends_its_waiting(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", state="running")
    before = threading.active_count()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            async for _ in astream_rollouts(job, poll_interval=60):
                pass
    began = time.monotonic()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert time.monotonic() - began < 2 and threading.active_count() <= before


def test_a_folder_is_not_listed_again_while_nothing_was_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from train.rollouts.follow import Tree

    job = make_job(tmp_path / "job", [{"name": f"r{number}"} for number in range(20)], state="running")
    os.utime(job, (time.time() - 60, time.time() - 60))
    tree = Tree(job, print)
    assert len(tree.poll()[1]) == 20
    listed: list[Any] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or scandir(path))
    assert tree.poll()[1] == [] and listed == []
    make_rollout(job, name="new")
    assert [Path(rollout.path).name for rollout in tree.poll()[1]] == ["new"] and len(listed) >= 1


def test_a_rollout_whose_folder_grows_while_it_is_read_is_one_rollout(tmp_path: Path) -> None:
    """An empty folder may become a trial or a rollout; what an agent leaves in it must not be taken for rollouts."""
    from train.rollouts.follow import Tree

    job = make_job(tmp_path / "job", [], state="running")
    tree = Tree(tmp_path, print)
    (job / "a__1").mkdir()
    assert tree.poll()[1] == []
    (job / "a__1/agent").mkdir()
    tree.poll()
    for part in ("verifier", "artifacts", "trajectory"):
        (job / f"a__1/{part}").mkdir()
    (job / "a__1/agent/old").mkdir()
    tree.poll()
    write(job / "a__1/agent/old/result.json", {})
    write(job / "a__1/artifacts/result.json", {})
    assert tree.poll()[1] == []
    finish_rollout(job / "a__1")
    assert [rollout.path for rollout in tree.poll()[1]] == [str(job / "a__1")]


def test_the_output_of_a_stand_alone_proxy_is_skipped(tmp_path: Path) -> None:
    make_job(tmp_path / "jobs/job", [{"name": "a__1"}])
    folder = tmp_path / "jobs/captures/default/trajectory"
    folder.mkdir(parents=True)
    folder.joinpath("llm_trajectory.jsonl").write_text(json.dumps(conversation(1)[0]) + "\n")
    records = list(stream_rollouts(tmp_path / "jobs", poll_interval=0.02, timeout=60))
    assert [row["rollout"] for row in records] == ["a__1"]


def test_a_copy_of_the_last_summary_beside_the_jobs_ends_nothing(tmp_path: Path) -> None:
    make_job(tmp_path / "job", state="running")
    write(tmp_path / "summary.json", {"job_name": "an earlier one"})
    assert (
        len(follow(tmp_path, [lambda: make_rollout(tmp_path / "job") and None, lambda: end_job(tmp_path / "job")])) == 2
    )


def test_the_golden_lines_of_a_stream_are_unchanged(tmp_path: Path) -> None:
    """Written anew with `GOLDEN=write`."""
    root = trials(
        tmp_path, [{"task": "t"}, {"task": "t", "reward": 0.0}], [{"task": "u"}, {"task": "u", "calls": broken()}]
    )
    [row], _, _ = once(make_job(tmp_path.parent / "alone", [{"name": "t__0"}]))
    records, withheld, _ = once(root, group_size=2, group_by="task,agent,model")
    made = {"ungrouped": row, "grouped": records[0], "withheld": withheld[0][1]}
    folder = Path(__file__).parents[3] / "capture/schemas/examples/stream"
    if os.environ.get("GOLDEN") == "write":
        folder.mkdir(exist_ok=True)
        for name, line in made.items():
            (folder / f"{name}.json").write_bytes(orjson.dumps(line, option=orjson.OPT_INDENT_2) + b"\n")
    golden = dict(examples("stream"))
    assert golden.keys() == made.keys()
    for name, line in made.items():
        assert json.loads(json.dumps(line)) == golden[name]
        SCHEMA.validate(golden[name])
