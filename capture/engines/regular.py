"""The chunk that most of a stream is made of, one sampled token and its text, read without being parsed as JSON.

Parsing such a chunk into objects, looking through them and writing them out again is most of what a capture costs. In a
stream of vLLM's (0.32) all of them begin with the same bytes and differ in the text, the token, the logprob and the id.
So the first is read in the general way; where taking those four parts out of its bytes leads to the very bytes that the
general way gave, the next that begin alike are read by their parts. Anything else about a chunk, and it is parsed.
"""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple

import orjson

from capture.record import CLAMPED

_OPENING: Final = b'"choices":[{"index":0,"delta":{'
#: A JSON string that is written in one way only: with the short escapes, or without any.
_STRING: Final = rb'"[^"\\]*(?:\\["\\nrtbf][^"\\]*)*"'
_PARTS: Final = re.compile(
    rb'("(content|reasoning|reasoning_content)":(' + _STRING + rb"))\},"
    rb'"logprobs":\{"content":\[\{"token":(' + _STRING + rb'),"logprob":(-?[0-9]+\.[0-9]+(?:[eE][-+]?[0-9]+)?),'
    rb'"bytes":(?:\[[0-9,]*\]|null),"top_logprobs":\[\]\}\]\},'
    rb'"finish_reason":null,"token_ids":\[(0|[1-9][0-9]{0,17})\]\}\]\}'
)
_MUTED: Final = b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}'


class Parts(NamedTuple):
    """What one regular chunk holds; `given` is what an agent gets that asked for neither logprobs nor ids."""

    field: str
    text: str
    token: str
    logprob: float
    token_id: int
    given: bytes


def opening(data: bytes) -> bytes | None:
    """The bytes with which a regular chunk and those after it begin; None where there is nothing regular about it."""
    at = data.find(_OPENING)
    return data[: at + len(_OPENING)] if at >= 0 else None


def parts(data: bytes, begins: bytes) -> Parts | None:
    """The parts of a chunk that begins with `begins`; None where it has to be parsed."""
    found = _PARTS.match(data, len(begins))
    if found is None or found.end() != len(data):
        return None
    delta, field, written, spelled, number, token_id = found.groups()
    logprob = float(number)
    if not CLAMPED < logprob < math.inf:
        return None
    try:
        text = orjson.loads(written)
        token = text if spelled == written else orjson.loads(spelled)
    except orjson.JSONDecodeError:  # no UTF-8, or a control character
        return None
    return Parts(_FIELDS[field], text, token, logprob, int(token_id), begins + delta + _MUTED)


_FIELDS: Final = {name.encode(): name for name in ("content", "reasoning", "reasoning_content")}
