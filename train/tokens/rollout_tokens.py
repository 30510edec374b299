"""What was captured of one rollout: how complete it is, its token sequences, and where and why they break."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from capture.breaks.breaks import Break, Decoder
from capture.errors import CaptureError, RecordError
from capture.journal.call import Call, TokenIn
from capture.journal.journal import JournalReader
from capture.record import Ids
from capture.sequences.sequences import TRAINABLE_KINDS, Span, TokenSequence, Turn, merge
from capture.sequences.threads import Placement, Threads
from train.rollouts.rollouts import Rollout
from train.tokens.break_evidence import find_breaks, retried
from train.tokens.call_summary import CallSummary, summarize
from train.tokens.sampling import not_plain, sampling_of


@dataclass
class RolloutTokens:
    """The tokens of a rollout; `calls` are in the order they began.

    `segments` are all exact sequences, the agent's first; `sequences` the same where the rollout is training-grade,
    empty otherwise. `segment_notes` has one dict a segment: what a record says of it besides its tokens.
    """

    calls: list[CallSummary]
    segments: list[TokenSequence]
    breaks: list[Break]
    coverage: dict[str, Any]
    placements: dict[int, Placement]
    #: Numbers of failed calls that a retry answered.
    forgiven: frozenset[int] = frozenset()
    #: Number of a call that is not complete, by the number of the call that was to continue it.
    dropped: dict[int, int] = field(default_factory=dict)

    @cached_property
    def segment_notes(self) -> list[dict[str, Any]]:
        lines = {call.number: call.line for call in self.calls}
        return [_note(number, one, self.breaks, self.dropped, lines) for number, one in enumerate(self.segments)]

    @property
    def status(self) -> str:
        return str(self.coverage["status"])

    @property
    def training_grade(self) -> bool:
        return bool(self.coverage["training_grade"])

    @property
    def reason(self) -> str | None:
        """Why it is not training-grade; None where it is."""
        return self.coverage.get("reason")

    @property
    def sequences(self) -> list[TokenSequence]:
        return self.segments if self.training_grade else []

    @property
    def reached(self) -> bool:
        """Whether a model answered at least once."""
        return any(call.answered for call in self.calls)

    @property
    def captured_calls(self) -> list[dict[str, Any]]:
        """One dict a captured call, in file order; ids are `Ids`. `index` is the call's line in the journal."""
        rows = []
        for call in sorted(self.calls, key=lambda one: one.line):
            if call.capture is None:
                continue
            rows.append(
                {
                    "index": call.line,
                    "call": call.number,
                    "kind": call.kind,
                    "provider": call.capture.provider,
                    "prompt_token_ids": call.capture.prompt_token_ids,
                    "completions": [
                        {"index": choice.index, "token_ids": choice.token_ids, "logprobs": choice.logprobs}
                        for choice in call.capture.completions
                    ],
                    "unavailable": {name: why.to_json() for name, why in call.capture.unavailable.items()},
                    "sampling": call.sampling,
                    "not_plain": call.not_plain,
                    "policy_version": call.policy_version,
                }
            )
        return rows


def read_tokens(
    rollout: Rollout, *, decoder: Decoder | None = None, on_call: Callable[[Call], None] | None = None
) -> RolloutTokens:
    """Reads a rollout's journal once. `on_call` is given each call as it passes, in file order.

    Raises `JournalError` when the journal cannot be read; single lines that are no call are told to `on_warning` and
    stand in `coverage["problems"]`.
    """
    problems: list[str] = []
    calls = [_hear(call, on_call) for call in _calls(rollout, problems)]
    if len({call.number for call in calls}) < len(calls):  # a journal that two proxies wrote: its lines are the order
        for call in calls:
            call.number, call.retry_of = call.line, None
    calls.sort(key=lambda one: one.number)
    again = JournalReader(rollout.journal) if rollout.journal is not None else None
    placements = _place(calls)
    if again is not None:
        _name_kinds(calls, placements, again)
    segments = merge([turn for call in calls if (turn := _turn(call)) is not None], placements) + _several(calls)
    forgiven = retried(calls, again)
    breaks, dropped = find_breaks(calls, placements, forgiven, again, decoder)
    coverage = summarize(rollout, calls, placements, segments, breaks, forgiven, problems)
    return RolloutTokens(calls, segments, breaks, coverage, placements, frozenset(forgiven), dropped)


@dataclass(frozen=True, slots=True)
class UnreadableLog:
    """Stands for a log that cannot be read: nothing is known about its calls, and `reason` says why."""

    reason: str
    captured_calls: tuple[dict[str, Any], ...] = ()
    sequences: tuple[TokenSequence, ...] = ()
    segments: tuple[TokenSequence, ...] = ()
    segment_notes: tuple[dict[str, Any], ...] = ()

    @property
    def coverage(self) -> dict[str, Any]:
        return {
            "status": "no_gateway_capture",
            "training_grade": False,
            "path": None,
            "calls": 0,
            "captured_calls": 0,
            "complete_calls": 0,
            "reason": self.reason,
        }


def read_log(rollout: Rollout) -> RolloutTokens | UnreadableLog:
    """`read_tokens`, for callers that go on without the log where it cannot be read."""
    try:
        return read_tokens(rollout)
    except CaptureError as error:
        return UnreadableLog(str(error))


