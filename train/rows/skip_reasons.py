"""Why something was left out of the rows: each reason's name, what it counts, and its sentence."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from train.groups.withhold import WithheldReason


@dataclass(frozen=True, slots=True)
class Reason:
    """`counts` is the unit: `rollout`, `call` or `row`. `manifest` is the counter of the manifest, BenchFlow's where it
    has one.
    """

    counts: str
    sentence: str
    manifest: str


REASONS = {
    # of rollouts
    "no_result": Reason("rollout", "not finished: no result.json yet", "skipped_no_result"),
    "evaluation": Reason("rollout", "run as an evaluation; --purpose eval or all takes them", "skipped_evaluation"),
    "not_evaluation": Reason(
        "rollout", "run for training; --purpose train or all takes them", "skipped_not_evaluation"
    ),
    "errored": Reason(
        "rollout", "ended in an error; --include-errored keeps those that were scored", "skipped_terminal_error"
    ),
    "errored_unscored": Reason("rollout", "ended in an error, without a reward", "skipped_terminal_error"),
    "below_min_reward": Reason("rollout", "reward below --min-reward, or none", "skipped_reward"),
    "no_trajectory": Reason("rollout", "no log of model calls", "skipped_no_trajectory"),
    "unscored": Reason("rollout", "not scored, and the format needs a reward", "skipped_unscored"),
    "replaced": Reason("rollout", "a failed attempt that a retry replaced", "skipped_replaced"),
    "group_unscored": Reason("rollout", "in a group with an unscored rollout", "withheld_unscored"),
    "group_no_model_calls": Reason("rollout", "in a group with a rollout of no model calls", "withheld_no_model_calls"),
    "group_mixed_sequences": Reason(
        "rollout", "in a group in which some have a token sequence and some do not", "withheld_mixed_sequences"
    ),
    "group_incomplete": Reason("rollout", "in a group that is not full", "withheld_group_incomplete"),
    "group_mixed_tasks": Reason(
        "rollout", "in a group whose members ran different versions of the task", "withheld_mixed_tasks"
    ),
    "group_unreadable_log": Reason("rollout", "in a group with a log that cannot be read", "withheld_unreadable_log"),
    "group_retried": Reason("rollout", "in a group with an attempt that will be retried", "withheld_retried"),
    "group_not_written": Reason(
        "rollout", "in a group with another rollout that cannot be a row", "withheld_group_not_written"
    ),
    "not_training_grade": Reason(
        "rollout",
        "no single exact token sequence (bench train token-coverage --explain says why); --row-mode segment keeps "
        "every part that is exact",
        "skipped_insufficient_capture_fidelity",
    ),
    "no_exact_part": Reason(
        "rollout",
        "none of its calls is complete (bench train token-coverage says why)",
        "skipped_insufficient_capture_fidelity",
    ),
    "branched": Reason(
        "rollout", "its calls branch into several sequences; --row-mode segment writes one row each", "skipped_branched"
    ),
    "no_capture": Reason(
        "rollout",
        "calls went through the gateway without token capture; rerun with "
        "--agent-env BENCHFLOW_CAPTURE_TOKEN_LOGPROBS=1",
        "skipped_insufficient_capture_fidelity",
    ),
    "unreadable": Reason("rollout", "its log cannot be read", "skipped_invalid"),
    "not_training_ready": Reason("rollout", "marked not training_ready by its writer", "skipped_invalid"),
    # of calls
    "provider_error": Reason("call", "the engine's answer was an error", "skipped_exchanges_provider_error"),
    "ended": Reason("call", "past the session's budget, answered by the proxy itself", "skipped_ended"),
    "interrupted": Reason("call", "cut off before the reply was complete", "skipped_interrupted"),
    "helper_call": Reason(
        "call", "a side call (title, summary, sub-agent), not the agent's own work", "skipped_helper_calls"
    ),
    "no_assistant": Reason("call", "the answer has no reply", "skipped_no_assistant"),
    "no_messages": Reason("call", "not a chat; trl-sft-ids takes text completions", "skipped_no_messages"),
    "not_text": Reason("call", "images or other parts that are not text", "skipped_not_text"),
    "repeated": Reason("call", "the same conversation and reply as another call", "skipped_repeated"),
    "not_captured": Reason(
        "call", "ids or logprobs are not complete", "skipped_insufficient_capture_fidelity"
    ),
    # of rows
    "malformed_tool_arguments": Reason(
        "row",
        "a tool call's arguments are not a JSON object that a row can hold (malformed, an integer beyond 64 bits, "
        "nested too deeply); trl-sft-ids keeps what was sampled",
        "skipped_invalid",
    ),
    "nothing_sampled": Reason("row", "no token was sampled", "skipped_nothing_sampled"),
    "not_plain_sampling": Reason(
        "row", "sampled otherwise than the recorded logprobs say (--require-plain-sampling)", "skipped_sampling"
    ),
    "secret_in_ids": Reason(
        "row", "has what looks like a secret, and token ids cannot be redacted", "skipped_secret"
    ),
    "side_sequence": Reason("row", "a sequence of side calls", "skipped_helper_calls"),
    "not_structs": Reason("row", "its tools or arguments do not fit the types of the other rows", "skipped_invalid"),
}  # fmt: skip

#: The outcome of a call that was not answered -> the reason.
LEFT_OUT_BY_OUTCOME: Final = {"error": "provider_error", "ended": "ended"}
#: The purpose of a rollout that is not asked for -> the reason.
OTHER_PURPOSE: Final = {"eval": "evaluation", "train": "not_evaluation"}


#: Counters of BenchFlow's manifest that are 0 here: a call without tools is a row, and no message is dropped to fit a
#: context (--context-policy).
NEVER_COUNTED: Final = (
    "skipped_provider_error",
    "skipped_missing_tool_defs",
    "skipped_missing_tools",
    "rows_compacted",
    "messages_dropped",
)
#: The reason here for each reason to withhold a group.
WITHHELD: Final[dict[WithheldReason, str]] = {
    "unscored": "group_unscored",
    "no_model_calls": "group_no_model_calls",
    "mixed_sequences": "group_mixed_sequences",
    "group_incomplete": "group_incomplete",
    "mixed_tasks": "group_mixed_tasks",
    "unreadable_log": "group_unreadable_log",
    "retried": "group_retried",
}


@dataclass(slots=True)
class Tally:
    """What was seen, written and left out, counted; and notes for the reader of the rows."""

    rollouts_seen: int = 0
    rollouts_written: int = 0
    exchanges_seen: int = 0
    rows: int = 0
    rows_with_tool_calls: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    notes: dict[str, int] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)

    def leave_out(self, reason: str, number: int = 1) -> None:
        if number:
            self.left_out[reason] += number

    def note(self, sentence: str, number: int = 1) -> None:
        """A sentence with `{n}` in it; it is printed once, with the sum."""
        self.notes[sentence] = self.notes.get(sentence, 0) + number

    def add(self, other: Tally) -> None:
        """Adds everything that another tally counted."""
        self.rollouts_written += other.rollouts_written
        self.exchanges_seen += other.exchanges_seen
        self.rows += other.rows
        self.rows_with_tool_calls += other.rows_with_tool_calls
        self.add_left_out(other)
        for sentence, number in other.notes.items():
            self.note(sentence, number)

    def add_left_out(self, other: Tally) -> None:
        """Adds only what another tally left out: its rows were rolled back."""
        self.left_out += other.left_out

    def sentences(self) -> list[str]:
        """One line per reason, in the order of `REASONS`, then the notes."""
        lines = [
            f"left out {self.left_out[name]} {reason.counts}(s): {reason.sentence}"
            for name, reason in REASONS.items()
            if self.left_out[name]
        ]
        return lines + [sentence.replace("{n}", str(number)) for sentence, number in self.notes.items()]

    def manifest(self) -> dict[str, Any]:
        """BenchFlow's counters; `left_out` says the same by our own reasons."""
        counters = dict.fromkeys([*(reason.manifest for reason in REASONS.values()), *NEVER_COUNTED], 0)
        for name, number in self.left_out.items():
            counters[REASONS[name].manifest] += number
        return counters | {
            "rollouts_seen": self.rollouts_seen,
            "rollouts_written": self.rollouts_written,
            "exchanges_seen": self.exchanges_seen,
            "rows_written": self.rows,
            "rows_with_tool_calls": self.rows_with_tool_calls,
            "left_out": {name: number for name, number in sorted(self.left_out.items()) if number},
            "notes": [sentence.replace("{n}", str(number)) for sentence, number in self.notes.items()],
        }
