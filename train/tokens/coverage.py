"""`bench train token-coverage`: which rollouts have exactly what was sampled, and for each that does not, why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from capture.engines.meaning import NOTHING, LogprobMeaning
from capture.errors import JournalError
from capture.journal.journal import JournalReader
from capture.sequences.sequences import TRAINABLE_KINDS, TokenSequence
from capture.token_in.bridge import NOTHING_TO_BRIDGE
from train.rollouts.job_state import job_state
from train.rollouts.rollouts import Rollout, Warn, find_rollouts
from train.tokens.break_evidence import prevented_breaks
from train.tokens.log_summary import CAPTURE_OFF, NOT_MERGED
from train.tokens.rollout_tokens import RolloutTokens, UnreadableLog, read_tokens
from train.tokens.sampling import certain, sentence, temperature_sentence

if TYPE_CHECKING:
    from capture.breaks.breaks import Break, TokenDecoder

#: Breaks, and ways of sampling, that a line names.
FEW: Final = 3


@dataclass(frozen=True, slots=True)
class Coverage:
    """One rollout's coverage: BenchFlow's summary, the line that is printed, and what `--explain` adds."""

    rollout: Rollout
    summary: dict[str, Any]
    line: str
    explained: list[str]

    @property
    def training_grade(self) -> bool:
        return bool(self.summary["training_grade"])

    @property
    def biases(self) -> list[str]:
        """What its sampling is known to bias logprobs by, in words; empty where it is not training-grade."""
        words = (word for entry in self.summary.get("sampling", ()) for word in certain(entry["biased_by"]))
        return list(dict.fromkeys(words)) if self.training_grade else []

    def to_json(self) -> dict[str, Any]:
        return {
            "rollout": self.rollout.name,
            "rollout_path": self.rollout.rollout_path,
            "finished": self.rollout.finished,
            **self.summary,
        }


def coverage(
    path: Path, *, decoder: TokenDecoder | None = None, on_warning: Warn | None = None, explained: bool = True
) -> Iterator[Coverage]:
    """The coverage of every rollout at `path`, one in memory at a time. Raises `NoSuchPath`, `BadInput`.

    A log that cannot be read makes its rollout `no`, with that reason. A rollout whose name occurred before (in another
    job of the run) is named by its path. A rollout that its job dropped before it finished (a stop, a kill) is left out
    with a warning, unless it is itself what was given.
    """
    names: set[str] = set()
    finished: dict[Path, bool] = {}
    for rollout in find_rollouts(path, on_warning):
        if not rollout.finished and rollout.path != path and path.is_dir():
            job = rollout.path.parent
            if finished.setdefault(job, job_state(job).over):
                rollout.warn(f"leaving out {rollout.rollout_path}: its job is over, and it never finished")
                continue
        name = rollout.rollout_path if rollout.name in names else rollout.name
        yield rollout_coverage(rollout, decoder, name, explained=explained)
        names.add(rollout.name)


def rollout_coverage(rollout: Rollout, decoder: TokenDecoder | None, name: str, *, explained: bool = True) -> Coverage:
    """The coverage of one rollout, which its line calls `name`. Without `explained` no line is read twice."""
    try:
        tokens = read_tokens(rollout, decoder=decoder)
        prevented = list(_prevented_breaks(rollout, tokens, decoder)) if explained else []
    except JournalError as error:
        summary = UnreadableLog(str(error)).coverage | {"status": "unreadable"}
        return Coverage(rollout, summary, line_of(name, summary), [])
    return Coverage(rollout, tokens.coverage, line_of(name, tokens.coverage), list(explain(tokens, prevented)))


def line_of(name: str, summary: Mapping[str, Any]) -> str:
    """BenchFlow's line: `yes  <rollout> [<path>]: a/b calls complete, c/d prompts extend the previous call`, or
    `no   <rollout>: <reason>`; both where calls were captured and something is wrong.
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
    if (token_in := summary["token_in"]) is not None:
        text += f"; {_count(token_in['bridged'], 'call')} bridged by token-in"
    return text + "".join(f"; {part}" for part in _remarks(summary))


