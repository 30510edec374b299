"""Token ids, kept as the compact JSON text they came in until numbers are needed.

A prompt of 100,000 ids is copied from the engine's answer to the journal, and compared with the call before it,
without being parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, overload

import orjson

from capture.errors import RecordError

_DIGITS: Final = b"0123456789"
#: Nothing between two commas, or a number like 007, which is not JSON.
_NO_NUMBER: Final = re.compile(rb",(?:,|0[0-9])")
#: A number of this many digits may be beyond 63 bits. It is searched for after every digit became a 0: a pattern takes
#: ten times as long.
_ALL_ZEROS: Final = bytes.maketrans(_DIGITS, b"0" * 10)
_MANY_DIGITS: Final = b"0" * 19
_SPACE: Final = b" \t\r\n"


class Ids(Sequence[int]):
    """Token ids: non-negative ints, kept as compact JSON text (`b"1,2,3"`), parsed when a number is asked for."""

    __slots__ = ("_count", "_list", "text")

    def __init__(self, text: bytes, values: list[int] | None = None) -> None:
        """`text` must be what `Ids.of` or `Ids.parse` would have made; use those."""
        self.text = text
        self._list = values
        self._count = len(values) if values is not None else -1

    @classmethod
    def of(cls, values: Iterable[int]) -> Ids:
        """Ids from ints; raises `RecordError` for a bool, a float or a negative number."""
        ids = list(values)
        text = _text_of(ids)
        if text is None:
            wrong = next(value for value in ids if not are_ids([value]))
            raise RecordError(f"a token id must be a non-negative integer, not {wrong!r}")
        return cls(text, ids)

    @classmethod
    def parse(cls, array: bytes, before: Ids | None = None) -> Ids | None:
        """Ids from the bytes of a JSON array, or None when it holds anything but non-negative ints.

        Checked with a few passes at C speed: 100,000 ids take a millisecond or two. Where they continue those of
        `before`, only the rest is checked.
        """
        if array[:1] != b"[" or array[-1:] != b"]":
            return None
        text = array[1:-1]
        ids = None if before is None else cls.going_on(text, before)
        return cls.parse_text(text) if ids is None else ids

    @classmethod
    def going_on(cls, text: bytes, before: Ids) -> Ids | None:
        """`parse_text` of a text that starts with the ids of `before`, at the cost of the new ids only; None where it
        does not.
        """
        end = len(before.text)
        if not end or not text.startswith(before.text):  # nothing follows no ids: `,0` is not an array
            return None
        if len(text) == end:
            return before
        # The text must continue with a whole id: `1,2` does not begin `1,23`.
        rest = cls.parse_text(text[end + 1 :]) if text[end : end + 1] == b"," else None
        if not rest or len(rest.text) != len(text) - end - 1:
            return None
        ids = cls(text)
        ids._count = len(before) + len(rest)
        return ids

    @classmethod
    def parse_text(cls, text: bytes) -> Ids | None:
        """`parse` of the text between the brackets."""
        bones = text.translate(None, _DIGITS)
        if bones != b"," * len(bones):
            # Spaces between the numbers are JSON too; anything else is not ids. "1 2" must not become "12".
            if bones.translate(None, b"," + _SPACE):
                return None
            return cls.from_json(_loads_or_none(b"[" + text + b"]"))
        if not text:
            return cls(b"", [])
        if text[:1] == b"," or text[-1:] == b"," or _NO_NUMBER.search(text):
            return None
        if text[:1] == b"0" and text[1:2].isdigit():
            return None
        if _MANY_DIGITS in text.translate(_ALL_ZEROS):
            return cls.from_json(_loads_or_none(b"[" + text + b"]"))
        ids = cls(text)
        ids._count = len(bones) + 1
        return ids

    @classmethod
    def from_json(cls, value: object) -> Ids | None:
        """Ids from a parsed JSON value, or None when it is no list of non-negative ints (an empty list is)."""
        if not isinstance(value, list):
            return None
        text = _text_of(value)
        return None if text is None else cls(text, value)

    def bare(self) -> Ids:
        """The same ids without the parsed numbers: for long-lived references."""
        ids = Ids(self.text)
        ids._count = len(self)
        return ids

    def tolist(self) -> list[int]:
        if self._list is None:
            self._list = orjson.loads(b"[" + self.text + b"]")
        return self._list

    def json(self) -> orjson.Fragment:
        """For `orjson.dumps`: the array, spliced in as text."""
        return orjson.Fragment(b"[" + self.text + b"]")

    def startswith(self, other: Ids) -> bool:
        """Whether these ids start with those of `other`; a memory comparison, no parsing."""
        if not other.text:
            return True
        if not self.text.startswith(other.text):
            return False
        end = len(other.text)
        return len(self.text) == end or self.text[end : end + 1] == b","

    def after(self, before: Ids) -> Ids:
        """The ids after `before`, with which these must start. Cut as text, nothing is parsed."""
        return self if not before.text else Ids(self.text[len(before.text) + 1 :])

    def common(self, other: Ids) -> int:
        """How many leading ids these and `other` have in common."""
        ours, theirs = self.text, other.text
        low, high = 0, min(len(ours), len(theirs))
        while low < high:  # halving: each step is one memory comparison
            middle = (low + high + 1) // 2
            if ours[low:middle] == theirs[low:middle]:
                low = middle
            else:
                high = middle - 1
        if not low:
            return 0
        whole = all(len(text) == low or text[low : low + 1] == b"," for text in (ours, theirs))
        return ours.count(b",", 0, low) + (1 if whole and ours[low - 1 : low] != b"," else 0)

    def __add__(self, other: Ids) -> Ids:
        if not self.text or not other.text:
            return other if not self.text else self
        return Ids(self.text + b"," + other.text)

    def __len__(self) -> int:
        if self._count < 0:
            self._count = self.text.count(b",") + 1 if self.text else 0
        return self._count

    def __bool__(self) -> bool:
        return bool(self.text)

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self.tolist()[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ids):
            return self.text == other.text
        return isinstance(other, list) and self.tolist() == other

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Ids({len(self)}: {self.text[:40].decode()}{'…' if len(self.text) > 40 else ''})"


def _loads_or_none(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None


def are_ids(values: list[Any]) -> bool:
    """Whether each is an int that can be a token id; True for no values."""
    return _text_of(values) is not None


def _text_of(values: list[Any]) -> bytes | None:
    """Ids as compact JSON; None where one is not an id. Written at C speed; what is not an id shows in the text."""
    try:
        text = orjson.dumps(values)[1:-1]
    except TypeError:  # beyond 64 bits
        return None
    if text.translate(None, b"," + _DIGITS) or (values and max(values) >= 2**63):
        return None
    return text
