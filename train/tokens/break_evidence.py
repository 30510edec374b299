"""The messages of those calls where tokens broke, read again from the journal, and what they say about the break."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson

from capture.breaks.breaks import Break, CallView, Decoder
from capture.breaks.diagnosis import diagnose
from capture.breaks.lineage import predecessor
from capture.journal.call import Call
from capture.journal.journal import JournalReader
from capture.record import Ids
from capture.sequences.threads import Placement
from train.rollouts.chat import answer_of, chat_of
from train.rollouts.messages import NotChat

if TYPE_CHECKING:
    from train.tokens.call_summary import CallSummary


def find_breaks(
    calls: Sequence[CallSummary],
    placements: dict[int, Placement],
    forgiven: set[int],
    journal: JournalReader | None,
    decoder: Decoder | None,
) -> tuple[list[Break], dict[int, int]]:
    """The breaks, in the order of their calls; and for each call that follows one which is not complete, that call's
    number. Only calls that begin a thread, and are not the first, are looked at: elsewhere tokens have said it all.
    """
    breaks: list[Break] = []
    dropped: dict[int, int] = {}
    by_number = {call.number: call for call in calls}
    told: dict[int, CallView] = {}

    def tell(call: CallSummary) -> CallView:
        if call.number not in told:
            told[call.number] = _told(call, placements, journal)
        return told[call.number]

    for position, call in enumerate(calls):
        if not call.complete or not call.counts or call.number not in placements:
            continue
        placement = placements[call.number]
        if placement.parent is not None or placement.ambiguous or position == 0:
            continue
        earlier = [
            one for one in calls[:position] if one.counts and one.number not in forgiven and one.kind == call.kind
        ]
        if not earlier:
            continue
        before = predecessor(tell(call), [tell(one) for one in earlier])
        if before is None:
            continue
        if not by_number[before.call].complete:
            dropped[call.number] = before.call
            if not before.prompt:
                continue
        breaks.append(diagnose(before, tell(call), decoder))
    return breaks, dropped


def saved(
    calls: Sequence[CallSummary],
    placements: dict[int, Placement],
    journal: JournalReader | None,
    decoder: Decoder | None,
) -> Iterator[Break]:
    """The breaks that there would have been without token-in: each bridged call's prompt as its messages render it,
    against that of the call before, rendered likewise, and what that sampled.
    """
    by_number = {call.number: call for call in calls}
    for call in calls:
        placement = placements.get(call.number)
        parent = None if placement is None or placement.parent is None else by_number.get(placement.parent)
        if journal is None or parent is None or call.token_in is None or call.token_in.rendered is None:
            continue
        said, earlier = (journal.at(one.line, one.offset).token_in for one in (call, parent))
        before = _told(parent, placements, journal)
        if said is None or not said.bridged or said.rendered is None:
            continue
        if earlier is not None and earlier.bridged and earlier.rendered is not None:
            before = replace(before, prompt=earlier.rendered)
        if not said.rendered.startswith(before.prompt + before.sampled):
            yield diagnose(before, replace(_told(call, placements, journal), prompt=said.rendered), decoder)


def retried(calls: Sequence[CallSummary], journal: JournalReader | None) -> set[int]:
    """Numbers of calls that failed and were answered when they were made again: they count for nothing.

    The proxy says which call is made again (`retry_of`); in BenchFlow's logs it is the one with the same messages.
    """
    failed = [call for call in calls if not call.answered]
    if not failed or journal is None:
        return set()
    by_number = {call.number: call for call in calls}
    forgiven: set[int] = set()
    for call in calls:
        at: CallSummary | None = call
        while call.answered and at is not None and at.retry_of is not None and at.retry_of not in forgiven:
            at = by_number.get(at.retry_of)
            if at is not None and not at.answered:
                forgiven.add(at.number)
    if any(call.retry_of is not None for call in calls):
        return forgiven
    answered = {_fingerprint(journal, call): call.number for call in calls if call.answered}
    for call in failed:
        number = answered.get(_fingerprint(journal, call))
        if number is not None and number > call.number:
            forgiven.add(call.number)
    return forgiven


def _fingerprint(journal: JournalReader, call: CallSummary) -> bytes:
    body = journal.at(call.line, call.offset).request_body
    told = {name: body.get(name) for name in ("messages", "input", "prompt", "tools")}
    return hashlib.sha256(orjson.dumps(told, option=orjson.OPT_SORT_KEYS, default=str)).digest()


def _told(call: CallSummary, placements: dict[int, Placement], journal: JournalReader | None) -> CallView:
    """One side of a break, from the call's line."""
    capture = call.capture
    prompt = capture.prompt_token_ids if capture is not None else None
    if journal is None:
        return CallView(call.number, prompt or Ids(b""))
    line = journal.at(call.line, call.offset)
    position = _followed(call, placements)
    choice = capture.completions[position] if capture is not None and position < len(capture.completions) else None
    messages, tools, reply, finish = _chat(line, position)
    usage = answer_of(line).get("usage")
    counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
    single = capture is not None and len(capture.completions) == 1
    return CallView(
        call=call.number,
        prompt=prompt or Ids(b""),
        sampled=(choice.token_ids if choice is not None else None) or Ids(b""),
        messages=messages,
        tools=tools,
        reply=reply,
        finish_reason=finish,
        outcome=call.outcome,
        tokens=choice.tokens if choice is not None and isinstance(choice.tokens, list) else None,
        counted=counted if isinstance(counted, int) and single else None,
        codes=tuple(why.code for why in capture.unavailable.values()) if capture is not None else (),
    )


def _followed(call: CallSummary, placements: dict[int, Placement]) -> int:
    """The choice that a later call continues; the first where none does."""
    return next((one.choice for one in placements.values() if one.parent == call.number and one.choice), 0)


def _chat(line: Call, position: int) -> tuple[list[dict[str, Any]] | None, Any, dict[str, Any] | None, str | None]:
    try:
        chat = chat_of(line)
    except NotChat:
        prompt = line.request_body.get("prompt")
        if not isinstance(prompt, str):
            return None, None, None, None
        return [{"role": "prompt", "content": prompt}], None, None, None
    choice = chat.choices[position] if position < len(chat.choices) else None
    if choice is None:
        return list(chat.messages), chat.tools, None, None
    return list(chat.messages), chat.tools, choice.message, choice.finish_reason
