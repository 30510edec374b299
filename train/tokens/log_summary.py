"""BenchFlow's summary of a rollout's calls: how complete they are, and why a rollout is not training-grade."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from capture.breaks.breaks import Break
from capture.record import TokenCapture
from capture.sequences.sequences import TRAINABLE_KINDS, TokenSequence
from capture.sequences.threads import Placement
from train.rollouts.rollouts import Rollout
from train.tokens.call_summary import CallSummary
from train.tokens.sampling import biasing

CAPTURE_OFF: Final = (
    "calls went through the gateway without token capture; rerun with --agent-env BENCHFLOW_CAPTURE_TOKEN_LOGPROBS=1"
)
NO_LOG: Final = "no llm_trajectory.jsonl in this rollout"
NOT_MERGED: Final = "a conversation's calls could not be merged into one sequence"


@dataclass(frozen=True, slots=True)
class LogSummary:
    """A rollout's calls by what became of them, and what `token-coverage --json` and the stream say about them.

    `retried`: failed calls that were made again and answered. `unsampled`: calls of which nothing is missing, because
    the engine refused them before it sampled, or because the reply of the last call was cut before the agent had it.
    Neither counts.
    """

    calls: Sequence[CallSummary]
    placements: dict[int, Placement]
    segments: Sequence[TokenSequence]
    breaks: Sequence[Break]
    retried: frozenset[int]
    problems: Sequence[str]

    @property
    def counted(self) -> list[CallSummary]:
        """The calls that decide whether the rollout is training-grade."""
        skipped = self.retried | {call.number for call in (*self.refused, *self.cut, *self.ended)}
        return [call for call in self.calls if call.own_work and call.number not in skipped]

    @property
    def refused(self) -> list[CallSummary]:
        """The agent's own calls that the engine refused before it sampled anything."""
        return [
            call
            for call in self.calls
            if call.own_work and call.ended is None and call.refusal is not None and call.number not in self.retried
        ]

    @property
    def ended(self) -> list[CallSummary]:
        """The calls past the session's budget, side calls too: the proxy answered them itself."""
        return [call for call in self.calls if call.ended is not None]

    @property
    def cut(self) -> list[CallSummary]:
        """The agent's own last calls, where the agent was stopped before their replies were complete (a time-out).

        Nothing that they sampled reached the environment or earned the reward, and everything before them is exact. A
        call that the agent left earlier is not one: the agent continued, and may have used what it had.
        """
        own = [call for call in self.calls if call.own_work and call.refusal is None]
        end = len(own)
        while end and own[end - 1].outcome == "aborted" and not own[end - 1].complete:
            end -= 1
        return own[end:] if end else []

    def to_json(self, rollout: Rollout) -> dict[str, Any]:
        """BenchFlow's summary, and what else is known. Calls are 0-based lines of the journal."""
        counted = self.counted
        captured = [call.capture for call in self.calls if call.capture is not None]
        complete = [call for call in counted if call.complete]
        lines = {call.number: call.line for call in self.calls}
        extending = [call for call in complete if (at := self.placements.get(call.number)) and _extends(at)]
        ambiguous = self._ambiguous(complete)
        summary: dict[str, Any] = {
            "status": self.status,
            "training_grade": False,
            "path": ",".join(sorted({capture.provider for capture in captured if capture.provider})) or None,
            "calls": len(counted),
            "captured_calls": sum(call.capture is not None for call in counted),
            "complete_calls": len(complete),
            "side_calls": sum(not call.own_work for call in self.calls),
            "failed_attempts": {
                "retried": len(self.retried),
                "unretried": sum(
                    not call.answered and call.ended is None and call.number not in self.retried for call in self.calls
                ),
                "refused": len(self.refused),
                "ended": len(self.ended),
                "cut": len(self.cut),
            },
            "unavailable": _unavailable(counted),
            "prefix": {
                "pairs": len(extending) + len(self.breaks),
                "extends_previous_call": len(extending),
                "breaks": [lines[found.call] for found in self.breaks],
            },
            "threads": [
                {"thread": number, "kind": segment.kind, "calls": list(segment.lines)}
                for number, segment in enumerate(self.segments)
            ],
            "ambiguous": [
                {"call": call.line, "continues": [lines[before] for before in self.placements[call.number].ambiguous]}
                for call in ambiguous
            ],
            "token_in": _token_in(counted),
            "breaks": [found.to_json() for found in self.breaks],
            "segments": len(self.segments),
            "sampled_tokens": sum(segment.sampled for segment in self.segments if segment.kind in TRAINABLE_KINDS),
            "sampling": _sampling(counted),
            "purpose": rollout.purpose,
            "budget": self.ended[0].ended if self.ended else None,
            "problems": list(self.problems),
        }
        reason = self._reason(rollout)
        summary["training_grade"] = reason is None
        if reason is not None:
            summary["reason"] = reason
        return summary

    @property
    def status(self) -> str:
        if not self.calls:
            return "no_gateway_capture"
        off = all(call.capture is None or _was_off(call.capture) for call in self.calls)
        return "capture_off" if off and not any(call.unreadable for call in self.calls) else "captured"

    def _ambiguous(self, complete: Sequence[CallSummary]) -> list[CallSummary]:
        return [call for call in complete if call.number in self.placements and self.placements[call.number].ambiguous]

    def _reason(self, rollout: Rollout) -> str | None:
        """Why the rollout is not training-grade; None where it is."""
        if self.status == "no_gateway_capture":
            return self._why_no_calls(rollout)
        if self.status == "capture_off":
            return CAPTURE_OFF
        if self.problems:
            return f"its log is not whole: {self.problems[0]}"
        if (lost := rollout.result.get("export_error")) is not None:
            return f"its log is not whole: {lost}"
        counted = self.counted
        if not counted:
            if self.refused:
                return f"the engine refused all of its calls, the first with {self.refused[0].refusal}"
            return "none of its calls is the agent's own"
        complete = [call for call in counted if call.complete]
        if len(complete) < len(counted):
            missing = next(call for call in counted if not call.complete)
            return (
                f"{len(counted) - len(complete)} of {len(counted)} calls are not complete: {_why_incomplete(missing)}"
            )
        if self.breaks:
            return NOT_MERGED
        if ambiguous := self._ambiguous(complete):
            return f"call {ambiguous[0].number} continues several calls equally well; which one is not guessed"
        return None

    def _why_no_calls(self, rollout: Rollout) -> str:
        if self.problems:
            return f"its log has no call that can be read ({self.problems[0]})"
        if rollout.endpoint_kind == "agent_native":
            return (
                "the agent's model calls did not go through BenchFlow's gateway "
                f"(usage_tracking.endpoint_kind={rollout.endpoint_kind})"
            )
        return NO_LOG if rollout.journal is None else "its llm_trajectory.jsonl has no model call"


