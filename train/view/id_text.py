"""The text of token ids: from a tokenizer's folder, else as the engine wrote the same id where it was sampled."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from train.tokens.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPECIAL = re.compile(r"<\|[^|<>]+\|>|</?s>|<(?:bos|eos|pad|unk|start_of_turn|end_of_turn)>")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Vocabulary:
    """Texts of ids. Without a tokenizer it learns them from sampled ids: an id has the same text everywhere."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer = tokenizer
        self._learned: dict[int, str] = {}
        if tokenizer is not None:
            self._size = tokenizer.get_vocab_size(with_added_tokens=True)
            self._added = tokenizer.get_added_tokens_decoder()
            self._byte_level = "ByteLevel" in repr(tokenizer.decoder)
            self._of = lru_cache(maxsize=1 << 17)(self._read)

    @classmethod
    def load(cls, folder: Path | None) -> Vocabulary:
        """Raises `BadInput`."""
        return cls(None if folder is None else load_tokenizer(folder))

    @property
    def whole(self) -> bool:
        """Whether every id has a text."""
        return self.tokenizer is not None

    def learn(self, ids: Iterable[int], tokens: Iterable[str]) -> None:
        """What the engine wrote for sampled ids. Half a character is written as U+FFFD, which says nothing of an id."""
        if self.tokenizer is None:
            self._learned.update(
                (token_id, text) for token_id, text in zip(ids, tokens, strict=False) if text and "\ufffd" not in text
            )

    def text(self, token: int) -> str | bytes | None:
        """The text of an id; its bytes where they are not whole characters; None where it is unknown."""
        return self._learned.get(token) if self.tokenizer is None else self._of(token)

    def special(self, token: int | None, text: str | bytes | None) -> bool:
        """Whether the id is a special token; without a tokenizer, whether its text looks like one."""
        if self.tokenizer is not None and token is not None:
            added = self._added.get(token)
            return added is not None and bool(added.special)
        return isinstance(text, str) and _SPECIAL.fullmatch(text) is not None

    def _read(self, token: int) -> str | bytes | None:
        assert self.tokenizer is not None
        if token >= self._size:
            return None
        added = self._added.get(token)
        piece = added.content if added is not None else self.tokenizer.id_to_token(token)
        if piece is None:
            return None
        if added is not None:
            return str(piece)
        if self._byte_level:
            return _whole(bytes(_BYTES[char] for char in piece)) if all(char in _BYTES for char in piece) else piece
        if (found := _BYTE.fullmatch(piece)) is not None:
            return _whole(bytes([int(found[1], 16)]))
        return str(piece).replace("▁", " ")


def _whole(data: bytes) -> str | bytes:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others come in order from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in own}
    letters |= {chr(0x100 + at): byte for at, byte in enumerate(byte for byte in range(256) if byte not in set(own))}
    return letters


_BYTES = _byte_alphabet()
