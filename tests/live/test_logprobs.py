"""Captured logprobs are the model's own: transformers on the same weights and ids gives the same numbers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from capture.journal.journal import JournalReader
from tests.live.conftest import LiveEngine
from tests.live.test_answer_unchanged import CHAT, pair

#: Shapes whose recorded logprobs are the plain model's: a grammar masks logits before they are taken.
SHAPES = ("plain", "to its own end", "n=2", "a stop string", "tools auto", "a multi-turn tool history")
TOLERANCE = 1e-4


@pytest.mark.parametrize("name", ["vllm", "sglang"])
async def test_transformers_agrees(
    name: str, tmp_path: Path, request: pytest.FixtureRequest, record_property: pytest.RecordProperty
) -> None:
    engine: LiveEngine = request.getfixturevalue(name)
    async with pair(engine, tmp_path) as both:
        for shape in SHAPES:
            for stream in (False, True):
                body = both.body(CHAT[shape], temperature=1.0, seed=7, stream=stream)
                answer = await both.through.post("/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
        captures = [
            {
                "prompt_token_ids": call.capture.prompt_token_ids.tolist(),
                "token_ids": choice.token_ids.tolist(),
                "logprobs": choice.logprobs,
            }
            for call in JournalReader(both.journal)
            if call.capture and call.capture.prompt_token_ids
            for choice in call.capture.completions
            if choice.token_ids
        ]
    assert len(captures) >= 2 * len(SHAPES)
    done = subprocess.run(
        [engine.python, Path(__file__).with_name("recompute.py"), engine.weights],
        input=json.dumps(captures),
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    differences = json.loads(done.stdout)
    tokens = sum(len(capture["token_ids"]) for capture in captures)
    print(f"{name}: {len(captures)} choices, {tokens} tokens, largest difference {max(differences):.2e}")
    record_property("largest_difference", max(differences))
    assert max(differences) < TOLERANCE
