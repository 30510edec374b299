"""The trainable parts of a record: whole token sequences with mask, logprobs and the policy version of each call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CallSpan:
    """What one call sampled: `length` ids from `completion_ids[offset]` on. `call` is its line in the journal.

    `policy_version_end` differs from `policy_version` where the weights were updated while the call ran; both are None
    where nobody told the proxy a version.
    """

    call: int
    offset: int
    length: int
    policy_version: str | None
    policy_version_end: str | None


@dataclass(frozen=True, slots=True)
class Row:
    """One token sequence of a rollout: P `prompt_ids`, and C values each of the other lists.

    The mask is 1 where the policy sampled the id; logprobs are natural logarithms, 0.0 where the mask is 0.
    """

    thread: int
    kind: str
    prompt_ids: list[int]
    completion_ids: list[int]
    completion_mask: list[int]
    logprobs: list[float]
    spans: tuple[CallSpan, ...]

    @property
    def sampled(self) -> int:
        """How many ids are trained on."""
        return sum(self.completion_mask)

    @property
    def policy_versions(self) -> list[str]:
        """The versions that sampled it, each once, in the order of the calls."""
        versions = (version for span in self.spans for version in (span.policy_version, span.policy_version_end))
        return list(dict.fromkeys(version for version in versions if version is not None))

    @property
    def oldest_version(self) -> int | None:
        """The lowest version that sampled any of it; None where a call has no version, or one that is not a number."""
        if not self.spans or any(span.policy_version is None for span in self.spans):
            return None
        try:
            return min(int(version) for version in self.policy_versions)
        except ValueError:
            return None


def rows_of(record: Mapping[str, Any]) -> list[Row]:
    """A row for each trainable part of a rollout, the agent's own thread first, each thread's turns in order.

    Calls that are not complete are in none. A sub-agent and a branch have rows of their own; titles, summaries and
    other helpers have none. A rollout that is not training-grade gives the parts that are exact.
    """
    calls = {call["index"]: call for call in record["calls"]}
    rows = [_row(segment, calls) for segment in record["segments"] if segment["trainable"]]
    return [row for row in rows if row.sampled]


def _row(segment: Mapping[str, Any], calls: Mapping[int, Mapping[str, Any]]) -> Row:
    spans = []
    for span in segment["call_spans"]:
        call = calls.get(span["call"], {})
        version = call.get("policy_version")
        end = call.get("policy_version_end") or version
        spans.append(CallSpan(span["call"], span["offset"], span["length"], version, end))
    return Row(
        thread=segment["thread"],
        kind=segment["kind"],
        prompt_ids=segment["prompt_ids"],
        completion_ids=segment["completion_ids"],
        completion_mask=segment["action_mask"],
        logprobs=segment["logprobs"],
        spans=tuple(spans),
    )


def main_row(rows: list[Row]) -> Row | None:
    """The row for a trainer that takes one per rollout: the one with the most sampled ids, the first of equals."""
    return max(rows, key=lambda row: row.sampled, default=None)
