"""Characters beyond the Basic Multilingual Plane that arrive as two surrogates.

JSON may write an emoji as two escapes, and an engine or gateway may put them into two deltas of a stream. Each half
alone is no character: no UTF-8 can hold it, and strict JSON parsers (Rust's, Pydantic's) refuse it.
"""

from __future__ import annotations

import re
from typing import Final

_PAIR: Final = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_LONE: Final = re.compile("[\ud800-\udfff]")
_REPLACEMENT: Final = "\ufffd"


def join_pairs(text: str) -> str:
    """Each pair of surrogates as its character; a lone one stays."""
    return text if text.isascii() else _PAIR.sub(_joined, text)


def _joined(pair: re.Match[str]) -> str:
    return pair[0].encode("utf-16-le", "surrogatepass").decode("utf-16-le")


class SurrogateJoiner:
    """Joins the pairs of a text that comes in pieces; a lone surrogate becomes U+FFFD."""

    __slots__ = ("_half",)

    def __init__(self) -> None:
        self._half = ""

    def feed(self, piece: str) -> str:
        """The piece, without a first half at its end, which waits for the next one."""
        if piece.isascii() and not self._half:
            return piece
        text = self._half + piece
        self._half = text[-1] if "\ud800" <= text[-1:] <= "\udbff" else ""
        text = text[:-1] if self._half else text
        return _LONE.sub(_REPLACEMENT, join_pairs(text))

    def flush(self) -> str:
        """What is left at the end of the text: U+FFFD for half a pair."""
        left, self._half = self._half, ""
        return _REPLACEMENT if left else ""