def _remarks(summary: Mapping[str, Any]) -> Iterator[str]:
    missing = [f"{name} in {_count(number, 'call')}" for name, number in summary["unavailable"].items()]
    if missing:
        yield f"missing: {', '.join(missing)}"
    if summary["side_calls"]:
        yield f"{_count(summary['side_calls'], 'side call')} apart"
    failed = summary["failed_attempts"]
    if failed["retried"]:
        yield f"{_count(failed['retried'], 'failed call')} answered by a retry"
    if failed["refused"]:
        yield f"{_count(failed['refused'], 'call')} refused by the engine, nothing sampled"
    if summary.get("purpose") == "eval":
        yield "an evaluation"
    if failed["ended"]:
        yield f"ended by its budget ({summary['budget']}), {_count(failed['ended'], 'call')} answered by the proxy"
    if failed["cut"]:
        yield f"{_count(failed['cut'], 'last call')} cut off, not counted"
    for found in summary["breaks"][:FEW]:
        yield f"call {found['call']} breaks at token {found['index']} ({found['cause_name']})"
    if len(summary["breaks"]) > FEW:
        yield f"and {len(summary['breaks']) - FEW} more"
    if summary.get("reason") not in (None, CAPTURE_OFF, NOT_MERGED) and not missing:
        yield str(summary["reason"])


def total(good: int, rollouts: int) -> str:
    """BenchFlow's last line."""
    return f"{good} of {rollouts} rollouts are training-grade (complete token ids and logprobs, token-in/token-out)"


def biased(rollouts: int, words: Sequence[str]) -> str:
    """A warning about the training-grade rollouts with `biases`; `words` are those of all of them."""
    shown = ", ".join(words[:FEW]) + f" and {len(words) - FEW} more" if len(words) > FEW else " and ".join(words)
    return (
        f"{_count(rollouts, 'training-grade rollout')} sampled with {shown}: complete, but their logprobs are biased "
        "for importance ratios (--explain)"
    )


def _prevented_breaks(rollout: Rollout, tokens: RolloutTokens, decoder: TokenDecoder | None) -> Iterator[Break]:
    if rollout.journal is not None and tokens.coverage["token_in"] is not None:
        yield from prevented_breaks(tokens.calls, tokens.placements, JournalReader(rollout.journal), decoder)


def explain(tokens: RolloutTokens, prevented: Sequence[Break] = ()) -> Iterator[str]:
    """What `--explain` prints below a rollout's line: incomplete calls, breaks, what token-in did, the sampling."""
    for call in tokens.summary.refused:
        yield f"call {call.number} was refused: {call.refusal}; nothing was sampled, so nothing is missing"
    for call in tokens.summary.ended:
        yield f"call {call.number} was past the session's budget ({call.ended}): nothing was sampled"
    for call in tokens.summary.cut:
        yield f"call {call.number} was cut off with the rollout: the agent never had its reply, so it is not counted"
    for call in tokens.summary.counted:
        if call.complete or call.capture is None:
            continue
        details = {why.detail or why.code: why.code for why in call.capture.unavailable.values()}
        for detail, code in details.items():
            yield f"call {call.number} is not complete: {detail} ({code})"
    for found in tokens.breaks:
        yield from explain_break(found, tokens.segments)
    yield from explain_token_in(tokens, prevented)
    for entry in tokens.coverage["ambiguous"]:
        candidates = ", ".join(str(line) for line in entry["continues"])
        yield f"line {entry['call']} continues lines {candidates} equally well; which one is not guessed"
    if (text := sampling_sentence(tokens)) is not None:
        yield text


