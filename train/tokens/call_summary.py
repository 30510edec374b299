"""What is kept of a call, and BenchFlow's summary of a rollout's calls: how complete they are and why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from capture.breaks.breaks import Break
from capture.journal.call import TokenIn
from capture.record import TokenCapture
from capture.sequences.sequences import SIDE_KINDS, TRAINABLE_KINDS, TokenSequence
from capture.sequences.threads import Placement
from train.rollouts.rollouts import Rollout

CAPTURE_OFF = (
    "calls went through the gateway without token capture; rerun with --agent-env BENCHFLOW_CAPTURE_TOKEN_LOGPROBS=1"
)
NO_LOG = "no llm_trajectory.jsonl in this rollout"
NOT_MERGED = "a conversation's calls could not be merged into one sequence"


@dataclass(slots=True)
class CallSummary:
    """What is kept of a call when its line has passed. Its messages are read again only where something broke."""

    number: int
    line: int
    offset: int
    purpose: str
    outcome: str
    status: int
    capture: TokenCapture | None
    unreadable: str | None
    sampling: dict[str, Any]
    not_plain: list[str]
    policy_version: str | None
    retry_of: int | None
    kind: str = "agent"
    token_in: TokenIn | None = None

    @property
    def complete(self) -> bool:
        return self.capture is not None and self.capture.complete

    @property
    def answered(self) -> bool:
        return self.outcome == "ok" and self.status == 200

    @property
    def counts(self) -> bool:
        """Whether the call is the agent's own work: side calls (titles, summaries) do not decide over a rollout."""
        return self.kind not in SIDE_KINDS


def summarize(
    rollout: Rollout,
    calls: Sequence[CallSummary],
    placements: dict[int, Placement],
    segments: Sequence[TokenSequence],
    breaks: Sequence[Break],
    forgiven: set[int],
    problems: Sequence[str],
) -> dict[str, Any]:
    """BenchFlow's summary, and beside it what else is known."""
    counted = [call for call in calls if call.counts and call.number not in forgiven]
    captured = [call for call in calls if call.capture is not None]
    complete = [call for call in counted if call.complete]
    lines = {call.number: call.line for call in calls}
    extending = [call for call in complete if (at := placements.get(call.number)) is not None and _extends(at)]
    ambiguous = [call for call in complete if call.number in placements and placements[call.number].ambiguous]
    summary: dict[str, Any] = {
        "status": _status(calls),
        "training_grade": False,
        "path": ",".join(sorted({call.capture.provider for call in captured if call.capture and call.capture.provider}))
        or None,
        "calls": len(counted),
        "captured_calls": sum(call.capture is not None for call in counted),
        "complete_calls": len(complete),
        "side_calls": sum(not call.counts for call in calls),
        "failed_attempts": {
            "retried": len(forgiven),
            "unretried": sum(not call.answered and call.number not in forgiven for call in calls),
        },
        "unavailable": _unavailable(counted),
        "prefix": {
            "pairs": len(extending) + len(breaks),
            "extends_previous_call": len(extending),
            "breaks": [lines[break_.call] for break_ in breaks],
        },
        "threads": [
            {"thread": number, "kind": one.kind, "calls": list(one.lines)} for number, one in enumerate(segments)
        ],
        "ambiguous": [
            {"call": call.line, "continues": [lines[candidate] for candidate in placements[call.number].ambiguous]}
            for call in ambiguous
        ],
        "token_in": _token_in(counted),
        "breaks": [break_.to_json() for break_ in breaks],
        "segments": len(segments),
        "sampled_tokens": sum(segment.sampled for segment in segments if segment.kind in TRAINABLE_KINDS),
        "sampling": _sampling(counted),
        "problems": list(problems),
    }
    reason = _reason(rollout, calls, counted, complete, breaks, ambiguous, problems)
    summary["training_grade"] = reason is None
    if reason is not None:
        summary["reason"] = reason
    return summary


