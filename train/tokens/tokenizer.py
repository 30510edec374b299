"""Token ids as text for reports, from a folder with a `tokenizer.json` (or that file itself), offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from capture.breaks.breaks import TokenDecoder
from train.errors import BadInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_decoder(path: Path) -> TokenDecoder:
    """The decoder of a model's folder. Raises `BadInput`."""
    return decoder_of(load_tokenizer(path))


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model's folder, or of the file itself. Raises `BadInput`."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise BadInput(
            f"--tokenizer {path}: no tokenizer.json there; give a model's folder, such as transformers' "
            "save_pretrained makes"
        )
    from tokenizers import Tokenizer  # only where a tokenizer is given

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise BadInput(f"--tokenizer {path}: cannot be read ({error})") from error


def decoder_of(tokenizer: Tokenizer) -> TokenDecoder:
    """Ids beyond the vocabulary become `<id 123>`: a wrong tokenizer must be seen, not hidden."""
    special = {token_id for token_id, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    size = tokenizer.get_vocab_size(with_added_tokens=True)

    def text(ids: Sequence[int]) -> str:
        if all(token_id < size for token_id in ids):
            return str(tokenizer.decode(list(ids), skip_special_tokens=False))
        return "".join(
            str(tokenizer.decode([token_id], skip_special_tokens=False)) if token_id < size else f"<id {token_id}>"
            for token_id in ids
        )

    return TokenDecoder(text, special.__contains__)
