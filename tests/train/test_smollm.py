"""The tests' tokenizer is the model's: what it encodes, llama.cpp encodes the same."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from sandbox.embedded_engine import EmbeddedEngine
from tests.train.labelled_breaks import ANSWER, OTHER, SYSTEM, TOOLS, render
from tests.train.smollm import encode, smollm

TEXTS = {
    "words": ANSWER,
    "a rendered prompt": render([SYSTEM, OTHER], TOOLS),
    "numbers": "1,024 and 3.14159 are 2 numbers; 007 is a name",
    "accents and more": "Le café — «été» — 日本語 🦊\t\n\n  x",
    "code": Path(__file__).read_text(encoding="utf-8"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_llama_cpp_encodes_the_same(engine: EmbeddedEngine, name: str) -> None:
    address = engine.base_url.removesuffix("/v1") + "/tokenize"
    body = json.dumps({"content": TEXTS[name], "add_special": False, "parse_special": True}).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert encode(TEXTS[name]) == json.load(answer)["tokens"]


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_encoded_decodes_to_itself(name: str) -> None:
    assert smollm().decode(encode(TEXTS[name]), skip_special_tokens=False) == TEXTS[name]
