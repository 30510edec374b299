"""A rollout's log, read once for all views: its tokens (`train.tokens`), and of each call what a person asks first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capture.breaks.breaks import TokenDecoder
from capture.journal.call import Call
from train.rollouts.chat import choices_of
from train.rollouts.rollouts import Rollout
from train.tokens.call_summary import CallSummary
from train.tokens.rollout_tokens import RolloutTokens, read_tokens
from train.tokens.tokenizer import decoder_of
from train.view.id_text import Vocabulary


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What a call's line says besides its tokens. Times are ISO 8601 texts as they were written, durations ms."""

    began: str | None
    ended: str | None
    duration_ms: float | None
    ttft_ms: float | None
    finish: tuple[str | None, ...]
    model: str | None
    dialect: str | None
    engine: str | None
    engine_version: str | None
    stream: bool
    upstream: str | None
    policy_version_end: str | None
    request_id: str | None
    error: str | None
    #: The line has neither a request nor a response: another program wrote it.
    foreign: bool


@dataclass(frozen=True)
class Reading:
    """A rollout as it was when it was read. `facts` go by the line of a call."""

    rollout: Rollout
    tokens: RolloutTokens
    facts: dict[int, CallFacts]
    vocabulary: Vocabulary

    def call(self, number: int) -> CallSummary | None:
        return next((call for call in self.tokens.calls if call.number == number), None)


def read(rollout: Rollout, vocabulary: Vocabulary | None = None, decoder: TokenDecoder | None = None) -> Reading:
    """Reads the journal once. Raises `JournalError`."""
    facts: dict[int, CallFacts] = {}
    known = vocabulary or Vocabulary()
    if not known.whole:
        known = Vocabulary()  # texts learned from the ids of one model are wrong for another

    def note(call: Call) -> None:
        facts[call.line] = facts_of(call)

    tokens = read_tokens(rollout, decoder=decoder, on_call=note)
    for call in tokens.calls:
        for choice in call.capture.completions if call.capture is not None else ():
            if choice.token_ids is not None and isinstance(choice.tokens, list):
                known.learn(choice.token_ids, [text for text in choice.tokens if isinstance(text, str)])
    return Reading(rollout, tokens, facts, known)


class Readings:
    """The last few readings. A journal that has grown is read again. Safe for several threads."""

    KEPT = 6

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = decoder_of(vocabulary.tokenizer) if vocabulary.tokenizer is not None else None
        self._cached: OrderedDict[str, tuple[object, Reading]] = OrderedDict()
        self._lock = threading.Lock()
        self._reading: dict[str, threading.Lock] = {}

    @property
    def has_tokenizer(self) -> bool:
        return self._vocabulary.whole

    def of(self, rollout: Rollout) -> Reading:
        """Raises `JournalError`."""
        key, now = str(rollout.journal or rollout.path), stamp(rollout)
        with self._lock:
            alone = self._reading.setdefault(key, threading.Lock())
        with alone:
            with self._lock:
                cached = self._cached.get(key)
                if cached is not None and cached[0] == now:
                    self._cached.move_to_end(key)
                    return cached[1]
            made = self.once(rollout)
            with self._lock:
                self._cached[key] = (now, made)
                self._cached.move_to_end(key)
                while len(self._cached) > self.KEPT:
                    self._cached.popitem(last=False)
        return made

    def once(self, rollout: Rollout) -> Reading:
        """A reading that is not cached. Raises `JournalError`."""
        return read(rollout, self._vocabulary, self._decoder)


def stamp(rollout: Rollout) -> tuple[int, int, bool]:
    """Differs when there is more to read: the journal's time and size, and whether the rollout is over."""
    return (*_changed(rollout.journal), rollout.finished)


def _changed(path: Path | None) -> tuple[int, int]:
    try:
        stat = path.stat() if path is not None else None
    except OSError:
        stat = None
    return (stat.st_mtime_ns, stat.st_size) if stat is not None else (0, 0)


def facts_of(call: Call) -> CallFacts:
    metadata, body = call.metadata, call.response_body
    return CallFacts(
        began=_text(call.request.get("timestamp")),
        ended=_text(call.response.get("timestamp")),
        duration_ms=call.duration_ms,
        ttft_ms=_number(metadata.get("ttft_ms")),
        finish=_finishes(body),
        model=_text(body.get("model")) or _text(call.request_body.get("model")),
        dialect=_text(metadata.get("dialect")),
        engine=_text(metadata.get("engine")),
        engine_version=_text(metadata.get("engine_version")),
        stream=bool(metadata.get("stream")),
        upstream=_text(metadata.get("upstream")),
        policy_version_end=_text(metadata.get("policy_version_end")),
        request_id=_text(metadata.get("request_id")),
        error=_error(body) if call.status_code >= 400 or call.outcome == "error" else None,
        foreign=not call.request and not call.response,
    )


def _finishes(body: dict[str, Any]) -> tuple[str | None, ...]:
    choices = body.get("choices")
    if isinstance(choices, list):
        return tuple(_text(choice.get("finish_reason")) if isinstance(choice, dict) else None for choice in choices)
    return tuple(reply.finish_reason for reply in choices_of(body))


def _error(body: dict[str, Any]) -> str | None:
    error = body.get("error", body)
    if isinstance(error, dict):
        error = error.get("message")
    return _text(error)


def _text(value: object) -> str | None:
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) and value != "" else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
