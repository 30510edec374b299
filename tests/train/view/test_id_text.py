"""The text of token ids, with a tokenizer and without."""

from __future__ import annotations

from tests.train.smollm import encode, smollm
from train.view.id_text import Vocabulary


def test_a_tokenizer_gives_every_id_its_text_and_half_characters_their_bytes() -> None:
    words = Vocabulary(smollm())
    text = "naïve — 漢 👩‍🚀\n<|im_end|>"
    ids = encode(text)
    pieces = [words.text(token_id) for token_id in ids]
    assert b"".join(piece if isinstance(piece, bytes) else str(piece).encode() for piece in pieces) == text.encode()
    assert any(isinstance(piece, bytes) for piece in pieces)
    assert words.special(ids[-1], pieces[-1]) and not words.special(ids[0], pieces[0])
    assert words.text(10**9) is None


def test_without_a_tokenizer_an_id_is_what_the_engine_wrote_for_it_elsewhere() -> None:
    words = Vocabulary()
    words.learn([5, 6, 7], ["a", "\ufffd", ""])
    assert [words.text(token) for token in (5, 6, 7, 8)] == ["a", None, None, None]
