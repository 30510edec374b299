"""`benchflow.rollout-stream.v1`: the record of one finished rollout, as a trainer reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NotRequired, TypedDict

import orjson

from capture.record import Ids
from capture.sequences.sequences import TokenSequence
from train.groups.advantage import AdvantageKind
from train.groups.groups import GroupKey, group_id
from train.rollouts.rollouts import Rollout
from train.tokens.rollout_tokens import RolloutTokens, UnreadableLog

SCHEMA_VERSION: Final = "benchflow.rollout-stream.v1"


class CompletionRecord(TypedDict):
    """One choice: S sampled ids (a stop token included) and S logprobs; null where they were not captured."""

    index: int
    token_ids: list[int] | None
    logprobs: list[float] | None


class ChatRecord(TypedDict):
    """What a call sent and what came back, in the shape of chat completions; only a rollout service gives it.

    `continues` is the `index` of the call whose messages these come after; null where `messages` begin a conversation,
    and then `tools` is there too.
    """

    continues: int | None
    messages: list[dict[str, Any]]
    choices: list[dict[str, Any]]
    tools: NotRequired[list[dict[str, Any]]]


class CallRecord(TypedDict):
    """One captured call: `index` is its 0-based line in `llm_trajectory.jsonl`, `prompt_token_ids` its P prompt ids."""

    index: int
    provider: str | None
    prompt_token_ids: list[int] | None
    completions: list[CompletionRecord]
    unavailable: dict[str, Any]
    logprobs: NotRequired[dict[str, str]]
    chat: NotRequired[ChatRecord | None]


class VersionSpanRecord(TypedDict):
    """`length` sampled ids from `completion_ids[offset]` on, and the version of the weights that sampled them.

    Where `policy_version_end` is not None, the weights changed somewhere between, and the engine did not say where.
    """

    offset: int
    length: int
    policy_version: str | None
    policy_version_end: str | None


class SequenceRecord(TypedDict):
    """One token sequence: P `prompt_ids`, C `completion_ids`, and C values each of mask and logprobs.

    The mask is 1 for a sampled id and 0 for an id of the environment. Logprobs are natural logarithms, 0.0 where the
    mask is 0. `calls` are 0-based lines of `llm_trajectory.jsonl`. `version_spans` as in a `SegmentRecord`.
    """

    thread: int
    kind: str
    calls: list[int]
    prompt_ids: list[int]
    completion_ids: list[int]
    completion_mask: list[int]
    completion_logprobs: list[float]
    version_spans: list[VersionSpanRecord]


class SegmentRecord(TypedDict):
    """An exact part of a rollout: P `prompt_ids`, C `completion_ids`, C values each of `action_mask` and `logprobs`.

    `start` says why it begins where it does (null: it begins a conversation). `calls` and the calls in `call_spans` are
    0-based lines of `llm_trajectory.jsonl`. A span is the `length` ids that the call sampled, starting at
    `completion_ids[offset]`. `version_spans` divide the sampled ids by the version of the weights, as exactly as
    the engine says it; empty where nobody told a version.
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
    version_spans: list[VersionSpanRecord]
    digest: str


class RolloutRecord(TypedDict):
    """One finished rollout. Every field is published in `capture/schemas/rollout_stream.v1.json`.

    `reward` is None for an unscored rollout, never 0. `sequences` is empty unless the rollout is training-grade.
    `segments` has every exact part, whatever broke. `advantage` is set only with `group_size`; then `advantage_kind`,
    `group_mean`, `group_std`, `ddof` and `eps` say how it was computed: do not normalize it again.
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
    error_category: str | None
    finished_at: str | None
    purpose: Literal["train", "eval"]
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
    """How ids and long lists are written in a record: as Python lists, or spliced in as JSON text."""

    def __init__(self, *, text: bool) -> None:
        self.text = text

    def ids(self, ids: Ids) -> Any:
        return ids.json() if self.text else ids.tolist()

    def sequence(self, sequence: TokenSequence) -> dict[str, Any]:
        """A `SequenceRecord`."""
        row: dict[str, Any] = {
            "thread": sequence.thread,
            "kind": sequence.kind,
            "calls": list(sequence.lines),
            "prompt_ids": self.ids(sequence.prompt_ids),
            "completion_ids": self.ids(sequence.completion_ids),
            "version_spans": [span.to_json() for span in sequence.version_spans],
        }
        if self.text:
            row["completion_mask"] = orjson.Fragment(b"[" + sequence.mask_text(b"1", b"0") + b"]")
            row["completion_logprobs"] = orjson.Fragment(b"[" + sequence.logprobs_text() + b"]")
        else:
            row["completion_mask"] = sequence.completion_mask
            row["completion_logprobs"] = sequence.completion_logprobs
        return row

    def segment(self, sequence: TokenSequence, notes: Mapping[str, Any]) -> dict[str, Any]:
        """A `SegmentRecord`: the fields of BenchFlow's token-segments.v1."""
        row = self.sequence(sequence)
        return {
            **notes,
            "prompt_ids": row["prompt_ids"],
            "completion_ids": row["completion_ids"],
            "action_mask": row["completion_mask"],
            "logprobs": row["completion_logprobs"],
        }

    def value(self, value: Any) -> Any:
        """Any JSON value, with `Ids` anywhere in it."""
        if isinstance(value, Ids):
            return self.ids(value)
        if isinstance(value, Mapping):
            return {str(key): self.value(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            # A long list of numbers is copied as it is: looking at each would cost more than everything else.
            plain = bool(value) and isinstance(value[0], int | float | str)
            return list(value) if plain else [self.value(inner) for inner in value]
        return value


def record(
    rollout: Rollout,
    tokens: RolloutTokens | UnreadableLog,
    key: GroupKey,
    encode: Encode,
    *,
    retried: bool = False,
    replaces: str | None = None,
    group_complete: bool | None = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The record of one rollout. `more` holds the fields of its group, or the reason it is withheld."""
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
        "error_category": rollout.error_category or rollout.verifier_error_category,
        "finished_at": rollout.finished_at,
        "purpose": rollout.purpose,
        "token_capture": encode.value(tokens.coverage),
        "calls": encode.value(tokens.captured_calls),
        "sequences": [encode.sequence(sequence) for sequence in tokens.sequences],
        "segments": [encode.segment(*pair) for pair in zip(tokens.segments, tokens.segment_notes, strict=True)],
        "advantage": None,
        "group_complete": group_complete,
        "retried": retried,
        "replaces": replaces,
    }
    row.update(more or {})
    return row
