"""The chunk that most of a stream is made of, one sampled token and its text, read without being parsed as JSON.

Parsing such a chunk into objects, looking through them and writing them out again is most of what a capture costs. In a
stream of vLLM's (0.32) all of them begin with the same bytes and differ in the text, the token, the logprob, the id and
the finish. So the first is read in the general way; where its beginning came out of that as it went in, the chunks that
begin alike are read by their parts. Anything else about a chunk, and it is parsed.
"""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple

import orjson

from capture.record import CLAMPED

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

    `field` is None where there is no text, which only the last chunk may lack. `finish` is None before that one.
    """

    field: str | None
    text: str
    token: str
    logprob: float
    token_id: int
    finish: str | None
    stop: str | int | None
    given: bytes


def opening(data: bytes) -> bytes | None:
    """The bytes with which a regular chunk and those after it begin; None where there is nothing regular about it."""
    at = data.find(_OPENING)
    return data[: at + len(_OPENING)] if at >= 0 else None


def parts(data: bytes, begins: bytes) -> Parts | None:
    """The parts of a chunk that begins with `begins`; None where it has to be parsed."""
    found = _PARTS.fullmatch(data, len(begins))
    if found is None:
        return None
    delta, field, written, spelled, number, ended, finish, stop, token_id = found.groups()
    logprob = float(number)
    if not CLAMPED < logprob < math.inf or (field is None and finish is None):
        return None
    try:
        text = "" if written is None else _text(written)
        token = text if spelled == written else _text(spelled)
        given = b'%b%b"logprobs":null,"finish_reason":%b,"token_ids":null}]}' % (begins, delta, ended)
        if finish is None:
            return Parts(_FIELDS[field], text, token, logprob, int(token_id), None, None, given)
        name = None if field is None else _FIELDS[field]
        return Parts(name, text, token, logprob, int(token_id), finish[1:-1].decode(), orjson.loads(stop), given)
    except (orjson.JSONDecodeError, UnicodeDecodeError):
        return None


def _text(written: bytes) -> str:
    text: str = orjson.loads(written) if b"\\" in written else written[1:-1].decode()
    return text


_FIELDS: Final = {name.encode(): name for name in ("content", "reasoning", "reasoning_content")}
