"""`benchflow.rollout-stream.v1`: the line of one finished rollout, as a trainer reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NotRequired, Protocol, TypedDict

import orjson

from capture.record import Ids
from capture.sequences.sequences import TokenSequence
from train.rollouts.rollouts import Rollout
from train.stream.groups import AdvantageKind, group_id

SCHEMA_VERSION: Final = "benchflow.rollout-stream.v1"


class CompletionRecord(TypedDict):
    """One choice: S sampled ids (a stop token included) and S logprobs; null where they were not captured."""

    index: int
    token_ids: list[int] | None
    logprobs: list[float] | None


class CallRecord(TypedDict):
    """One captured call: `index` is its 0-based line in `llm_trajectory.jsonl`, `prompt_token_ids` its P prompt ids."""

    index: int
    provider: str | None
    prompt_token_ids: list[int] | None
    completions: list[CompletionRecord]
    unavailable: dict[str, Any]


class SequenceRecord(TypedDict):
    """One token sequence: P `prompt_ids`, C `completion_ids`, and C values each of mask and logprobs.

    The mask is 1 for an id that was sampled and 0 for one of the environment; the logprob is 0.0 where the mask is 0.
    `calls` are lines of `llm_trajectory.jsonl`.
    """

    thread: int
    kind: str
    calls: list[int]
    prompt_ids: list[int]
    completion_ids: list[int]
    completion_mask: list[int]
    completion_logprobs: list[float]


class SegmentRecord(TypedDict):
    """An exact part of a rollout: P `prompt_ids`, C `completion_ids`, C values each of `action_mask` and `logprobs`.

    `start` says why it begins where it does (null: it begins a conversation); `calls` and the calls in `call_spans` are
    lines of `llm_trajectory.jsonl`; a span is the `length` ids sampled by that call, from `completion_ids[offset]` on.
    """

    segment: int
    thread: int
    kind: str
    trainable: bool
    excluded: str | None
    calls: list[int]
    start: dict[str, Any] | None
    prompt_ids: list[int]
    completion_ids: list[int]
    action_mask: list[int]
    logprobs: list[float]
    call_spans: list[dict[str, int]]
    policy_versions: list[str]
    digest: str


class RolloutRecord(TypedDict):
    """One finished rollout. Every field is published in `capture/schemas/rollout_stream.v1.json`.

    `reward` is None for an unscored rollout, never 0. `sequences` is empty unless the rollout is training-grade;
    `segments` has every part that is exact, whatever broke. `advantage` is set with `group_size` only; with it
    `advantage_kind`, `group_mean`, `group_std`, `ddof` and `eps` say how it was counted: do not divide again.
    """

    schema_version: str
    job: str
    rollout: str
    rollout_path: str
    task: str | None
    agent: str | None
    model: str | None
    task_digest: str | None
    group_id: str
    group: dict[str, str | None]
    reward: float | None
    scored: bool
    outcome: str
    error: str | None
    finished_at: str | None
    token_capture: dict[str, Any]
    calls: list[CallRecord]
    sequences: list[SequenceRecord]
    segments: list[SegmentRecord]
    advantage: float | None
    group_complete: bool | None
    retried: bool
    replaces: str | None
    advantage_kind: NotRequired[AdvantageKind]
    group_size: NotRequired[int]
    group_mean: NotRequired[float]
    group_std: NotRequired[float]
    ddof: NotRequired[int]
    eps: NotRequired[float]
    withheld: NotRequired[str]
    withheld_detail: NotRequired[str]


class Encode:
    """How ids and long lists stand in a record: as lists for Python, or spliced in as JSON text for a line."""

    def __init__(self, *, text: bool) -> None:
        self.text = text

    def ids(self, ids: Ids) -> Any:
        return ids.json() if self.text else ids.tolist()

    def sequence(self, one: TokenSequence) -> dict[str, Any]:
        row: dict[str, Any] = {
            "thread": one.thread,
            "kind": one.kind,
            "calls": list(one.lines),
            "prompt_ids": self.ids(one.prompt_ids),
            "completion_ids": self.ids(one.completion_ids),
        }
        if self.text:
            row["completion_mask"] = orjson.Fragment(b"[" + one.mask_text(b"1", b"0") + b"]")
            row["completion_logprobs"] = orjson.Fragment(b"[" + one.logprobs_text() + b"]")
        else:
            row["completion_mask"] = one.completion_mask
            row["completion_logprobs"] = one.completion_logprobs
        return row

    def segment(self, one: TokenSequence, notes: Mapping[str, Any]) -> dict[str, Any]:
        """A segment in the words of BenchFlow's token-segments.v1."""
        told = self.sequence(one)
        return {
            **notes,
            "prompt_ids": told["prompt_ids"],
            "completion_ids": told["completion_ids"],
            "action_mask": told["completion_mask"],
            "logprobs": told["completion_logprobs"],
        }

    def any(self, value: Any) -> Any:
        """A value in which ids may stand anywhere."""
        if isinstance(value, Ids):
            return self.ids(value)
        if isinstance(value, Mapping):
            return {str(key): self.any(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            # A long list of numbers is as it is: looking at each would cost more than all the rest.
            plain = bool(value) and isinstance(value[0], int | float | str)
            return list(value) if plain else [self.any(inner) for inner in value]
        return value


def record(
    rollout: Rollout,
    tokens: Tokens,
    key: dict[str, str | None],
    encode: Encode,
    *,
    retried: bool = False,
    replaces: str | None = None,
    group_complete: bool | None = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The record of one rollout; `more` are the group's fields, or why it is withheld."""
    row: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "job": rollout.job,
        "rollout": rollout.name,
        "rollout_path": rollout.rollout_path,
        "task": rollout.task,
        "agent": rollout.agent,
        "model": rollout.model,
        "task_digest": rollout.task_digest,
        "group_id": group_id(key),
        "group": key,
        "reward": rollout.reward,
        "scored": rollout.scored,
        "outcome": rollout.outcome,
        "error": rollout.error or rollout.verifier_error,
        "finished_at": rollout.finished_at,
        "token_capture": encode.any(tokens.coverage),
        "calls": encode.any(tokens.captured_calls),
        "sequences": [encode.sequence(one) for one in tokens.sequences] if tokens.training_grade else [],
        "segments": [encode.segment(*pair) for pair in zip(tokens.segments, tokens.segment_notes, strict=True)],
        "advantage": None,
        "group_complete": group_complete,
        "retried": retried,
        "replaces": replaces,
    }
    row.update(more or {})
    return row


class Tokens(Protocol):
    """What `train.tokens.read_tokens` tells of a rollout's log, as far as a record needs it."""

    @property
    def coverage(self) -> Mapping[str, Any]: ...
    @property
    def captured_calls(self) -> Sequence[Any]: ...
    @property
    def sequences(self) -> Sequence[TokenSequence]: ...
    @property
    def segments(self) -> Sequence[TokenSequence]: ...
    @property
    def segment_notes(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def training_grade(self) -> bool: ...
    @property
    def reached(self) -> bool: ...


class Unreadable:
    """Stands in for a log that cannot be read: nothing is known of its calls, and `reason` says why."""

    captured_calls: Sequence[Any] = ()
    sequences: Sequence[TokenSequence] = ()
    segments: Sequence[TokenSequence] = ()
    segment_notes: Sequence[Mapping[str, Any]] = ()
    training_grade = False
    reached = False

    def __init__(self, reason: str) -> None:
        self.reason = reason

    @property
    def coverage(self) -> dict[str, Any]:
        return {"calls": 0, "captured_calls": 0, "complete_calls": 0, "training_grade": False,
                "status": "no_gateway_capture", "reason": self.reason}  # fmt: skip