def explain_break(found: Break, segments: Sequence[TokenSequence]) -> Iterator[str]:
    """A break, line by line: where it is, both windows, the cause, what to change, and what is exact all the same."""
    yield (
        f"call {found.call} does not continue call {found.before}: from {_place(found)} on "
        f"(index {found.index} of the new prompt)"
    )
    texts = found.texts or (None, None, None)
    for name, ids, text in zip(("both", "held", "sent"), (found.kept, found.expected, found.found), texts, strict=True):
        yield f"  {name}    {_ids(ids, ends=name != 'both')}" + ("" if text is None else f"  {text!r}")
    yield f"  cause   {found.name} ({found.sure})"
    yield f"  change  {found.remedy}"
    before = [segment for segment in segments if found.before in segment.calls]
    after = [segment for segment in segments if segment.calls and segment.calls[0] == found.call]
    yield (
        f"  exact   {_sampled(before)} in the segment before, {_sampled(after)} in the one after "
        "(bench train convert --row-mode segment)"
    )


def explain_token_in(tokens: RolloutTokens, prevented: Sequence[Break]) -> Iterator[str]:
    """Which calls were not bridged and why; and where bridged ones would have broken."""
    reasons: dict[str, list[int]] = {}
    for call in tokens.calls:
        token_in = call.token_in
        if token_in is not None and not token_in.bridged and token_in.reason not in NOTHING_TO_BRIDGE:
            reason = f"{token_in.detail or token_in.reason} ({token_in.reason})"
            reasons.setdefault(reason, []).append(call.number)
    for reason, calls in reasons.items():
        subject = f"call {calls[0]} was" if len(calls) == 1 else f"calls {ranges(calls)} were"
        yield f"{subject} not bridged: {reason}"
    for found in prevented:
        yield (
            f"call {found.call} was bridged; re-rendered, it would have differed from call {found.before} at "
            f"{_place(found)}"
        )
        texts = found.texts or (None, None)
        for name, ids, text in zip(("sent", "render"), (found.expected, found.found), texts[-2:], strict=True):
            yield f"  {name:<6}  {_ids(ids, ends=True)}" + ("" if text is None else f"  {text!r}")
        yield f"  cause   {found.name} ({found.sure})"


def sampling_sentence(tokens: RolloutTokens) -> str | None:
    """What a person who trains on a rollout that was not sampled plainly has to know; None where it was."""
    if tokens.status != "captured":
        return None
    return "; ".join(_sampling_parts(tokens.coverage["sampling"])) or None


def _sampling_parts(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A sentence about what biases ratios, and one about temperatures that only the trainer has to know."""
    biased = [entry for entry in entries if entry["biased_by"]]
    if biased:
        words = list(dict.fromkeys(word for entry in biased for word in entry["biased_by"]))
        meanings = list(map(LogprobMeaning.from_json, (entry["logprobs"] for entry in biased)))
        same = all(meaning == meanings[0] for meaning in meanings)
        yield f"{_calls(biased)} {sentence(words, meanings[0] if same else NOTHING)}"
    applied = [entry for entry in entries if len(entry["biased_by"]) < len(entry["not_plain"])]
    if applied:
        words = [word for entry in applied for word in entry["not_plain"] if word not in entry["biased_by"]]
        yield f"{_calls(applied)} {temperature_sentence(list(dict.fromkeys(words)))}"


def _calls(entries: Sequence[Mapping[str, Any]]) -> str:
    return _count(sum(len(entry["calls"]) for entry in entries), "call")


def _place(found: Break) -> str:
    return f"token {found.offset} of its {'reply' if found.region == 'sampled' else 'prompt'}"


def _ids(ids: Sequence[int], *, ends: bool) -> str:
    inner = ", ".join(str(token_id) for token_id in ids)
    return f"[{inner}, …]" if ends and ids else f"[… {inner}]" if ids else "[]"


def ranges(numbers: Sequence[int]) -> str:
    """`0-7, 9`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def _sampled(segments: Sequence[TokenSequence]) -> str:
    return _count(sum(segment.sampled for segment in segments if segment.kind in TRAINABLE_KINDS), "sampled token")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
