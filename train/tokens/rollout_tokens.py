"""What was captured of one rollout: how complete it is, its token sequences, and where and why they break."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from capture.errors import CaptureError
from capture.journal.call import Call
from capture.journal.journal import JournalReader
from capture.record import Completion
from capture.sequences.sequences import TRAINABLE_KINDS, Span, TokenSequence, merge
from capture.sequences.threads import Placement, Threads
from capture.sequences.versions import VersionSpan, version_spans
from capture.token_ids import Ids
from train.rollouts.rollouts import Rollout
from train.tokens.break_evidence import find_breaks, retried_calls
from train.tokens.call_chats import CallChats
from train.tokens.call_summary import CallSummary
from train.tokens.log_summary import LogSummary
from train.tokens.resampled import ResampledTurns

if TYPE_CHECKING:
    from capture.breaks.breaks import Break, TokenDecoder


@dataclass
class RolloutTokens:
    """The tokens of a rollout; `calls` are in the order they began.

    `segments` are all exact sequences, the agent's first; `sequences` are the same where the rollout is training-grade,
    and empty otherwise. `segment_notes` has one dict per segment: what a record says about it besides its tokens.
    """

    calls: list[CallSummary]
    segments: list[TokenSequence]
    breaks: list[Break]
    summary: LogSummary
    coverage: dict[str, Any]
    placements: dict[int, Placement]
    #: Number of a call that is not complete, by the number of the call that was meant to continue it.
    dropped: dict[int, int] = field(default_factory=dict)
    #: What was sent and what came back, where it was asked for.
    chats: CallChats | None = None

    @cached_property
    def segment_notes(self) -> list[dict[str, Any]]:
        lines = {call.number: call.line for call in self.calls}
        return [
            _note(number, segment, self.breaks, self.dropped, lines) for number, segment in enumerate(self.segments)
        ]

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
    def retried(self) -> frozenset[int]:
        """Numbers of failed calls that were made again and answered."""
        return self.summary.retried

    @property
    def sequences(self) -> list[TokenSequence]:
        return self.segments if self.training_grade else []

    @property
    def reached(self) -> bool:
        """Whether a model answered at least once."""
        return any(call.answered for call in self.calls)

    @property
    def captured_calls(self) -> list[dict[str, Any]]:
        """One dict per captured call, in file order; ids are `Ids`. `index` is the call's line in the journal."""
        rows = []
        for call in sorted(self.calls, key=lambda call: call.line):
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
                    "logprobs": call.logprobs.to_json(),
                    "policy_version": next(iter(call.policy_versions), None),
                    "policy_version_end": call.policy_versions[-1] if len(call.policy_versions) > 1 else None,
                    **({} if self.chats is None else {"chat": self.chats.at(call.line)}),
                }
            )
        return rows


def read_tokens(
    rollout: Rollout,
    *,
    decoder: TokenDecoder | None = None,
    on_call: Callable[[Call], None] | None = None,
    chat: bool = False,
) -> RolloutTokens:
    """Reads a rollout's journal once. `on_call` is called with each call, in file order. `chat` keeps the messages too.

    Raises `JournalError` when the journal cannot be read. Single lines that are not a call go to the rollout's `warn`,
    and are listed in `coverage["problems"]`.
    """
    problems: list[str] = []
    calls = []
    chats = CallChats() if chat else None
    for call in _read(rollout, problems):
        if on_call is not None:
            on_call(call)
        summary = CallSummary.of(call)
        calls.append(summary)
        if chats is not None and summary.capture is not None:
            chats.add(call)
    if len({call.number for call in calls}) < len(calls):  # two proxies wrote the journal: its lines are the order
        for summary in calls:
            summary.number, summary.retry_of = summary.line, None
    calls.sort(key=lambda call: call.number)
    journal = JournalReader(rollout.journal) if rollout.journal is not None else None
    placements = _place(calls, journal)
    if journal is not None:
        _name_kinds(calls, placements, journal)
    turns = [turn for call in calls if (turn := call.turn) is not None]
    segments = merge(turns, placements) + _multi_prompt_sequences(calls)
    retried = retried_calls(calls, journal)
    breaks, dropped = find_breaks(calls, placements, retried, journal, decoder)
    log = LogSummary(calls, placements, segments, breaks, frozenset(retried), problems)
    return RolloutTokens(calls, segments, breaks, log, log.to_json(rollout), placements, dropped, chats)


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


def read_log(rollout: Rollout, *, chat: bool = False) -> RolloutTokens | UnreadableLog:
    """`read_tokens`, for callers that continue without the log where it cannot be read."""
    try:
        return read_tokens(rollout, chat=chat)
    except CaptureError as error:
        return UnreadableLog(str(error))


