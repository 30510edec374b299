"""Three records of the same calls, the clients', the engine's and the journals': they must agree on every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.endurance.calls import DIALECTS, KINDS, Call, logprob, named, prompt_ids, sampled_ids
from benchmarks.endurance.client import ClientReport
from benchmarks.endurance.engine import Served
from capture.journal.call import Call as Line
from capture.journal.journal import JournalReader


@dataclass
class Books:
    """What was found; `disagreements` are sentences, empty where all records agree."""

    calls: int = 0
    lines: int = 0
    attempts: int = 0
    complete: int = 0
    ids: int = 0
    excused: int = 0
    torn: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    disagreements: list[str] = field(default_factory=list)


def reconcile(
    reports: Iterable[ClientReport],
    served: dict[str, Served],
    journals: Iterable[tuple[str, Path]],
    *,
    excused: Callable[[ClientReport], bool] = lambda report: False,
    torn: int = 0,
) -> Books:
    """Compares each client's call with the engine's ledger and its own session's journal, and all with what must be.

    `journals` are `(session, path)`; a call is `SESSION.NUMBER` and must be in that session's journal alone. Of a
    call that is `excused`, because something was broken during it, a journal may say anything that is true, or nothing.
    Up to `torn` lines per journal may be no calls.
    """
    books = Books()
    lines = _lines(journals, books, torn)
    left = dict(served)
    for report in reports:
        books.calls += 1
        books.by_kind[report.call.kind] += 1
        found, did = lines.pop(report.call.name, []), left.pop(report.call.name, None)
        if excused(report):
            books.excused += 1
            _true(report.call, found, books)
            continue
        _client(report, books)
        _engine(report.call, did, books)
        _journal(report.call, found, did, books)
    for name in left:
        books.disagreements.append(f"{name}: the engine served a call that no client made")
    for name in lines:
        books.disagreements.append(f"{name}: a journal has a call that no client made")
    return books


def _lines(journals: Iterable[tuple[str, Path]], books: Books, torn: int) -> dict[str, list[Line]]:
    lines: dict[str, list[Line]] = {}
    for session, path in journals:
        reader = JournalReader(path)
        numbers = []
        for line in reader:
            books.lines += 1
            books.outcomes[line.outcome] += 1
            numbers.append(line.number)
            found = named(line.raw)
            if found is None:
                books.disagreements.append(f"{path}, line {line.line + 1}: a call without a name")
                continue
            if not found[0].startswith(f"{session}."):
                books.disagreements.append(f"{found[0]}: is in the journal of session {session}")
            lines.setdefault(found[0], []).append(line)
        if len(set(numbers)) != len(numbers):
            books.disagreements.append(f"{path}: two calls have one number")
        books.torn += len(reader.problems)
        if len(reader.problems) > torn:
            books.disagreements += [f"{path}: {problem.what}" for problem in reader.problems]
    return lines


def _true(call: Call, lines: list[Line], books: Books) -> None:
    """What a journal says of an excused call: no more than was sampled, complete only if it is."""
    if len(lines) > 1:
        books.disagreements.append(f"{_what(call)}: {len(lines)} lines of one call")
    for line in lines:
        ids = _ids(line)
        if ids != sampled_ids(call.name, call.tokens)[: len(ids)]:
            books.disagreements.append(f"{_what(call)}: ids of another call")
        if line.capture is not None and line.capture.complete and len(ids) != call.tokens:
            books.disagreements.append(f"{_what(call)}: complete with {len(ids)} of {call.tokens} ids")


def _ids(line: Line) -> list[int]:
    choices = line.capture.completions if line.capture is not None else []
    return next((choice.token_ids.tolist() for choice in choices if choice.token_ids), [])


def _client(report: ClientReport, books: Books) -> None:
    call, must = report.call, report.call.seen
    dialect = DIALECTS[call.dialect]
    client = dialect.cut if must.client == "cut" else must.client
    status = dialect.statuses.get(must.status, must.status)
    if report.wrong is not None:
        books.disagreements.append(f"{_what(call)}: {report.wrong}")
    elif report.client != client:
        books.disagreements.append(f"{_what(call)}: the client saw {report.client} ({report.status}), not {client}")
    elif report.status != status:
        books.disagreements.append(f"{_what(call)}: the client saw status {report.status}, not {status}")


def _engine(call: Call, served: Served | None, books: Books) -> None:
    if call.kind == "unsent":
        if served is not None:
            books.disagreements.append(f"{_what(call)}: the engine got a request that was never sent whole")
        return
    if served is None:
        books.disagreements.append(f"{_what(call)}: the engine never saw it")
        return
    books.attempts += served.attempts
    # A kept connection that is reset before it brings a byte may have been closed before: the call goes once more.
    most = 2 if call.kind == "refused" and served.reused else 1
    if not 1 <= served.attempts <= most:
        books.disagreements.append(f"{_what(call)}: the engine got it {served.attempts} times")
    if call.seen.client == "answered" and not (served.whole and served.sent == call.tokens):
        books.disagreements.append(f"{_what(call)}: the engine sent {served.sent} of {call.tokens} tokens")
    if call.kind in ("leaves", "stall", "mute") and not served.told_to_stop:
        books.disagreements.append(f"{_what(call)}: the engine was not stopped")


def _journal(call: Call, lines: list[Line], served: Served | None, books: Books) -> None:
    must = call.seen
    status = DIALECTS[call.dialect].statuses.get(must.status, must.status)
    if must.outcome is None:
        if lines:
            books.disagreements.append(f"{_what(call)}: a line of a call that was never made")
        return
    if len(lines) != 1:
        books.disagreements.append(f"{_what(call)}: {len(lines)} lines instead of one")
        return
    (line,) = lines
    if line.outcome != must.outcome or line.status_code != status:
        books.disagreements.append(
            f"{_what(call)}: recorded as {line.outcome} ({line.status_code}), not {must.outcome} ({status})"
        )
        return
    if line.metadata.get("dialect") != call.dialect:
        books.disagreements.append(f"{_what(call)}: recorded as of dialect {line.metadata.get('dialect')}")
    capture = line.capture
    if capture is None:
        books.disagreements.append(f"{_what(call)}: recorded without a capture")
        return
    books.complete += capture.complete
    if capture.complete != (must.ids == "all"):
        books.disagreements.append(f"{_what(call)}: complete is {capture.complete}; {capture.unavailable}")
    ids = _ids(line)
    choices = [choice for choice in capture.completions if choice.token_ids]
    books.ids += len(ids)
    most = {"all": call.tokens, "sampled": served.sent if served else 0, "some": call.tokens, "none": 0}[must.ids]
    if len(ids) != most and not (must.ids == "some" and len(ids) <= most):
        books.disagreements.append(f"{_what(call)}: {len(ids)} ids recorded, {most} sampled")
    elif ids != sampled_ids(call.name, call.tokens)[: len(ids)]:
        books.disagreements.append(f"{_what(call)}: ids of another call")
    elif choices and list(choices[0].logprobs or ()) != [logprob(token_id) for token_id in ids]:
        books.disagreements.append(f"{_what(call)}: logprobs of other tokens")
    prompt = capture.prompt_token_ids
    if (must.ids == "all" or ids) and (prompt is None or prompt.tolist() != prompt_ids(call.name)):
        books.disagreements.append(f"{_what(call)}: the prompt's ids are not those that were sent")


def _what(call: Call) -> str:
    return f"{call.name} ({call.dialect}, {call.kind}, {'streamed' if call.streams else 'whole'})"


def table(books: Books) -> str:
    """How often each kind of call was made, one line per kind."""
    rows = [f"  {name:<11}{books.by_kind[name]:>9,}" for name in KINDS if books.by_kind[name]]
    return "\n".join(rows)
