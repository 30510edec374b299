"""The text of a token as it is shown: nothing is invisible, and nothing moves what is around it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from train.view.token_text import BREAK, SYMBOL, TEXT, Part, plain, shown, widths


@given(st.text())
def test_nothing_of_a_token_is_invisible_or_moves_what_is_around_it(text: str) -> None:
    result = plain(shown(text))
    assert not any((character < " " and character != "\n") or "\u202a" <= character <= "\u202e" for character in result)
    assert result.count("\n") == text.count("\n")
    assert len(widths(shown(text))) == text.count("\n") + 1
    assert bool(result) == bool(text)


@given(st.binary(min_size=1, max_size=8))
def test_bytes_that_are_not_a_character_are_shown_as_bytes(data: bytes) -> None:
    parts = shown(data)
    bad = sum(part.text.count("⟨") for part in parts if part.kind == SYMBOL and part.text.startswith("⟨"))
    assert bad >= sum(character == "\ufffd" for character in data.decode("utf-8", "replace"))
    assert shown(b"\xe2\x9c") == [Part("⟨E2⟩⟨9C⟩", SYMBOL)]
    assert shown(b"a\xf0\x9f") == [Part("a", TEXT), Part("⟨F0⟩⟨9F⟩", SYMBOL)]


def test_a_line_end_a_tab_and_an_emoji_are_what_they_are() -> None:
    assert shown("}\n") == [Part("}", TEXT), Part("⏎", SYMBOL), Part("", BREAK)]
    assert shown("👩\u200d🚀") == [Part("👩\u200d🚀", TEXT)]
    assert widths(shown("漢字")) == [4]
    assert widths(shown("a\n\tb")) == [2, 5]