def _read(rollout: Rollout, problems: list[str]) -> Iterator[Call]:
    """`Rollout.calls`; what is wrong with the journal is also appended to `problems`."""
    if rollout.journal is None:
        return
    reader = JournalReader(rollout.journal)
    yield from reader
    for sentence in [*(problem.what for problem in reader.problems), *filter(None, [reader.gaps])]:
        problems.append(sentence)
        rollout.warn(f"{rollout.journal}: {sentence}")


def _place(calls: Sequence[CallSummary], journal: JournalReader | None) -> dict[int, Placement]:
    threads = Threads(ResampledTurns({call.number: call for call in calls}, journal))
    for call in calls:
        if (turn := call.turn) is not None:
            threads.place(turn.call, turn.prompt, [choice.token_ids or Ids(b"") for choice in turn.choices])
    return threads.placements


def _multi_prompt_sequences(calls: Sequence[CallSummary]) -> list[TokenSequence]:
    """A completions call with several prompts: each choice is a sequence of its own."""
    sequences: list[TokenSequence] = []
    for call in calls:
        if not call.complete or call.capture is None or call.capture.prompt_token_ids is not None:
            continue
        for choice in call.capture.completions:
            if choice.prompt_token_ids is not None and choice.token_ids is not None and choice.logprobs is not None:
                sequences.append(one_call_sequence(call, choice.prompt_token_ids, choice, thread=len(sequences)))
    return sequences


def one_call_sequence(call: CallSummary, prompt_ids: Ids, choice: Completion, thread: int = 0) -> TokenSequence:
    """The sequence of one choice of one complete call: its prompt and what it sampled."""
    assert choice.token_ids is not None and choice.logprobs is not None
    return TokenSequence(
        thread=thread,
        kind=call.kind,
        calls=(call.number,),
        lines=(call.line,),
        prompt_ids=prompt_ids,
        completion_ids=choice.token_ids,
        spans=(Span(call.number, call.line, 0, len(choice.token_ids)),),
        logprobs=tuple(float(value) for value in choice.logprobs),
        policy_versions=call.policy_versions,
        version_spans=_version_spans(call, choice),
    )


def _version_spans(call: CallSummary, choice: Completion) -> tuple[VersionSpan, ...]:
    assert call.capture is not None and choice.token_ids is not None
    if not call.policy_versions:
        return ()
    ranges = call.version_ranges[call.capture.completions.index(choice)] if call.version_ranges else ()
    return tuple(version_spans(0, len(choice.token_ids), ranges, call.policy_versions))


def _name_kinds(calls: Sequence[CallSummary], placements: dict[int, Placement], journal: JournalReader) -> None:
    """Sets the kind of each call, in BenchFlow's words.

    It is what the writer called it. Otherwise a call without tools beside calls with tools is a helper, a call that
    continues another is of its kind, and a rollout in which no call offers tools is a chat.
    """
    by_number = {call.number: call for call in calls}
    roots = [call for call in calls if call.purpose == "agent" and _parent(call, placements) is None]
    tools = {call.number: journal.at(call.line, call.offset).offers_tools for call in roots}
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
    number: int, segment: TokenSequence, breaks: Sequence[Break], dropped: dict[int, int], lines: dict[int, int]
) -> dict[str, Any]:
    """What BenchFlow's token-segments.v1 says about a segment besides its tokens. Calls are lines of the journal."""
    trainable = segment.kind in TRAINABLE_KINDS
    return {
        "segment": number,
        "thread": segment.thread,
        "kind": segment.kind,
        "trainable": trainable,
        "excluded": None if trainable else f"kind:{segment.kind}",
        "calls": list(segment.lines),
        "start": _start(segment.calls[0], breaks, dropped, lines),
        "call_spans": [{"call": span.line, "offset": span.offset, "length": span.length} for span in segment.spans],
        "sampled_tokens": segment.sampled,
        "policy_versions": list(segment.policy_versions),
        "version_spans": [span.to_json() for span in segment.version_spans],
        "digest": segment.digest(),
    }


def _start(call: int, breaks: Sequence[Break], dropped: dict[int, int], lines: dict[int, int]) -> dict[str, Any] | None:
    """Why a segment begins where it does, and after which call; None where it begins a conversation."""
    found = next((candidate for candidate in breaks if candidate.call == call), None)
    if call in dropped:
        return {"reason": "after_dropped_call", "call": lines[dropped[call]]}
    if found is not None:
        return {"reason": found.start_reason, "call": lines[found.before]}
    return None
