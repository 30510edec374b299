"""`bench train token-coverage`: the seed's lines, every reason for `no`, threads by tokens, and what --explain says."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from capture.record import FIELDS
from tests.train.build import broken, conversation, failed, line, make_job, make_rollout, uncaptured
from tests.train.labelled_breaks import cases
from tests.train.smollm import smollm
from train.cli import app
from train.rollouts.rollouts import find_rollouts
from train.tokens.coverage import coverage, ranges
from train.tokens.rollout_tokens import RolloutTokens, read_tokens
from train.tokens.sampling import sentence

PLAIN = {"sent": {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0}, "session": {}, "engine_defaults": None}


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["token-coverage", *map(str, words)], catch_exceptions=True)


def tokens(tmp_path: Path, calls: list[dict[str, Any]], **spec: Any) -> RolloutTokens:
    job = make_job(tmp_path / "job", [{"calls": calls, **spec}])
    (rollout,) = find_rollouts(job)
    return read_tokens(rollout)


def line_of(tmp_path: Path, calls: list[dict[str, Any]] | None, **spec: Any) -> str:
    make_job(tmp_path / "job", [{"name": "write-number__5cfd1b6d", "calls": calls, **spec}])
    first, total = run(tmp_path / "job").stdout.splitlines()
    assert total.endswith("of 1 rollouts are training-grade (complete token ids and logprobs, token-in/token-out)")
    assert total.startswith("1" if first.startswith("yes") else "0")
    return first


def test_the_seeds_lines(tmp_path: Path) -> None:
    make_job(tmp_path / "rl-capture", [{"name": "write-number__5cfd1b6d"}])
    assert run(tmp_path / "rl-capture").stdout == (
        "yes  write-number__5cfd1b6d [vllm]: 2/2 calls complete, 1/1 prompts extend the previous call\n"
        "1 of 1 rollouts are training-grade (complete token ids and logprobs, token-in/token-out)\n"
    )


@pytest.mark.parametrize(("state", "listed"), [("finished", False), ("stopped", False), ("running", True)])
def test_unfinished_rollouts_of_a_finished_job_are_left_out(tmp_path: Path, state: str, listed: bool) -> None:
    """`bench run --resume` runs the task again under another name; the folder of the rollout that was stopped stays."""
    plain = conversation(2, sampling=PLAIN)
    rollouts = [{"name": "t__1", "calls": plain}, {"name": "t__2", "calls": plain, "finished": False}]
    job = make_job(tmp_path / "job", rollouts, state=state)
    result = run(job)
    assert result.stdout.splitlines()[-1].startswith("2 of 2" if listed else "1 of 1")
    seen = "leaving out t__2: its job is over, and it never finished\n"
    assert result.stderr == ("" if listed else seen)
    assert run(job / "t__2").stdout.splitlines()[-1].startswith("1 of 1")


def test_capture_off(tmp_path: Path) -> None:
    assert line_of(tmp_path, uncaptured(2)) == (
        "no   write-number__5cfd1b6d: calls went through the gateway without token capture; rerun with --agent-env "
        "BENCHFLOW_CAPTURE_TOKEN_LOGPROBS=1"
    )


def test_no_log(tmp_path: Path) -> None:
    assert line_of(tmp_path, None) == "no   write-number__5cfd1b6d: no llm_trajectory.jsonl in this rollout"


def test_an_empty_log(tmp_path: Path) -> None:
    assert line_of(tmp_path, []) == "no   write-number__5cfd1b6d: its llm_trajectory.jsonl has no model call"


def test_calls_that_went_elsewhere(tmp_path: Path) -> None:
    result = {"usage_tracking": {"endpoint_kind": "agent_native"}}
    assert line_of(tmp_path, None, result=result) == (
        "no   write-number__5cfd1b6d: the agent's model calls did not go through BenchFlow's gateway "
        "(usage_tracking.endpoint_kind=agent_native)"
    )


def test_a_call_that_is_not_complete(tmp_path: Path) -> None:
    calls = conversation(3)
    calls[1]["metadata"]["token_capture"]["completions"][0]["logprobs"] = [-0.1]
    assert line_of(tmp_path, calls) == (
        "no   write-number__5cfd1b6d [vllm]: 2/3 calls complete, 1/1 prompts extend the previous call; missing: "
        "logprobs:length_mismatch in 1 call"
    )


def test_a_break_names_its_call_and_token(tmp_path: Path) -> None:
    text = line_of(tmp_path, broken(2))
    assert text.startswith(
        "no   write-number__5cfd1b6d [vllm]: 2/2 calls complete, 0/1 prompts extend the previous call"
    )
    assert "; call 1 breaks at token 13 (" in text


def test_no_such_path(tmp_path: Path) -> None:
    done = run(tmp_path / "nowhere")
    assert done.exit_code != 0 and str(done.exception) == f"No such path: {tmp_path / 'nowhere'}"
    assert run(tmp_path / "nowhere", "--json").stdout == ""


def test_the_proxys_own_folder_and_a_bare_journal(tmp_path: Path) -> None:
    rollout = make_rollout(tmp_path / "captures", name="default", finished=False)
    for path in (tmp_path / "captures", rollout, rollout / "trajectory/llm_trajectory.jsonl"):
        assert run(path).stdout.splitlines()[0].startswith("yes  default [vllm]: 2/2 calls complete")


def test_rollouts_of_the_same_name_are_named_by_path(tmp_path: Path) -> None:
    for trial in ("trial-01", "trial-02"):
        make_job(tmp_path / "jobs" / trial / "job", [{"name": "a__1"}])
    first, second, total = run(tmp_path / "jobs").stdout.splitlines()
    assert first.startswith("yes  a__1 [") and second.startswith("yes  trial-02/job/a__1 [")
    assert total.startswith("2 of 2")


def test_a_folder_without_rollouts_is_reported(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.exit_code == 0 and f"there is no rollout and no journal in {tmp_path}" in done.stderr


def test_many_calls_with_one_reason_are_one_line() -> None:
    assert (ranges([4]), ranges([0, 1, 2, 7, 9, 10])) == ("4", "0-2, 7, 9-10")


def test_json_of_an_empty_folder_is_json(tmp_path: Path) -> None:
    assert json.loads(run(tmp_path, "--json").stdout) == {
        "per_rollout": [],
        "rollouts": 0,
        "training_grade_rollouts": 0,
    }


# threads


def side(number: int, **metadata: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"a title {number}"}]
    return line(number, [900, 901, number], [7000 + number], messages=messages, **metadata)


@pytest.mark.parametrize("purpose", ["title", "summary", "helper", "compaction"])
def test_side_calls_break_nothing_and_need_not_be_complete(tmp_path: Path, purpose: str) -> None:
    first, second = conversation(2, start=0)
    second["metadata"]["call"] = 2
    title = side(1, call_purpose=purpose)
    title["metadata"]["token_capture"]["completions"][0]["logprobs"] = None
    assert line_of(tmp_path, [first, title, second]) == (
        "yes  write-number__5cfd1b6d [vllm]: 2/2 calls complete, 1/1 prompts extend the previous call; "
        "1 side call apart"
    )


def test_calls_without_tools_beside_calls_with_them_are_helpers(tmp_path: Path) -> None:
    calls = conversation(2)
    for call_line in calls:
        call_line["request"]["body"]["tools"] = [{"type": "function", "function": {"name": "bash"}}]
    helper = side(2)
    helper["request"]["body"].pop("tools", None)
    seen = tokens(tmp_path, [*calls, helper])
    assert [call.kind for call in seen.calls] == ["agent", "agent", "helper"] and seen.training_grade
    assert [(segment.kind, segment.sampled) for segment in seen.segments] == [("agent", 8), ("helper", 1)]
    assert seen.segment_notes[1]["trainable"] is False and seen.segment_notes[1]["excluded"] == "kind:helper"


def test_two_conversations_that_interleave_are_two_threads(tmp_path: Path) -> None:
    first, second = conversation(3), conversation(3, first=5000)
    for call in second:
        for message in call["request"]["body"]["messages"]:
            message["content"] = "worker: " + message["content"]
    mixed = [call for pair in zip(first, second, strict=True) for call in pair]
    for number, call in enumerate(mixed):
        call["metadata"]["call"] = number
    seen = tokens(tmp_path, mixed)
    assert seen.training_grade and not seen.breaks
    assert [sequence.calls for sequence in seen.sequences] == [(0, 2, 4), (1, 3, 5)]
    assert seen.coverage["prefix"] == {"pairs": 4, "extends_previous_call": 4, "breaks": []}


def test_calls_are_taken_in_the_order_they_began(tmp_path: Path) -> None:
    seen = tokens(tmp_path, conversation(3)[::-1])
    assert seen.training_grade and seen.sequences[0].calls == (0, 1, 2) and seen.sequences[0].lines == (2, 1, 0)


def resampled(**changes: Any) -> list[dict[str, Any]]:
    """A turn that was sampled twice with the same ids, and the turn after it. `changes` are made to the second one."""
    first, second = conversation(2)
    twin = copy.deepcopy(first)
    twin["metadata"]["call"], second["metadata"]["call"] = 1, 2
    if "logprobs" in changes:
        twin["metadata"]["token_capture"]["completions"][0]["logprobs"] = changes["logprobs"]
    if "tool_ids" in changes:
        for call, call_id in zip((first, twin), changes["tool_ids"], strict=True):
            message = call["response"]["body"]["choices"][0]["message"]
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": "run", "arguments": "{}"}}
            ]
        chosen = copy.deepcopy((first, twin)[changes["used"]]["response"]["body"]["choices"][0]["message"])
        at = next(n for n, sent in enumerate(second["request"]["body"]["messages"]) if sent["role"] == "assistant")
        second["request"]["body"]["messages"][at] = chosen
    if "text" in changes:
        twin["response"]["body"]["choices"][0]["message"]["content"] = changes["text"]
    return [first, twin, second]


OTHER_LOGPROBS = [-0.01, -0.02, -0.03, -0.04]


def test_equal_replies_with_other_logprobs_are_not_guessed(tmp_path: Path) -> None:
    seen = tokens(tmp_path, resampled(logprobs=OTHER_LOGPROBS))
    assert not seen.training_grade and "not guessed" in str(seen.reason)
    assert seen.coverage["ambiguous"] == [{"call": 2, "continues": [0, 1]}]


@pytest.mark.parametrize(
    ("changes", "parent"),
    [
        ({}, 1),  # equal in ids and logprobs: either will do
        ({"tool_ids": ("call_a", "call_b"), "used": 0}, 0),
        ({"tool_ids": ("call_a", "call_b"), "used": 1}, 1),
        ({"tool_ids": ("call_a", "call_b"), "used": 0, "logprobs": OTHER_LOGPROBS}, 0),
        ({"tool_ids": ("call_a", "call_b"), "used": 1, "logprobs": OTHER_LOGPROBS}, 1),
        ({"text": "said otherwise", "logprobs": OTHER_LOGPROBS}, 0),
        ({"text": "said otherwise"}, 0),
    ],
)
def test_the_reply_that_was_sent_back_is_the_one_continued(
    tmp_path: Path, changes: dict[str, Any], parent: int
) -> None:
    seen = tokens(tmp_path, resampled(**changes))
    assert seen.training_grade and seen.placements[2].parent == parent


@pytest.mark.parametrize("turn", [0, 1])
def test_a_reply_that_the_agent_threw_away_is_not_trained(tmp_path: Path, turn: int) -> None:
    """A turn that was sampled twice with other ids: the rollout is the reply that was continued."""
    calls = conversation(3)
    thrown = copy.deepcopy(calls[turn])
    thrown["metadata"]["token_capture"]["completions"][0]["token_ids"] = [901, 902, 903, 904]
    thrown["response"]["body"]["choices"][0]["message"]["content"] = "Another reply."
    calls.insert(turn, thrown)
    for number, call in enumerate(calls):
        call["metadata"]["call"] = number
    seen = tokens(tmp_path, calls)
    assert seen.training_grade
    (sequence,) = seen.sequences
    assert turn not in sequence.calls and len(sequence.calls) == 3


def test_a_last_turn_sampled_twice_keeps_both_replies(tmp_path: Path) -> None:
    """Nothing says which of them the agent ended with."""
    calls = conversation(2)
    twin = copy.deepcopy(calls[1])
    twin["metadata"]["token_capture"]["completions"][0]["token_ids"] = [901, 902, 903, 904]
    twin["metadata"]["call"] = 2
    assert len(tokens(tmp_path, [*calls, twin]).segments) == 2


def test_empty_replies_are_never_parents(tmp_path: Path) -> None:
    """A turn that gave nothing twice, and was made again: the rollout is the one that answered."""
    first, second = conversation(2)
    empty = copy.deepcopy(first)
    empty["metadata"]["token_capture"]["completions"][0] |= {"token_ids": [], "tokens": [], "logprobs": []}
    empty["response"]["body"]["choices"][0]["message"]["content"] = ""
    again = copy.deepcopy(empty)
    for number, call in enumerate((empty, again, first, second)):
        call["metadata"]["call"] = number
    seen = tokens(tmp_path, [empty, again, first, second])
    assert seen.training_grade
    assert [sequence.calls for sequence in seen.segments] == [(2, 3)]


def test_a_conversation_continues_over_an_incomplete_call(tmp_path: Path) -> None:
    calls = conversation(3)
    calls[1]["metadata"]["token_capture"]["completions"][0]["logprobs"] = None
    seen = tokens(tmp_path, calls)
    (segment,) = seen.segments
    assert segment.calls == (0, 2) and segment.completion_mask == [1] * 4 + [0] * (3 + 4 + 3) + [1] * 4
    assert not seen.training_grade and seen.sequences == []


def test_a_segment_after_a_call_without_ids_names_that_call(tmp_path: Path) -> None:
    calls = conversation(2)
    capture = calls[0]["metadata"]["token_capture"]
    capture["completions"][0] |= {"token_ids": None, "logprobs": None, "tokens": None}
    seen = tokens(tmp_path, calls)
    assert seen.segment_notes[0]["start"] == {"reason": "after_dropped_call", "call": 0}


# failed calls


def test_a_failed_call_that_was_made_again_counts_for_nothing(tmp_path: Path) -> None:
    calls = [failed(0), *conversation(2, start=1)]
    calls[1]["metadata"]["retry_of"] = 0
    assert line_of(tmp_path, calls) == (
        "yes  write-number__5cfd1b6d [vllm]: 2/2 calls complete, 1/1 prompts extend the previous call; "
        "1 failed call answered by a retry"
    )


def test_in_benchflows_logs_a_retry_is_the_call_with_the_same_messages(tmp_path: Path) -> None:
    calls = conversation(2, start=1)
    first = failed(0)
    first["response"] |= {"status_code": 500, "body": {"error": {"message": "the engine crashed"}}}
    first["request"]["body"] = copy.deepcopy(calls[0]["request"]["body"])
    for call_line in (first, *calls):
        call_line["metadata"].pop("retry_of", None)
    assert tokens(tmp_path, [first, *calls]).training_grade
    calls[0]["request"]["body"]["messages"].append({"role": "user", "content": "something else"})
    seen = tokens(tmp_path / "other", [first, *calls])
    assert not seen.training_grade and seen.coverage["failed_attempts"] == {
        "retried": 0,
        "unretried": 1,
        "refused": 0,
        "ended": 0,
        "cut": 0,
    }


# calls of which nothing is missing

REFUSALS = {
    "vLLM": (
        400,
        {"error": {"message": "This model's maximum context length is 4096 tokens. However, you requested 5000"}},
    ),
    "SGLang": (400, {"message": "Requested token count exceeds the model's maximum context length of 4096 tokens."}),
    "llama.cpp": (
        400,
        {"error": {"type": "exceed_context_size_error", "message": "the request exceeds the available"}},
    ),
    "Anthropic": (400, {"type": "error", "error": {"message": "prompt is too long: 5000 tokens > 4096 maximum"}}),
    "FastAPI": (422, {"detail": "Unprocessable"}),
    "too large": (413, {}),
    "a gateway": (500, {"error": {"message": "litellm.ContextWindowExceededError: prompt exceeds the context window"}}),
    "in a stream": (200, {"error": {"message": "Input is too long: exceeds max_model_len"}}),
}


def refused(number: int, status: int, body: dict[str, Any]) -> dict[str, Any]:
    call = failed(number)
    call["response"] |= {"status_code": status, "body": body}
    return call


@pytest.mark.parametrize(("status", "body"), REFUSALS.values(), ids=REFUSALS)
def test_a_prompt_that_no_longer_fits_costs_nothing(tmp_path: Path, status: int, body: dict[str, Any]) -> None:
    calls = [*conversation(2, sampling=PLAIN), refused(2, status, body)]
    text = line_of(tmp_path, calls)
    assert "2/2 calls complete" in text and text.startswith("yes")
    assert text.endswith("1 call refused by the engine, nothing sampled")
    explained = run(tmp_path / "job", "--explain").stdout
    assert f"call 2 was refused: HTTP {status}" in explained and "so nothing is missing" in explained
    message = next((text for text in (body.get("message"), *_messages(body)) if text), "")
    assert message[:40] in explained


def _messages(body: dict[str, Any]) -> list[str]:
    error = body.get("error")
    return [error["message"]] if isinstance(error, dict) else []


@pytest.mark.parametrize(
    ("status", "outcome", "message"),
    [(500, "error", "CUDA error"), (503, "error", "overloaded"), (0, "error", ""), (408, "error", "timeout")],
)
def test_an_engine_that_failed_may_have_sampled(tmp_path: Path, status: int, outcome: str, message: str) -> None:
    call = refused(2, status, {"error": {"message": message}})
    call["metadata"]["outcome"] = outcome
    assert line_of(tmp_path, [*conversation(2), call]).startswith("no ")


def test_a_rollout_whose_every_call_was_refused_has_nothing_to_train(tmp_path: Path) -> None:
    text = line_of(tmp_path, [refused(0, *REFUSALS["vLLM"])])
    assert (
        text.startswith("no ") and "the engine refused all of its calls, the first with HTTP 400: This model's" in text
    )


def test_a_conversation_that_is_shortened_after_a_refusal_still_breaks(tmp_path: Path) -> None:
    calls = conversation(2, sampling=PLAIN)
    later = line(3, [900, 901], [902], messages=calls[1]["request"]["body"]["messages"][-1:], text="x", sampling=PLAIN)
    seen = tokens(tmp_path, [*calls, refused(2, *REFUSALS["vLLM"]), later])
    again = tokens(tmp_path / "without", [*calls, {**later, "metadata": {**later["metadata"], "call": 2}}])
    assert [found.before for found in seen.breaks] == [found.before for found in again.breaks]
    assert seen.training_grade == again.training_grade


def cut(number: int, **metadata: Any) -> dict[str, Any]:
    call = line(number, [1, 2], [3], outcome="aborted", sampling=PLAIN, **metadata)
    call["metadata"]["token_capture"]["unavailable"] = {
        "completion_token_ids": {"reason": "request_failed", "code": "stream_aborted", "detail": "the agent left"}
    }
    return call


def test_a_time_out_that_cuts_the_last_call_costs_nothing(tmp_path: Path) -> None:
    """The agent was stopped before it had the whole reply: nothing of it reached the environment."""
    text = line_of(tmp_path, [*conversation(2, sampling=PLAIN), cut(2), cut(3)], error="timed out", reward=0.0)
    assert text.startswith("yes") and text.endswith("2 last calls cut off, not counted")
    assert "call 2 was cut off with the rollout" in run(tmp_path / "job", "--explain").stdout


def test_a_call_that_was_cut_before_others_is_missing(tmp_path: Path) -> None:
    first, second = conversation(2, sampling=PLAIN)
    second["metadata"]["call"] = 2
    assert line_of(tmp_path, [first, cut(1), second]).startswith("no ")


def test_a_rollout_of_one_call_that_was_cut_has_nothing_to_train(tmp_path: Path) -> None:
    assert line_of(tmp_path, [cut(0)]).startswith("no ")


def test_a_side_call_after_the_cut_call_does_not_make_it_count(tmp_path: Path) -> None:
    title = line(3, [5, 6], [7], call_purpose="title", sampling=PLAIN)
    assert line_of(tmp_path, [*conversation(2, sampling=PLAIN), cut(2), title]).startswith("yes")


@pytest.mark.parametrize(
    ("metadata", "versions"),
    [
        ({}, []),
        ({"policy_version": "1"}, ["1"]),
        ({"policy_version": "1", "policy_version_end": "2"}, ["1", "2"]),
        ({"policy_version": None, "policy_version_end": "2"}, ["2"]),
        ({"policy_version": "2", "policy_version_end": "2"}, ["2"]),
        ({"policy_version": 7, "policy_version_end": 8}, ["7", "8"]),
    ],
)
def test_weights_that_were_updated_in_flight_are_both_versions(
    tmp_path: Path, metadata: dict[str, Any], versions: list[str]
) -> None:
    seen = tokens(tmp_path, conversation(2, **metadata))
    assert [list(segment.policy_versions) for segment in seen.segments] == [versions]
    [first, _] = seen.captured_calls
    assert [first["policy_version"], first["policy_version_end"]] == [*versions, None, None][:2]


@pytest.mark.parametrize(
    ("ranges", "versions", "spans"),
    [
        ([("6", 0, 1), ("7", 1, 4)], ["6", "7"], [(0, 1, "6", None), (1, 3, "7", None)]),
        ([("6", 0, 4)], ["6"], [(0, 4, "6", None)]),
        ([("6", 0, 1)], ["1", "2"], [(0, 4, "1", "2")]),
        ([], ["1", "2"], [(0, 4, "1", "2")]),
    ],
)
def test_the_engines_version_of_each_id_wins_over_the_proxys(
    tmp_path: Path, ranges: list[Any], versions: list[str], spans: list[Any]
) -> None:
    proxy_versions = {"policy_version": "1", "policy_version_end": "2"}
    (call,) = conversation(1, **proxy_versions)
    call["metadata"]["weight_versions"] = [
        [{"version": version, "start": start, "end": end} for version, start, end in ranges]
    ]
    ids = call["metadata"]["token_capture"]["completions"][0]["token_ids"]
    assert len(ids) == 4
    seen = tokens(tmp_path, [call])
    (note,) = seen.segment_notes
    assert note["policy_versions"] == versions
    names = ("offset", "length", "policy_version", "policy_version_end")
    assert [tuple(span[name] for name in names) for span in note["version_spans"]] == spans
    assert [seen.captured_calls[0]["policy_version"], seen.captured_calls[0]["policy_version_end"]] == [
        *versions, None, None,
    ][:2]  # fmt: skip


def test_a_call_that_never_reached_the_engine_is_nothing_that_is_missing(tmp_path: Path) -> None:
    """The agent gave up while engines were paused, and went on with another call."""
    first, second = conversation(2, sampling=PLAIN)
    second["metadata"]["call"] = 2
    never = failed(1)
    never["metadata"]["outcome"] = "aborted"
    never["response"] |= {"status_code": 0, "body": None}
    why = {"reason": "request_failed", "code": "never_sent", "detail": "x"}
    never["metadata"]["token_capture"]["unavailable"] = dict.fromkeys(
        ("prompt_token_ids", "completion_token_ids", "logprobs"), why
    )
    assert line_of(tmp_path, [first, never, second]).startswith("yes  write-number__5cfd1b6d [vllm]: 2/2 calls")


# what is not whole


@pytest.mark.parametrize(("lost", "named"), [([1], "call 1 has"), ([0], "call 0 has"), ([1, 2], "2 calls (1, 2) have")])
def test_calls_that_were_lost_before_later_ones(tmp_path: Path, lost: list[int], named: str) -> None:
    """A disk that was full for a while: their numbers are missing in the log."""
    calls = [call for call in conversation(4, sampling=PLAIN) if call["metadata"]["call"] not in lost]
    seen = tokens(tmp_path, calls)
    assert seen.coverage["training_grade"] is False
    assert str(seen.coverage["reason"]).startswith(f"its log is not whole: {named} no line")


def test_a_torn_line_loses_only_the_grade(tmp_path: Path) -> None:
    whole = b"".join(json.dumps(call_line).encode() + b"\n" for call_line in conversation(2))
    text = line_of(tmp_path, [], journal=whole + whole[:200])
    assert text.startswith("no   write-number__5cfd1b6d [vllm]: 2/2 calls complete, 1/1 prompts extend")
    assert "its log is not whole: line 3" in text


def test_a_journal_that_could_not_be_written_is_not_whole(tmp_path: Path) -> None:
    seen = tokens(
        tmp_path, conversation(2), result={"export_error": "cannot write the journal: No space left on device"}
    )
    assert not seen.training_grade and "No space left" in str(seen.reason)


def test_a_capture_of_another_version_is_reported(tmp_path: Path) -> None:
    calls = conversation(2)
    calls[1]["metadata"]["token_capture"]["schema_version"] = "benchflow.token_capture.v9"
    seen = tokens(tmp_path, calls)
    assert not seen.training_grade and "v9" in str(seen.reason)


def test_a_log_with_the_numbers_of_two_proxies_is_read_by_its_lines(tmp_path: Path) -> None:
    calls = conversation(3)
    for call in calls:
        call["metadata"]["call"] = 0
    assert tokens(tmp_path, calls).sequences[0].calls == (0, 1, 2)


def test_a_log_that_cannot_be_read_is_one_line_and_no_crash(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"name": "a__1"}, {"name": "b__2"}])
    log = job / "a__1/trajectory/llm_trajectory.jsonl"
    log.unlink()
    log.symlink_to(job / "loop.jsonl")
    (job / "loop.jsonl").symlink_to(log)
    first, second, _ = run(job).stdout.splitlines()
    assert first.startswith("no   a__1: ") and second.startswith("yes  b__2")


# --json and --explain


def test_json_carries_all_of_it(tmp_path: Path) -> None:
    make_job(tmp_path / "job", [{"name": "a__1"}, {"name": "b__2", "calls": broken(2)}])
    seen = json.loads(run(tmp_path / "job", "--json", "--explain").stdout)
    assert (seen["rollouts"], seen["training_grade_rollouts"]) == (2, 1)
    good, bad = seen["per_rollout"]
    assert good["rollout"] == "a__1" and good["status"] == "captured" and good["path"] == "vllm"
    assert (good["calls"], good["captured_calls"], good["complete_calls"]) == (2, 2, 2)
    assert good["prefix"] == {"pairs": 1, "extends_previous_call": 1, "breaks": []}
    assert good["threads"] == [{"thread": 0, "kind": good["threads"][0]["kind"], "calls": [0, 1]}]
    assert bad["prefix"]["breaks"] == [1] and bad["breaks"][0]["index"] == 13 and bad["breaks"][0]["remedy"]
    assert bad["explained"] and bad["reason"] == "a conversation's calls could not be merged into one sequence"


def real_break(tmp_path: Path, name: str) -> Path:
    """A job of two calls made of a labelled break, and a folder with its tokenizer."""
    case = next(case for case in cases() if case.name == name)
    calls = []
    for number, seen in enumerate((case.before, case.after)):
        sampled = seen.sampled.tolist() or [504, 2]
        made = line(number, seen.prompt.tolist(), sampled, messages=list(seen.messages or []), sampling=PLAIN)
        made["request"]["body"]["tools"] = seen.tools
        made["response"]["body"]["usage"]["completion_tokens"] = len(sampled)
        made["response"]["body"]["choices"][0]["message"] = seen.reply or {"role": "assistant", "content": "ok"}
        calls.append(made)
    make_job(tmp_path / "job", [{"name": "write-number__5cfd1b6d", "calls": calls}])
    (tmp_path / "tokenizer").mkdir()
    smollm().save(str(tmp_path / "tokenizer/tokenizer.json"))
    return tmp_path / "job"


def test_explain_shows_both_sides_the_cause_and_what_to_do(tmp_path: Path) -> None:
    job = real_break(tmp_path, "arguments: the agent took the spaces out")
    done = run(job, "--explain", "--tokenizer", tmp_path / "tokenizer")
    text = done.stdout
    assert "call 1 does not continue call 0: from token " in text
    assert "cause   the tool call's arguments were re-serialized (certain)" in text
    assert "change  the agent or the chat template wrote the arguments' JSON in another form" in text
    assert "sampled tokens in the segment before, 2 sampled tokens in the one after" in text
    expected_line = next(printed for printed in text.splitlines() if printed.strip().startswith("held"))
    sent = next(printed for printed in text.splitlines() if printed.strip().startswith("sent"))
    assert "/app/answer" in expected_line and '"/' in sent, (expected_line, sent)
    assert "sampled with" not in text, "plain sampling needs no word"


def test_a_bad_tokenizer_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    make_job(tmp_path / "job", [{}])
    done = run(tmp_path / "job", "--explain", "--tokenizer", tmp_path)
    assert "no tokenizer.json there" in str(done.exception)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "cannot be read" in str(run(tmp_path / "job", "--tokenizer", tmp_path).exception)


@pytest.mark.parametrize(
    ("sent", "word"),
    [
        ({"temperature": 0.7}, "temperature 0.7"),
        ({"top_p": 0.9}, "top_p 0.9"),
        ({"top_k": 20}, "top_k 20"),
        ({"min_p": 0.05}, "min_p 0.05"),
        ({"presence_penalty": 1.5}, "presence_penalty 1.5"),
        ({"repetition_penalty": 1.1}, "repetition_penalty 1.1"),
        ({"structured_outputs": {"regex": "a"}}, "a grammar (structured_outputs)"),
        ({"response_format": {"type": "json_schema"}}, "a grammar (response_format json_schema)"),
        ({"tool_choice": "required"}, "a tool grammar (tool_choice)"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"temperature": None}, "the engine's own temperature (not sent"),
    ],
)
def test_sampling_that_is_not_plain_is_reported_once_per_rollout(
    tmp_path: Path, sent: dict[str, Any], word: str
) -> None:
    parameters = {name: value for name, value in (PLAIN["sent"] | sent).items() if value is not None}  # type: ignore[operator]
    sampling = {"sent": parameters, "session": {}, "engine_defaults": None}
    make_job(tmp_path / "job", [{"calls": conversation(2, sampling=sampling)}])
    (seen,) = [
        printed for printed in run(tmp_path / "job", "--explain").stdout.splitlines() if "sampled with" in printed
    ]
    assert word in seen and "2 calls sampled with" in seen and "importance ratios" in seen


def test_a_known_bias_of_training_grade_rollouts_is_reported(tmp_path: Path) -> None:
    biased = conversation(1, sampling={**PLAIN, "sent": {"temperature": 0.7, "tool_choice": "required"}})
    unknown = conversation(1, sampling={**PLAIN, "sent": {}})
    make_job(
        tmp_path / "job", [{"calls": calls} for calls in (biased, biased, unknown, conversation(1, sampling=PLAIN))]
    )
    seen = run(tmp_path / "job")
    assert seen.stdout.splitlines()[-1].startswith("4 of 4 rollouts are training-grade")
    assert seen.stderr == (
        "2 training-grade rollouts sampled with temperature 0.7 and a tool grammar (tool_choice): complete, but their "
        "logprobs are biased for importance ratios (--explain)\n"
    )
    assert run(tmp_path / "job", "--explain").stderr == run(tmp_path / "job", "--json").stderr == ""


def test_known_defaults_of_the_engine_count(tmp_path: Path) -> None:
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    calls = conversation(2, sampling={"sent": {}, "session": {}, "engine_defaults": defaults})
    assert tokens(tmp_path, calls).coverage["sampling"][0]["plain"] is True


def test_unknown_defaults_are_reported_as_unknown() -> None:
    assert "were not sampled from the plain policy, so" in sentence(["temperature 0.8", "top_p unknown"])


def test_no_sampling_parameter_is_offered_against_a_grammar() -> None:
    assert sentence(["llama.cpp's tool grammar"]).endswith(
        "; correct for it in the trainer: --sampling cannot remove a grammar"
    )
    assert "sample plainly (--sampling" in sentence(["llama.cpp's tool grammar", "top_p 0.95"])
    seen = sentence(["temperature unknown", "top_p unknown"])
    assert "may not have been sampled" in seen and "were not sampled" not in seen


def test_sampling_is_read_from_requests_where_it_was_not_recorded(tmp_path: Path) -> None:
    calls = conversation(1)
    calls[0]["metadata"].pop("sampling", None)
    calls[0]["request"]["body"] |= {"temperature": 0.3, "top_p": 1, "top_k": -1, "min_p": 0}
    assert tokens(tmp_path, calls).coverage["sampling"][0]["not_plain"] == ["temperature 0.3"]


def test_unknown_roles_and_parts_are_read(tmp_path: Path) -> None:
    calls = conversation(2)
    for call in calls:
        call["request"]["body"]["messages"] = [
            {"role": {"a": 1}, "content": "x"}, {"role": ["user"], "content": [{"type": ["image"], "text": "y"}]},
        ]  # fmt: skip
    calls[1]["metadata"]["token_capture"]["prompt_token_ids"][0] += 1
    assert tokens(tmp_path, calls).coverage["breaks"]


def test_the_documented_example_is_what_it_prints(tmp_path: Path) -> None:
    job = real_break(tmp_path, "arguments: the agent took the spaces out")
    text = (Path(__file__).parents[3] / "docs/train.md").read_text()
    shown = text.partition("<!-- explain -->")[2].split("```")[1].partition("my/model\n")[2]
    assert run(job, "--explain", "--tokenizer", tmp_path / "tokenizer").stdout == shown


def past_the_budget(number: int, **metadata: Any) -> dict[str, Any]:
    """The line of a call that the proxy answered because the session's budget was used up."""
    made = line(number, [1], [])
    capture = made["metadata"]["token_capture"]
    why = {"reason": "request_failed", "code": "budget_reached", "detail": "the budget was used up"}
    capture |= {"prompt_token_ids": None, "completions": [], "unavailable": dict.fromkeys(FIELDS, why)}
    made["metadata"] |= {
        "outcome": "ended",
        "ended": {"limit": "max_calls", "max": 2, "used": 2, "answer": "message"},
        **metadata,
    }
    made["response"] |= {"status_code": 403, "body": {"error": {"message": "the budget is used up", "code": 403}}}
    return made


