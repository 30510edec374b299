"""The messages of those calls where tokens broke, read again from the journal, and what they say about the break."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson

from capture.breaks.breaks import Break, CallView, TokenDecoder
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
    retried: set[int],
    journal: JournalReader | None,
    decoder: TokenDecoder | None,
) -> tuple[list[Break], dict[int, int]]:
    """The breaks, in the order of their calls; and the number of an incomplete call, by that of the call after it.

    Only calls that begin a thread and are not the first are examined: elsewhere the tokens continue.
    """
    breaks: list[Break] = []
    dropped: dict[int, int] = {}
    by_number = {call.number: call for call in calls}
    view = _views(placements, journal)
    for position, call in enumerate(calls):
        if not call.complete or not call.own_work or call.number not in placements:
            continue
        placement = placements[call.number]
        if placement.parent is not None or placement.ambiguous or position == 0:
            continue
        earlier = [
            before
            for before in calls[:position]
            if before.own_work
            and before.kind == call.kind
            and before.refusal is None  # it sampled nothing that could be continued
            and before.number not in retried
        ]
        if not earlier:
            continue
        before = predecessor(view(call), [view(candidate) for candidate in earlier])
        if before is None:
            continue
        if not by_number[before.call].complete:
            dropped[call.number] = before.call
            if not before.prompt:
                continue
        breaks.append(diagnose(before, view(call), decoder))
    return breaks, dropped


def prevented_breaks(
    calls: Sequence[CallSummary],
    placements: dict[int, Placement],
    journal: JournalReader,
    decoder: TokenDecoder | None,
) -> Iterator[Break]:
    """The breaks that there would have been without token-in.

    Each bridged call's prompt as its messages render is compared with that of the call before, rendered likewise, and
    what that sampled.
    """
    by_number = {call.number: call for call in calls}
    view = _views(placements, journal)
    for call in calls:
        placement = placements.get(call.number)
        parent = None if placement is None or placement.parent is None else by_number.get(placement.parent)
        if parent is None or call.token_in is None or call.token_in.rendered is None:
            continue
        bridge, earlier = (journal.at(each.line, each.offset).token_in for each in (call, parent))
        if bridge is None or not bridge.bridged or bridge.rendered is None:
            continue
        before = view(parent)
        if earlier is not None and earlier.bridged and earlier.rendered is not None:
            before = replace(before, prompt=earlier.rendered)
        if not bridge.rendered.startswith(before.prompt + before.sampled):
            yield diagnose(before, replace(view(call), prompt=bridge.rendered), decoder)


def retried_calls(calls: Sequence[CallSummary], journal: JournalReader | None) -> set[int]:
    """Numbers of calls that failed and were answered when they were made again: they do not count.

    The proxy records which call is made again (`retry_of`); in BenchFlow's logs it is the one with the same messages.
    """
    failed = [call for call in calls if not call.answered]
    if not failed or journal is None:
        return set()
    by_number = {call.number: call for call in calls}
    retried: set[int] = set()
    for call in calls:
        attempt: CallSummary | None = call
        while call.answered and attempt and attempt.retry_of is not None and attempt.retry_of not in retried:
            attempt = by_number.get(attempt.retry_of)
            if attempt is not None and not attempt.answered:
                retried.add(attempt.number)
    if any(call.retry_of is not None for call in calls):
        return retried
    answered = {_request_hash(journal, call): call.number for call in calls if call.answered}
    for call in failed:
        number = answered.get(_request_hash(journal, call))
        if number is not None and number > call.number:
            retried.add(call.number)
    return retried


def _request_hash(journal: JournalReader, call: CallSummary) -> bytes:
    """Equal for two requests of the same content, however they were sampled and streamed."""
    body = journal.at(call.line, call.offset).request_body
    content = {name: body.get(name) for name in ("messages", "input", "prompt", "tools")}
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS, default=str)).digest()


def _views(placements: dict[int, Placement], journal: JournalReader | None) -> Callable[[CallSummary], CallView]:
    """`_view`, with each call read once."""
    known: dict[int, CallView] = {}

    def view(call: CallSummary) -> CallView:
        if call.number not in known:
            known[call.number] = _view(call, placements, journal)
        return known[call.number]

    return view


def _view(call: CallSummary, placements: dict[int, Placement], journal: JournalReader | None) -> CallView:
    """One side of a break, from the call's line."""
    capture = call.capture
    prompt = capture.prompt_token_ids if capture is not None else None
    if journal is None:
        return CallView(call.number, prompt or Ids(b""))
    line = journal.at(call.line, call.offset)
    position = _continued_choice(call, placements)
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


def _continued_choice(call: CallSummary, placements: dict[int, Placement]) -> int:
    """The index of the choice that a later call continues; 0 where none does."""
    return next((place.choice for place in placements.values() if place.parent == call.number and place.choice), 0)


def _chat(line: Call, position: int) -> tuple[list[dict[str, Any]] | None, Any, dict[str, Any] | None, str | None]:
    """The messages, the tools, and the reply at `position` with its finish reason; None for what is not known."""
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
