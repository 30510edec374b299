"""Fixtures of the trainer side's tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.smollm import smollm

#: The template that our engines are started with, so that renderings and captured ids compare.
TEMPLATE = Path(__file__).parents[2] / "sandbox/tools_template.jinja"


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's tokenizer as a folder that `transformers` reads: tokenizer.json, its configuration, a chat template."""
    folder = tmp_path_factory.mktemp("smollm2")
    smollm().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text(encoding="utf-8"))
    return folder
