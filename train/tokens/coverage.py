"""`bench train token-coverage`: which rollouts hold exactly what was sampled, and for each that does not, why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capture.breaks.breaks import Break, Decoder
from capture.errors import JournalError
from capture.journal.journal import JournalReader
from capture.sequences.sequences import TRAINABLE_KINDS, TokenSequence
from capture.token_in.bridge import NOTHING_TO_BRIDGE
from train.rollouts.job_state import job_state
from train.rollouts.rollouts import Rollout, Warn, find_rollouts
from train.tokens.break_evidence import saved
from train.tokens.call_summary import CAPTURE_OFF, NOT_MERGED
from train.tokens.rollout_tokens import RolloutTokens, UnreadableLog, read_tokens
from train.tokens.sampling import certain, sentence

FEW = 3


@dataclass(frozen=True, slots=True)
class Covered:
    """One rollout's coverage: BenchFlow's summary (`summary`), its line, and what `--explain` says besides."""

    rollout: Rollout
    summary: dict[str, Any]
    line: str
    explained: list[str]

    @property
    def training_grade(self) -> bool:
        return bool(self.summary["training_grade"])

    @property
    def biases(self) -> list[str]:
        """What the sampling of its calls is known to bias logprobs by, in words; [] where it is not training-grade."""
        words = (word for one in self.summary.get("sampling", ()) for word in certain(one["not_plain"]))
        return list(dict.fromkeys(words)) if self.training_grade else []

    def to_json(self) -> dict[str, Any]:
        return {
            "rollout": self.rollout.name,
            "rollout_path": self.rollout.rollout_path,
            "finished": self.rollout.finished,
            **self.summary,
        }


def coverage(
    path: Path, *, decoder: Decoder | None = None, on_warning: Warn | None = None, explained: bool = True
) -> Iterator[Covered]:
    """The coverage of every rollout at `path`, one in memory at a time. Raises `NoSuchPath`, `BadInput`.

    A log that cannot be read makes its rollout `no`, with that reason. A name that was there before (jobs of one run)
    is told by its path. What its job dropped before it finished (a stop, or a kill) is no rollout of that job: it is
    told and left out, unless it is itself what was given.
    """
    names: set[str] = set()
    over: dict[Path, bool] = {}
    for rollout in find_rollouts(path, on_warning):
        if not rollout.finished and rollout.path != path and path.is_dir():
            job = rollout.path.parent
            if over.setdefault(job, job_state(job).over):
                rollout.warn(f"leaving out {rollout.rollout_path}: its job is over, and it never finished")
                continue
        yield cover(
            rollout, decoder, rollout.rollout_path if rollout.name in names else rollout.name, explained=explained
        )
        names.add(rollout.name)


def cover(rollout: Rollout, decoder: Decoder | None, name: str, *, explained: bool = True) -> Covered:
    """One rollout's; its line calls it `name`. Not `explained`, nothing is read twice for what token-in spared it."""
    try:
        tokens = read_tokens(rollout, decoder=decoder)
        spared = list(saved_breaks(rollout, tokens, decoder)) if explained else []
    except JournalError as error:
        summary = UnreadableLog(str(error)).coverage | {"status": "unreadable"}
        return Covered(rollout, summary, line_of(name, summary), [])
    return Covered(rollout, tokens.coverage, line_of(name, tokens.coverage), list(explain(tokens, spared)))


def line_of(name: str, summary: Mapping[str, Any]) -> str:
    """BenchFlow's line: `yes  <rollout> [<path>]: a/b calls complete, c/d prompts extend the previous call`, or
    `no   <rollout>: <reason>`; where calls were captured and something is amiss, both.
    """
    word = "yes " if summary["training_grade"] else "no  "
    if summary["status"] != "captured" or not summary["calls"]:
        return f"{word} {name}: {summary.get('reason')}"
    path = f" [{summary['path']}]" if summary["path"] else ""
    prefix = summary["prefix"]
    text = (
        f"{word} {name}{path}: {summary['complete_calls']}/{summary['calls']} calls complete, "
        f"{prefix['extends_previous_call']}/{prefix['pairs']} prompts extend the previous call"
    )
    if (told := summary["token_in"]) is not None:
        text += f"; {_number(told['bridged'], 'call')} bridged by token-in"
    return text + "".join(f"; {part}" for part in _amiss(summary))


def _amiss(summary: Mapping[str, Any]) -> Iterator[str]:
    missing = [f"{name} in {_calls(number)}" for name, number in summary["unavailable"].items()]
    if missing:
        yield f"missing: {', '.join(missing)}"
    if summary["side_calls"]:
        yield f"{_number(summary['side_calls'], 'side call')} apart"
    if summary["failed_attempts"]["retried"]:
        yield f"{_number(summary['failed_attempts']['retried'], 'failed call')} answered by a retry"
    for break_ in summary["breaks"][:FEW]:
        yield f"call {break_['call']} breaks at token {break_['index']} ({break_['cause_name']})"
    if len(summary["breaks"]) > FEW:
        yield f"and {len(summary['breaks']) - FEW} more"
    told = (None, CAPTURE_OFF, NOT_MERGED)
    if summary.get("reason") not in told and not missing:
        yield str(summary["reason"])