def _token_in(calls: Sequence[CallSummary]) -> dict[str, Any] | None:
    """How many prompts were made of ids that were held, and why the others were not; None where token-in was off."""
    told = [call.token_in for call in calls if call.token_in is not None]
    if not told:
        return None
    return {
        "modes": sorted({one.mode for one in told}),
        "bridged": sum(one.bridged for one in told),
        "not_bridged": dict(Counter(one.reason or "failed" for one in told if not one.bridged)),
    }


def _extends(placement: Placement) -> bool:
    return placement.parent is not None or bool(placement.ambiguous)


def _status(calls: Sequence[CallSummary]) -> str:
    if not calls:
        return "no_gateway_capture"
    off = all(call.capture is None or _was_off(call.capture) for call in calls)
    return "capture_off" if off and not any(call.unreadable for call in calls) else "captured"


def _was_off(capture: TokenCapture) -> bool:
    return bool(capture.unavailable) and all(why.code == "capture_off" for why in capture.unavailable.values())


def _unavailable(calls: Sequence[CallSummary]) -> dict[str, int]:
    """`field:reason` (BenchFlow) -> in how many calls."""
    found: Counter[str] = Counter()
    for call in calls:
        if call.capture is None:
            found["token_capture:unreadable" if call.unreadable else "token_capture:not_requested"] += 1
            continue
        for name, why in call.capture.unavailable.items():
            reason = "length_mismatch" if why.code == "count_mismatch_ids_logprobs" else why.reason
            found[f"{name}:{reason}"] += 1
    return dict(sorted(found.items()))


def _reason(
    rollout: Rollout,
    calls: Sequence[CallSummary],
    counted: Sequence[CallSummary],
    complete: Sequence[CallSummary],
    breaks: Sequence[Break],
    ambiguous: Sequence[CallSummary],
    problems: Sequence[str],
) -> str | None:
    status = _status(calls)
    if status == "no_gateway_capture":
        if problems:
            return f"its log holds no call that can be read ({problems[0]})"
        if rollout.endpoint_kind == "agent_native":
            return (
                "the agent's model calls did not go through BenchFlow's gateway "
                f"(usage_tracking.endpoint_kind={rollout.endpoint_kind})"
            )
        return NO_LOG if rollout.journal is None else "its llm_trajectory.jsonl holds no model call"
    if status == "capture_off":
        return CAPTURE_OFF
    if problems:
        return f"its log is not whole: {problems[0]}"
    if (lost := rollout.result.get("export_error")) is not None:
        return f"its log is not whole: {lost}"
    if not counted:
        return "none of its calls is the agent's own"
    if len(complete) < len(counted):
        missing = next(call for call in counted if not call.complete)
        return f"{len(counted) - len(complete)} of {len(counted)} calls are not complete: {_why_incomplete(missing)}"
    if breaks:
        return NOT_MERGED
    if ambiguous:
        one = ambiguous[0]
        return f"call {one.number} continues several calls equally well; which one is not guessed"
    return None


def _why_incomplete(call: CallSummary) -> str:
    if call.unreadable is not None:
        return f"call {call.number}: {call.unreadable}"
    if call.capture is None:
        return f"call {call.number} has no token capture"
    why = next(iter(call.capture.unavailable.values()), None)
    return f"call {call.number}: " + ("it has no choice" if why is None else why.detail or why.code)


def _sampling(calls: Sequence[CallSummary]) -> list[dict[str, Any]]:
    """One entry for each way the agent's calls were sampled: which calls, the parameters, what is not plain."""
    found: list[dict[str, Any]] = []
    for call in calls:
        same = next((one for one in found if one["parameters"] == call.sampling), None)
        if same is None:
            plain = not call.not_plain
            found.append(
                {"calls": [call.line], "parameters": call.sampling, "plain": plain, "not_plain": call.not_plain}
            )
        else:
            same["calls"].append(call.line)
    return found
