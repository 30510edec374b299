"""Reads the most common chunk of a stream, one sampled token and its text, without parsing it as JSON.

Parsing such a chunk into objects, looking through them and writing them out again is most of what a capture costs. In a
stream of vLLM's (0.32) all of them begin with the same bytes and differ in the text, the token, the logprob, the id and
the finish. So the first is read in the general way; where its beginning came out of that as it went in, the chunks that
begin alike are read by their parts. Anything else about a chunk, and it is parsed.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import orjson

from capture.record import is_logprob

#: Keys that must be null where nobody asked, for `Parts.given` to be what an agent gets.
MUTED: Final = frozenset(("logprobs", "token_ids"))

_OPENING: Final = b'"choices":[{"index":0,"delta":{'
#: A JSON string that is written in one way only: with the short escapes, or without any.
_STRING: Final = rb'"[^"\\\x00-\x1f]*(?:\\["\\nrtbf][^"\\\x00-\x1f]*)*"'
_PARTS: Final = re.compile(
    rb'((?:"(content|reasoning|reasoning_content)":(' + _STRING + rb"))?\},)"
    # A token spelled as its id has to be looked at.
    rb'"logprobs":\{"content":\[\{"token":(?!"token_id:)(' + _STRING + rb"),"
    rb'"logprob":(-?[0-9]+\.[0-9]+(?:[eE][-+]?[0-9]+)?),"bytes":(?:\[[0-9,]*\]|null),"top_logprobs":\[\]\}\]\},'
    rb'"finish_reason":(null|("[a-z_]+"),"stop_reason":(null|0|[1-9][0-9]{0,17}|' + _STRING + rb")),"
    rb'"token_ids":\[(0|[1-9][0-9]{0,17})\]\}\]\}'
)


class Parts(NamedTuple):
    """What one regular chunk holds; `given` is what an agent gets that asked for neither logprobs nor ids.

    `field` is None where there is no text, as while a parser holds it back: nobody would have got such a chunk, unless
    it is the last. `finish` is None before that one.
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
    """The bytes with which a regular chunk and those after it begin; None where there is nothing regular about it."""
    at = data.find(_OPENING)
    return data[: at + len(_OPENING)] if at >= 0 else None


def parts(data: bytes, begins: bytes) -> Parts | None:
    """The parts of a chunk that begins with `begins`; None where it has to be parsed."""
    found = _PARTS.fullmatch(data, len(begins))
    if found is None:
        return None
    delta, field, text, token, logprob, ended, finish, stop, token_id = found.groups()
    written = text or b'""', token, logprob, token_id, finish or b"null", stop or b"null"
    try:
        text, token, logprob, token_id, finish, stop = orjson.loads(b"[%b,%b,%b,%b,%b,%b]" % written)
    except orjson.JSONDecodeError:  # no UTF-8, or a number that is written like none
        return None
    if not is_logprob(logprob):
        return None
    given = None
    if field is not None or finish is not None:
        given = b'%b%b"logprobs":null,"finish_reason":%b,"token_ids":null}]}' % (begins, delta, ended)
    return Parts(_FIELDS[field], text, token, logprob, token_id, finish, stop, given)


_FIELDS: Final = {
    None: None,
    b"content": "content",
    b"reasoning": "reasoning",
    b"reasoning_content": "reasoning_content",
}