def test_calls_past_the_budget_cost_nothing_and_are_counted(tmp_path: Path) -> None:
    calls = [*conversation(2), past_the_budget(2), past_the_budget(3, call_purpose="title")]
    job = make_job(tmp_path / "job", [{"name": "t__0", "calls": calls}])
    [seen] = coverage(job)
    assert seen.training_grade and seen.summary["calls"] == seen.summary["complete_calls"] == 2
    assert seen.summary["failed_attempts"]["ended"] == 2 and seen.summary["failed_attempts"]["refused"] == 0
    assert seen.summary["budget"] == "max_calls 2"
    assert "ended by its budget (max_calls 2), 2 calls answered by the proxy" in seen.line
    assert "call 2 was past the session's budget (max_calls 2): nothing was sampled" in seen.explained


def test_a_call_that_was_cut_before_the_budget_ended_is_missing_or_cut_as_ever(tmp_path: Path) -> None:
    calls = conversation(2)
    calls[1]["metadata"] |= {"outcome": "aborted"}
    calls[1]["metadata"]["token_capture"]["unavailable"] = {
        "logprobs": {"reason": "request_failed", "code": "stream_aborted", "detail": ""}
    }
    job = make_job(tmp_path / "job", [{"name": "t__0", "calls": [*calls, past_the_budget(2)]}])
    [seen] = coverage(job)
    assert seen.training_grade and seen.summary["failed_attempts"]["cut"] == 1


def test_an_evaluation_is_named(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"name": "t__0", "result": {"purpose": "eval"}}, {"name": "t__1"}])
    seen = {each.rollout.name: each for each in coverage(job)}
    assert seen["t__0"].line.endswith("; an evaluation") and "evaluation" not in seen["t__1"].line
    assert [seen[name].to_json()["purpose"] for name in ("t__0", "t__1")] == ["eval", "train"]
