"""What is printed for people: texts that agents, engines and task folders wrote must not steer the terminal.

Imports nothing but the standard library: the error edge uses it.
"""

from __future__ import annotations

import sys


def printable(text: str) -> str:
    """`text` on one line: control characters, direction marks and surrogates are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def echo(sentence: str, *, err: bool = False) -> None:
    """Prints a sentence as one line."""
    print(printable(sentence), file=sys.stderr if err else sys.stdout)
