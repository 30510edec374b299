"""Reads the most common chunk of a stream, one sampled token and its text, without parsing it as JSON.

Parsing such a chunk into objects, inspecting them and serializing them again is most of what a capture costs. In a
vLLM stream (0.32) these chunks all start with the same bytes and differ only in the text, the token, the logprob, the
id and the finish reason. So the first is parsed; if that left its start unchanged, chunks with the same start are split
by a pattern. A chunk that differs in any other way is parsed.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import orjson

from capture.record import is_logprob

#: Keys that must be null unless the agent asked for them, for `Parts.given` to be what it gets.
MUTED: Final = frozenset(("logprobs", "token_ids"))

_OPENING: Final = b'"choices":[{"index":0,"delta":{'
#: A JSON string with only one spelling: short escapes, or none.
_STRING: Final = rb'"[^"\\\x00-\x1f]*(?:\\["\\nrtbf][^"\\\x00-\x1f]*)*"'
_PARTS: Final = re.compile(
    rb'((?:"(content|reasoning|reasoning_content)":(' + _STRING + rb"))?\},)"
    # A token spelled as its id needs the general parser.
    rb'"logprobs":\{"content":\[\{"token":(?!"token_id:)(' + _STRING + rb"),"
    rb'"logprob":(-?[0-9]+\.[0-9]+(?:[eE][-+]?[0-9]+)?),"bytes":(?:\[[0-9,]*\]|null),"top_logprobs":\[\]\}\]\},'
    rb'"finish_reason":(null|("[a-z_]+"),"stop_reason":(null|0|[1-9][0-9]{0,17}|' + _STRING + rb")),"
    rb'"token_ids":\[(0|[1-9][0-9]{0,17})\]\}\]\}'
)


class Parts(NamedTuple):
    """What one regular chunk contains; `given` is what an agent gets that asked for neither logprobs nor ids.

    `field` is None if there is no text, for example while the engine's parser holds it back: such a chunk is not sent
    unless it is the last. `finish` is None before the last.
    """

    field: str | None
    text: str
    token: str
    logprob: float
    token_id: int
    finish: str | None
    stop: str | int | None
    given: bytes | None


def opening(data: bytes) -> bytes | None:
    """The bytes with which a regular chunk and those after it start; None if this chunk is not regular."""
    at = data.find(_OPENING)
    return data[: at + len(_OPENING)] if at >= 0 else None


def parts(data: bytes, start: bytes) -> Parts | None:
    """The parts of a chunk that starts with `start`; None if it has to be parsed."""
    found = _PARTS.fullmatch(data, len(start))
    if found is None:
        return None
    delta, field, text, token, logprob, ended, finish, stop, token_id = found.groups()
    written = text or b'""', token, logprob, token_id, finish or b"null", stop or b"null"
    try:
        text, token, logprob, token_id, finish, stop = orjson.loads(b"[%b,%b,%b,%b,%b,%b]" % written)
    except orjson.JSONDecodeError:  # not UTF-8, or not a JSON number
        return None
    if not is_logprob(logprob):
        return None
    given = None
    if field is not None or finish is not None:
        given = b'%b%b"logprobs":null,"finish_reason":%b,"token_ids":null}]}' % (start, delta, ended)
    return Parts(_FIELDS[field], text, token, logprob, token_id, finish, stop, given)


_FIELDS: Final = {
    None: None,
    b"content": "content",
    b"reasoning": "reasoning",
    b"reasoning_content": "reasoning_content",
}
