"""Which captured logprobs a trainer may build ratios on, given the temperature by which it divides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.train.build import make_job
from tests.train.tokens.test_logprob_meaning import PLAIN, PROCESSED, RAW, SGLANG, sampled
from train.api import stream_rollouts
from train.tokens.ratio import ratio_ready

UNKNOWN = {"temperature": "unknown", "truncation": "unknown", "values": "unknown", "source": "unknown"}


def call(meaning: dict[str, str] | None, not_plain: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """A captured call of a record, sampled plainly but for `sent`."""
    sent = PLAIN | more.pop("sent", {})
    temperature = sent["temperature"]
    words = [] if temperature in (None, 1) else [f"temperature {temperature:g}"]
    row = {"index": 3, "provider": "vllm", "sampling": {"sent": sent}, "not_plain": words + (not_plain or []), **more}
    return row if meaning is None else row | {"logprobs": meaning}


@pytest.mark.parametrize("meaning", [RAW, SGLANG, PROCESSED, UNKNOWN, None])
def test_plain_sampling_is_ready_on_every_engine(meaning: dict[str, str] | None) -> None:
    assert ratio_ready(call(meaning), 1.0) is None


def test_a_temperature_is_ready_where_it_is_applied_and_the_trainer_divides_by_it() -> None:
    warm = {"temperature": 0.7}
    assert ratio_ready(call(SGLANG, sent=warm), 0.7) is None
    assert ratio_ready(call(PROCESSED, sent=warm), 0.7) is None
    for meaning, how in ((RAW, "as measured"), (None, "by its engine's default")):
        sentence = ratio_ready(call(meaning, sent=warm), 0.7)
        assert sentence is not None and f"its logprobs are those at temperature 1 ({how})" in sentence
        assert "--logprobs-mode processed_logprobs" in sentence
    assert "is not known" in str(ratio_ready(call(UNKNOWN, sent=warm), 0.7))
    for meaning in (RAW, SGLANG, PROCESSED):
        sentence = ratio_ready(call(meaning, sent=warm), 1.0)
        assert (
            sentence is not None and "sampled at temperature 0.7, and the trainer divides its logits by 1;" in sentence
        )


def test_an_unknown_temperature_is_not_ready() -> None:
    sentence = ratio_ready(call(SGLANG, ["temperature unknown"], sent={"temperature": None}), 1.0)
    assert sentence is not None and sentence.endswith("send temperature 1")
    known = call(SGLANG, sent={"temperature": None})
    known["sampling"]["engine_defaults"] = {"temperature": 1.0}
    assert ratio_ready(known, 1.0) is None


@pytest.mark.parametrize("meaning", [RAW, SGLANG, PROCESSED])
@pytest.mark.parametrize("word", ["top_p 0.9", "repetition_penalty 1.1", "a grammar (response_format json_schema)"])
def test_what_the_trainer_does_not_do_is_not_ready(meaning: dict[str, str], word: str) -> None:
    assert f"sampled with {word}" in str(ratio_ready(call(meaning, [word]), 1.0))


def test_truncation_that_the_engine_may_do_by_default_is_not_ready() -> None:
    sentence = ratio_ready(call(RAW, ["top_p unknown", "top_k unknown"]), 1.0)
    assert sentence is not None and sentence.startswith("the engine's own top_p, top_k may have cut")


def test_the_tool_grammar_of_llamacpp_is_after_its_logprobs() -> None:
    grammar = ["llama.cpp's tool grammar"]
    assert ratio_ready(call(RAW, grammar, provider="llamacpp"), 1.0) is None
    assert ratio_ready(call(RAW, grammar, provider="vllm"), 1.0) is not None


def test_logits_are_not_ready() -> None:
    assert "logits" in str(ratio_ready(call(RAW | {"values": "logits"}), 1.0))


def test_a_record_is_as_ready_as_the_calls_that_are_trained(tmp_path: Path) -> None:
    calls = sampled(SGLANG, temperature=0.7)
    title = sampled(SGLANG, temperature=0)[0]
    title["metadata"] |= {"call": 2, "call_purpose": "title"}
    title["request"]["body"]["messages"] = [{"role": "user", "content": "Another conversation: give it a title."}]
    title["metadata"]["token_capture"]["prompt_token_ids"] = [900, 901]
    [record] = stream_rollouts(make_job(tmp_path / "job", [{"calls": [*calls, title]}]))
    assert ratio_ready(record, 0.7) is None
    assert str(ratio_ready(record, 1.0)).startswith("call 0: it was sampled at temperature 0.7")
