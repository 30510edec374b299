"""A rollout as its calls: a row per call, their tree and their breaks; and a single call with its messages."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from capture.breaks.breaks import Break
from capture.journal.call import Call
from capture.journal.journal import JournalReader
from capture.journal.layout import RolloutDir
from capture.json import objects
from train.errors import BadInput
from train.rollouts.chat import Chat, chat_of
from train.rollouts.messages import NotChat
from train.rollouts.rollouts import read_result
from train.tokens.call_summary import CallSummary
from train.tokens.coverage import sampling_sentence
from train.view.rollout_cache import Reading
from train.view.token_strips import shown_token

#: Keys of a request that are shown elsewhere, or are the messages themselves.
_NOT_PARAMETERS = frozenset({"messages", "input", "prompt", "system", "instructions", "tools", "model"})


def rollout_view(reading: Reading) -> dict[str, Any]:
    """Everything of a rollout but messages and tokens."""
    rollout, tokens = reading.rollout, reading.tokens
    notes = tokens.segment_notes
    breaks = [break_view(reading, break_) for break_ in tokens.breaks]
    return {
        "path": rollout.rollout_path,
        "name": rollout.name,
        "folder": str(rollout.path),
        "task": rollout.task,
        "agent": rollout.agent,
        "model": rollout.model,
        "reward": rollout.reward,
        "outcome": rollout.outcome,
        "finished": rollout.finished,
        "error": rollout.error,
        "verifier_error": rollout.verifier_error,
        "started_at": rollout.started_at,
        "finished_at": rollout.finished_at,
        "timing": _timing(reading),
        "grade": tokens.training_grade,
        "status": tokens.status,
        "reason": tokens.reason,
        "problems": tokens.coverage["problems"],
        "sampling_note": sampling_sentence(tokens),
        "calls": [_call_row(reading, call) for call in tokens.calls],
        "segments": [
            {
                "number": number,
                "thread": segment.thread,
                "kind": segment.kind,
                "calls": list(segment.calls),
                "prompt": len(segment.prompt_ids),
                "tokens": len(segment.prompt_ids) + len(segment.completion_ids),
                "sampled": segment.sampled,
                "trainable": note["trainable"],
                "start": note["start"]["reason"] if note["start"] else None,
                "policy_versions": list(segment.policy_versions),
                "digest": note["digest"],
            }
            for number, (segment, note) in enumerate(zip(tokens.segments, notes, strict=True))
        ],
        "breaks": breaks,
        "text": "tokenizer" if reading.vocabulary.whole else "engine",
    }


def _timing(reading: Reading) -> dict[str, Any]:
    found = read_result(RolloutDir(reading.rollout.path).timing) if reading.rollout.finished else None
    return {name: value for name, value in (found or {}).items() if isinstance(value, int | float)}


def _call_row(reading: Reading, call: CallSummary) -> dict[str, Any]:
    facts, placement = reading.facts[call.line], reading.tokens.placements.get(call.number)
    capture = call.capture
    unavailable = capture.unavailable if capture is not None else {}
    broken = next((number for number, item in enumerate(reading.tokens.breaks) if item.call == call.number), None)
    return {
        "number": call.number,
        "line": call.line,
        "kind": call.kind,
        "purpose": call.purpose,
        "outcome": call.outcome,
        "status": call.status,
        "complete": call.complete,
        "counts": call.own_work,
        "captured": capture is not None,
        "unreadable": call.unreadable,
        "why": [{"field": name, "code": why.code, "detail": why.detail} for name, why in unavailable.items()],
        "prompt": len(capture.prompt_token_ids) if capture and capture.prompt_token_ids is not None else None,
        "sampled": [
            len(completion.token_ids) if completion.token_ids is not None else len(completion.tokens or ()) or None
            for completion in (capture.completions if capture is not None else ())
        ],
        "parent": placement.parent if placement else None,
        "choice": placement.choice if placement else None,
        "ambiguous": list(placement.ambiguous) if placement else [],
        "break": broken,
        "follows": reading.tokens.dropped.get(call.number),
        "retried": call.number in reading.tokens.retried,
        "retry_of": call.retry_of,
        "segments": [at for at, item in enumerate(reading.tokens.segments) if call.number in item.calls],
        "policy_version": next(iter(call.policy_versions), None),
        "not_plain": call.not_plain,
        "began": facts.began,
        "ended": facts.ended,
        "duration_ms": facts.duration_ms,
        "ttft_ms": facts.ttft_ms,
        "finish": list(facts.finish),
        "model": facts.model,
        "dialect": facts.dialect,
        "engine": facts.engine,
        "engine_version": facts.engine_version,
        "stream": facts.stream,
        "upstream": facts.upstream,
        "policy_version_end": facts.policy_version_end,
        "error": facts.error,
        "foreign": facts.foreign,
    }


def break_view(reading: Reading, found: Break) -> dict[str, Any]:
    """A break with its two windows, aligned: rows of tokens that are the same, or that differ."""
    segments = reading.tokens.segments
    before = next((at for at, segment in enumerate(segments) if found.before in segment.calls), None)
    after = next((at for at, segment in enumerate(segments) if segment.calls and segment.calls[0] == found.call), None)
    return {
        **{name: value for name, value in found.to_json().items() if not name.endswith("_text")},
        "shared": [_token(reading, token) for token in found.kept],
        "columns": [
            {"same": same, "expected": [_token(reading, token) for token in expected],
             "sent": [_token(reading, token) for token in sent]}
            for same, expected, sent in aligned(found.expected, found.found)
        ],
        "segment_before": before,
        "segment_after": after,
        "exact_before": segments[before].sampled if before is not None else 0,
        "exact_after": segments[after].sampled if after is not None else 0,
    }  # fmt: skip


def aligned(expected: Sequence[int], sent: Sequence[int]) -> list[tuple[bool, list[int], list[int]]]:
    """Both windows cut at the same places: (whether they are equal there, ids of the first, ids of the second)."""
    found = difflib.SequenceMatcher(None, expected, sent, autojunk=False).get_opcodes()
    return [(tag == "equal", list(expected[a:b]), list(sent[c:d])) for tag, a, b, c, d in found]


def _token(reading: Reading, token: int) -> dict[str, Any]:
    text = reading.vocabulary.text(token)
    return {
        "id": token,
        "text": text.decode("utf-8", "replace") if isinstance(text, bytes) else text,
        "shown": shown_token(token, text),
        "special": reading.vocabulary.special(token, text),
    }


def call_view(reading: Reading, number: int) -> dict[str, Any]:
    """A call's messages, tools and parameters. Messages that the call before it had are counted, not repeated.

    Raises `BadInput`, `JournalError`.
    """
    summary = reading.call(number)
    if summary is None or reading.rollout.journal is None:
        raise BadInput(f"this rollout has no call {number}")
    journal = JournalReader(reading.rollout.journal)
    call = journal.at(summary.line, summary.offset)
    chat, raw = _chat(call)
    before = _before(reading, summary)
    same = 0
    if before is not None and chat is not None:
        earlier, _ = _chat(journal.at(before.line, before.offset))
        same = _common(earlier.messages if earlier else [], chat.messages)
    body = call.request_body
    return {
        "number": number,
        "path": call.request.get("path"),
        "headers": call.request.get("headers"),
        "parameters": {name: value for name, value in body.items() if name not in _NOT_PARAMETERS},
        "sampling": summary.sampling,
        "messages": chat.messages[same:] if chat else [],
        "same": {"call": before.number, "messages": same} if before is not None and same else None,
        "replies": [{"message": choice.message, "finish_reason": choice.finish_reason} for choice in chat.choices]
        if chat
        else [],
        "tools": chat.tools if chat else [],
        "raw": raw,
        "response_id": call.response_body.get("id"),
        "usage": call.response_body.get("usage"),
        "error": call.response_body if summary.status >= 400 or (not chat and not raw) else None,
        "dropped_fields": call.metadata.get("dropped_fields"),
        "secrets_seen": call.metadata.get("secrets_seen"),
        "request_id": call.metadata.get("request_id"),
    }


def _chat(call: Call) -> tuple[Chat | None, dict[str, Any] | None]:
    """The call as chat; a text completion as its prompt and texts."""
    try:
        return chat_of(call), None
    except NotChat:
        texts = [choice.get("text") for choice in objects(call.response_body.get("choices"))]
        prompt = call.request_body.get("prompt")
        return None, {"prompt": prompt, "texts": texts} if prompt is not None or texts else None


def _before(reading: Reading, call: CallSummary) -> CallSummary | None:
    """The call whose messages this call most likely continues."""
    placement = reading.tokens.placements.get(call.number)
    if placement is not None and placement.parent is not None:
        return reading.call(placement.parent)
    broken = next((break_ for break_ in reading.tokens.breaks if break_.call == call.number), None)
    number = broken.before if broken is not None else reading.tokens.dropped.get(call.number)
    return reading.call(number) if number is not None else None


def _common(earlier: Sequence[Any], messages: Sequence[Any]) -> int:
    pairs = zip(earlier, messages, strict=False)
    return next((at for at, (message, other) in enumerate(pairs) if message != other), min(len(earlier), len(messages)))
