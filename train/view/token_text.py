"""How the text of one token is shown: nothing is invisible, and nothing can move the text around it.

Line ends, tabs and control characters become symbols; marks of direction, characters without a shape and bytes that are
no character are named. Widths are counted in cells of a monospaced font, so that a line can be laid out unseen.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Final, NamedTuple

TEXT: Final = 0
#: Stands for something that has no shape of its own.
SYMBOL: Final = 1
#: A line ends here.
BREAK: Final = 2


class Part(NamedTuple):
    """A piece of what is shown; `kind` is `TEXT`, `SYMBOL` or `BREAK` (then `text` is empty)."""

    text: str
    kind: int


_NAMED: Final = {
    "\r": "␍", "\xa0": "⍽", "\xad": "⟨SHY⟩", "\u061c": "⟨ALM⟩", "\u200b": "⟨ZWSP⟩", "\u200c": "⟨ZWNJ⟩",
    "\u200d": "⟨ZWJ⟩", "\u200e": "⟨LRM⟩", "\u200f": "⟨RLM⟩", "\u2028": "⟨LS⟩", "\u2029": "⟨PS⟩", "\u202a": "⟨LRE⟩",
    "\u202b": "⟨RLE⟩", "\u202c": "⟨PDF⟩", "\u202d": "⟨LRO⟩", "\u202e": "⟨RLO⟩", "\u2060": "⟨WJ⟩", "\u2066": "⟨LRI⟩",
    "\u2067": "⟨RLI⟩", "\u2068": "⟨FSI⟩", "\u2069": "⟨PDI⟩", "\ufeff": "⟨BOM⟩", "\ufffd": "�",
}  # fmt: skip
_JOINERS: Final = "\u200c\u200d"
_SHAPELESS: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def shown(token: str | bytes) -> list[Part]:
    """The parts of a token: its text, or its bytes where they are no whole characters."""
    if isinstance(token, bytes):
        return _bytes(token)
    if token.isascii() and token.isprintable():
        return [Part(token, TEXT)] if token else []
    return _text(token)


def widths(parts: Sequence[Part]) -> list[int]:
    """Width in cells of each line: one number, and one more per line end."""
    lines = [0]
    for text, kind in parts:
        if kind == BREAK:
            lines.append(0)
        else:
            lines[-1] += len(text) if text.isascii() else sum(map(_cells, text))
    return lines


def plain(parts: Sequence[Part]) -> str:
    """The parts as one string, for a terminal: `BREAK` is a line end."""
    return "".join("\n" if kind == BREAK else text for text, kind in parts)


def _bytes(token: bytes) -> list[Part]:
    parts: list[Part] = []
    at = 0
    while at < len(token):
        try:
            parts += shown(token[at:].decode("utf-8"))
            break
        except UnicodeDecodeError as error:
            if error.start:
                parts += shown(token[at : at + error.start].decode("utf-8"))
            bad = token[at + error.start : at + error.end]
            parts.append(Part("".join(f"⟨{byte:02X}⟩" for byte in bad), SYMBOL))
            at += error.end
    return parts


def _text(token: str) -> list[Part]:
    parts: list[Part] = []
    run = ""

    def symbol(text: str) -> None:
        nonlocal run
        if run:
            parts.append(Part(run, TEXT))
            run = ""
        parts.append(Part(text, SYMBOL))

    alone = all(letter in _JOINERS or "\ufe00" <= letter <= "\ufe0f" for letter in token)
    for letter in token:
        if letter == "\n":
            symbol("⏎")
            parts.append(Part("", BREAK))
        elif letter == "\t":
            symbol("⇥   ")
        elif letter in _JOINERS and not alone:  # inside an emoji or a word it joins, and is no secret
            run += letter
        elif letter in _NAMED:
            symbol(_NAMED[letter])
        elif letter < " ":
            symbol(chr(0x2400 + ord(letter)))
        elif letter == "\x7f":
            symbol("␡")
        elif unicodedata.category(letter) in _SHAPELESS or alone:
            symbol(f"⟨U+{ord(letter):04X}⟩")
        elif not run and unicodedata.combining(letter):  # it would sit on the token before
            symbol("◌")
            run += letter
        else:
            run += letter
    if run:
        parts.append(Part(run, TEXT))
    return parts


def _cells(letter: str) -> int:
    if unicodedata.combining(letter) or letter in _JOINERS or "\ufe00" <= letter <= "\ufe0f":
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1