def total(good: int, rollouts: int) -> str:
    return f"{good} of {rollouts} rollouts are training-grade (complete token ids and logprobs, token-in/token-out)"


def biased(rollouts: int, words: Sequence[str]) -> str:
    """Said for a person beside `total`, whose words are BenchFlow's, of the training-grade rollouts with `biases`."""
    told = ", ".join(words[:FEW]) + f" and {len(words) - FEW} more" if len(words) > FEW else " and ".join(words)
    return (
        f"{_number(rollouts, 'training-grade rollout')} sampled with {told}: whole, but with "
        "logprobs that are biased for importance ratios (--explain)"
    )


def saved_breaks(rollout: Rollout, tokens: RolloutTokens, decoder: Decoder | None) -> Iterator[Break]:
    """What would have broken without token-in."""
    if rollout.journal is not None and tokens.coverage["token_in"] is not None:
        yield from saved(tokens.calls, tokens.placements, JournalReader(rollout.journal), decoder)


def explain(tokens: RolloutTokens, spared: Sequence[Break] = ()) -> Iterator[str]:
    """What `--explain` prints below a rollout's line: incomplete calls, breaks, what token-in did, the sampling."""
    for call in tokens.calls:
        if call.complete or not call.counts or call.capture is None or call.number in tokens.forgiven:
            continue
        details = {why.detail or why.code: why.code for why in call.capture.unavailable.values()}
        for detail, code in details.items():
            yield f"call {call.number} is not complete: {detail} ({code})"
    for break_ in tokens.breaks:
        yield from explain_break(break_, tokens.segments)
    yield from explain_token_in(tokens, spared)
    for call in tokens.coverage["ambiguous"]:
        candidates = ", ".join(str(line) for line in call["continues"])
        yield f"line {call['call']} continues lines {candidates} equally well; which one is not guessed"
    if (told := sampling_told(tokens)) is not None:
        yield told


def explain_break(one: Break, segments: Sequence[TokenSequence]) -> Iterator[str]:
    """A break, line by line: where, both windows, the cause, what to change, and what is exact all the same."""
    where = f"token {one.offset} of its reply" if one.region == "sampled" else f"token {one.offset} of its prompt"
    yield f"call {one.call} does not continue call {one.before}: from {where} on (index {one.index} of the new prompt)"
    texts = one.texts or (None, None, None)
    for name, ids, text in zip(("both", "held", "sent"), (one.kept, one.expected, one.found), texts, strict=True):
        yield f"  {name}    {_ids(ids, ends=name != 'both')}" + ("" if text is None else f"  {text!r}")
    yield f"  cause   {one.name} ({one.sure})"
    yield f"  change  {one.remedy}"
    before = [segment for segment in segments if one.before in segment.calls]
    after = [segment for segment in segments if segment.calls and segment.calls[0] == one.call]
    yield (
        f"  exact   {_tokens(before)} in the segment before, {_tokens(after)} in the one after "
        "(bench train convert --row-mode segment)"
    )


def explain_token_in(tokens: RolloutTokens, spared: Sequence[Break]) -> Iterator[str]:
    """Which calls were not bridged and why; where those that were would have parted from the call before."""
    whys: dict[str, list[int]] = {}
    for call in tokens.calls:
        told = call.token_in
        if told is not None and not told.bridged and told.reason not in NOTHING_TO_BRIDGE:
            whys.setdefault(f"{told.detail or told.reason} ({told.reason})", []).append(call.number)
    for why, calls in whys.items():
        were = f"call {calls[0]} was" if len(calls) == 1 else f"calls {runs(calls)} were"
        yield f"{were} not bridged: {why}"
    for one in spared:
        where = f"token {one.offset} of its reply" if one.region == "sampled" else f"token {one.offset} of its prompt"
        yield f"call {one.call} was bridged; rendered again it would have parted from call {one.before} at {where}"
        texts = one.texts or (None, None)
        for name, ids, text in zip(("sent", "render"), (one.expected, one.found), texts[-2:], strict=True):
            yield f"  {name:<6}  {_ids(ids, ends=True)}" + ("" if text is None else f"  {text!r}")
        yield f"  cause   {one.name} ({one.sure})"


def sampling_told(tokens: RolloutTokens) -> str | None:
    """One sentence a rollout where it was not sampled plainly; None where it was."""
    if tokens.status != "captured":
        return None
    odd = [one for one in tokens.coverage["sampling"] if not one["plain"]]
    if not odd:
        return None
    words = list(dict.fromkeys(word for one in odd for word in one["not_plain"]))
    calls = sum(len(one["calls"]) for one in odd)
    return f"{_number(calls, 'call')} {sentence(words)}"


def _ids(ids: Sequence[int], *, ends: bool) -> str:
    inner = ", ".join(str(token_id) for token_id in ids)
    return f"[{inner}, …]" if ends and ids else f"[… {inner}]" if ids else "[]"


def runs(numbers: Sequence[int]) -> str:
    """`0-7, 9`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _tokens(segments: Sequence[TokenSequence]) -> str:
    return _number(sum(segment.sampled for segment in segments if segment.kind in TRAINABLE_KINDS), "sampled token")


def _calls(number: int) -> str:
    return _number(number, "call")


def _number(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