def _calls(rollout: Rollout, problems: list[str]) -> Iterator[Call]:
    """`Rollout.calls`, with what it warns of kept too."""
    if rollout.journal is None:
        return
    reader = JournalReader(rollout.journal)
    yield from reader
    for what in [*(problem.what for problem in reader.problems), *filter(None, [reader.gaps])]:
        problems.append(what)
        rollout.warn(f"{rollout.journal}: {what}")


def _hear(call: Call, on_call: Callable[[Call], None] | None) -> CallSummary:
    if on_call is not None:
        on_call(call)
    capture, unreadable = None, None
    try:
        capture = call.capture
    except RecordError as error:
        unreadable = str(error)
    version, retry_of = call.metadata.get("policy_version"), call.metadata.get("retry_of")
    return CallSummary(
        number=call.number,
        line=call.line,
        offset=call.offset,
        purpose=call.purpose,
        outcome=call.outcome,
        status=call.status_code,
        capture=capture,
        unreadable=unreadable,
        sampling=sampling_of(call),
        not_plain=not_plain(call),
        policy_version=None if version is None else str(version),
        retry_of=retry_of if isinstance(retry_of, int) else None,
        token_in=_token_in(call),
    )


def _token_in(call: Call) -> TokenIn | None:
    """What is said of token-in, without the ids of the other prompt: they are read again where they are asked for."""
    told = call.token_in
    return told if told is None or told.rendered is None else replace(told, rendered=Ids(b""))


def _turn(call: CallSummary) -> Turn | None:
    if not call.complete or call.capture is None or call.capture.prompt_token_ids is None:
        return None
    prompt = call.capture.prompt_token_ids
    return Turn(call.number, call.line, prompt, call.capture.completions, call.kind, call.policy_version)


def _place(calls: Sequence[CallSummary]) -> dict[int, Placement]:
    threads = Threads()
    for call in calls:
        if (turn := _turn(call)) is not None:
            threads.place(turn.call, turn.prompt, [choice.token_ids or Ids(b"") for choice in turn.choices])
    return threads.placements


def _several(calls: Sequence[CallSummary]) -> list[TokenSequence]:
    """A completions call of several prompts: each is a sequence of its own."""
    made: list[TokenSequence] = []
    for call in calls:
        if not call.complete or call.capture is None or call.capture.prompt_token_ids is not None:
            continue
        for choice in call.capture.completions:
            if choice.prompt_token_ids is None or choice.token_ids is None or choice.logprobs is None:
                continue
            made.append(
                TokenSequence(
                    thread=len(made),
                    kind=call.kind,
                    calls=(call.number,),
                    lines=(call.line,),
                    prompt_ids=choice.prompt_token_ids,
                    completion_ids=choice.token_ids,
                    spans=(Span(call.number, call.line, 0, len(choice.token_ids)),),
                    logprobs=tuple(float(value) for value in choice.logprobs),
                    policy_versions=() if call.policy_version is None else (call.policy_version,),
                )
            )
    return made


def _name_kinds(calls: Sequence[CallSummary], placements: dict[int, Placement], again: JournalReader) -> None:
    """A call's kind: what its writer called it; one without tools beside others with them is a helper; what continues
    a call is of its kind; where no call offers tools the rollout is a chat (BenchFlow's words).
    """
    by_number = {call.number: call for call in calls}
    roots = [call for call in calls if call.purpose == "agent" and _parent(call, placements) is None]
    tools = {call.number: again.at(call.line, call.offset).offers_tools for call in roots}
    for call in calls:
        parent = _parent(call, placements)
        if call.purpose != "agent":
            call.kind = call.purpose
        elif parent is not None:
            call.kind = by_number[parent].kind
        elif not any(tools.values()):
            call.kind = "chat"
        else:
            call.kind = "agent" if tools[call.number] else "helper"


def _parent(call: CallSummary, placements: dict[int, Placement]) -> int | None:
    placement = placements.get(call.number)
    return None if placement is None else placement.parent


def _note(
    number: int, one: TokenSequence, breaks: Sequence[Break], dropped: dict[int, int], lines: dict[int, int]
) -> dict[str, Any]:
    """What BenchFlow's token-segments.v1 says of a segment besides its tokens. Calls are lines of the journal."""
    trainable = one.kind in TRAINABLE_KINDS
    return {
        "segment": number,
        "thread": one.thread,
        "kind": one.kind,
        "trainable": trainable,
        "excluded": None if trainable else f"kind:{one.kind}",
        "calls": list(one.lines),
        "start": _start(one.calls[0], breaks, dropped, lines),
        "call_spans": [{"call": span.line, "offset": span.offset, "length": span.length} for span in one.spans],
        "sampled_tokens": one.sampled,
        "policy_versions": list(one.policy_versions),
        "digest": one.digest(),
    }


def _start(call: int, breaks: Sequence[Break], dropped: dict[int, int], lines: dict[int, int]) -> dict[str, Any] | None:
    """Why a segment begins where it does, and after which call; None for one that begins a conversation."""
    found = next((one for one in breaks if one.call == call), None)
    if call in dropped:
        return {"reason": "after_dropped_call", "call": lines[dropped[call]]}
    if found is not None:
        return {"reason": found.start_reason, "call": lines[found.before]}
    return None