def _why_incomplete(call: CallSummary) -> str:
    if call.unreadable is not None:
        return f"call {call.number}: {call.unreadable}"
    if call.capture is None:
        return f"call {call.number} has no token capture"
    why = next(iter(call.capture.unavailable.values()), None)
    return f"call {call.number}: " + ("it has no choice" if why is None else why.detail or why.code)


def _extends(placement: Placement) -> bool:
    return placement.parent is not None or bool(placement.ambiguous)


def _was_off(capture: TokenCapture) -> bool:
    return bool(capture.unavailable) and all(why.code == "capture_off" for why in capture.unavailable.values())


def _unavailable(calls: Sequence[CallSummary]) -> dict[str, int]:
    """`field:reason`, in BenchFlow's words -> the number of calls."""
    found: Counter[str] = Counter()
    for call in calls:
        if call.capture is None:
            found["token_capture:unreadable" if call.unreadable else "token_capture:not_requested"] += 1
            continue
        for name, why in call.capture.unavailable.items():
            reason = "length_mismatch" if why.code == "count_mismatch_ids_logprobs" else why.reason
            found[f"{name}:{reason}"] += 1
    return dict(sorted(found.items()))


def _token_in(calls: Sequence[CallSummary]) -> dict[str, Any] | None:
    """How many prompts were sent as ids, and why the others were not; None where token-in was off."""
    used = [call.token_in for call in calls if call.token_in is not None]
    if not used:
        return None
    return {
        "modes": sorted({token_in.mode for token_in in used}),
        "bridged": sum(token_in.bridged for token_in in used),
        "not_bridged": dict(Counter(token_in.reason or "failed" for token_in in used if not token_in.bridged)),
    }


def _sampling(calls: Sequence[CallSummary]) -> list[dict[str, Any]]:
    """One entry for each way the agent's calls were sampled: which calls, the parameters, what is not plain, what the
    logprobs mean, and what of it biases importance ratios all the same.
    """
    found: list[dict[str, Any]] = []
    for call in calls:
        logprobs = call.logprobs.to_json()
        same = next(
            (entry for entry in found if (entry["parameters"], entry["logprobs"]) == (call.sampling, logprobs)), None
        )
        if same is not None:
            same["calls"].append(call.line)
            continue
        plain = not call.not_plain
        found.append(
            {
                "calls": [call.line],
                "parameters": call.sampling,
                "plain": plain,
                "not_plain": call.not_plain,
                "logprobs": logprobs,
                "biased_by": biasing(call.not_plain, call.logprobs),
            }
        )
    return found
