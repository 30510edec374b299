"""Coverage, rows and audit judge sampling by what the engine's logprobs mean."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.train.build import Line, conversation, make_job
from train.cli import app
from train.rows.convert import ConvertOptions, convert
from train.tokens.audit import audit

PLAIN = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0}
RAW = {"temperature": "not_applied", "truncation": "not_applied", "values": "logprobs", "source": "probe"}
SGLANG = RAW | {"temperature": "applied"}
PROCESSED = SGLANG | {"truncation": "applied"}


def sampled(meaning: dict[str, str] | None, **sent: Any) -> list[Line]:
    """Two calls, sampled plainly but for `sent`; `meaning` None: a journal from before it was recorded (vLLM)."""
    sampling = {"sent": PLAIN | sent, "session": {}, "engine_defaults": None}
    calls = conversation(2, sampling=sampling)
    for call in calls:
        del call["metadata"]["logprobs"]
        if meaning is not None:
            call["metadata"]["logprobs"] = meaning
    return calls


def explained(tmp_path: Path, calls: list[Line]) -> tuple[list[str], str]:
    """The sentences about sampling, and what a run without --explain warns of."""
    job = make_job(tmp_path / "job", [{"calls": calls}])
    lines = CliRunner().invoke(app, ["token-coverage", str(job), "--explain"]).stdout.splitlines()
    warning = CliRunner().invoke(app, ["token-coverage", str(job)]).stderr
    return [line.strip() for line in lines if "sampled with" in line], warning


@pytest.mark.parametrize("meaning", [SGLANG, PROCESSED], ids=["SGLang", "processed_logprobs"])
def test_a_temperature_that_the_logprobs_have_is_not_a_bias(tmp_path: Path, meaning: dict[str, str]) -> None:
    [text], warning = explained(tmp_path, sampled(meaning, temperature=0.7))
    assert text == (
        "2 calls sampled with temperature 0.7, which the engine's logprobs have applied: importance ratios are right "
        "for a trainer that divides its logits by 0.7 too, and biased for one that does not"
    )
    assert warning == ""


@pytest.mark.parametrize(
    ("meaning", "how"), [(RAW, "as measured"), (None, "by the engine's default")], ids=["raw", "default vLLM"]
)
def test_a_temperature_that_they_do_not_have_is_one(tmp_path: Path, meaning: Any, how: str) -> None:
    [text], warning = explained(tmp_path, sampled(meaning, temperature=0.7))
    assert f"sampled with temperature 0.7 (temperature is not in the engine's logprobs, {how}): the tokens" in text
    assert "importance ratios built on them are biased" in text
    assert "sampled with temperature 0.7: complete, but their logprobs are biased" in warning


def test_truncation_biases_everywhere_and_where_it_is_applied_the_trainer_must_cut_alike(tmp_path: Path) -> None:
    for number, meaning in enumerate((RAW, SGLANG)):
        [text], warning = explained(tmp_path / str(number), sampled(meaning, top_p=0.9))
        assert "top_p 0.9 (the cut is not in the engine's logprobs, as measured)" in text and "biased" in warning
    [text], warning = explained(tmp_path / "2", sampled(PROCESSED, top_k=20))
    assert "top_k 20 (the engine's logprobs are those after the cut: right only for a trainer that cuts alike)" in text
    assert "biased" in warning


def test_both_are_distinguished_in_one_rollout(tmp_path: Path) -> None:
    [text], warning = explained(tmp_path, sampled(SGLANG, temperature=0.7, top_p=0.9))
    first, second = text.split("; 2 calls ")
    assert "sampled with top_p 0.9" in first and "temperature" not in first.partition("; sample plainly")[0]
    assert second.startswith("sampled with temperature 0.7, which")
    assert "sampled with top_p 0.9: complete" in warning


def test_greedy_sampling_is_a_bias_on_every_engine(tmp_path: Path) -> None:
    [text], _ = explained(tmp_path, sampled(PROCESSED, temperature=0))
    assert "importance ratios built on them are biased" in text


def test_several_temperatures_of_a_rollout_are_all_named(tmp_path: Path) -> None:
    calls = sampled(SGLANG, temperature=0.7)
    calls[1]["metadata"]["sampling"] = calls[1]["metadata"]["sampling"] | {"sent": PLAIN | {"temperature": 0.5}}
    [text], _ = explained(tmp_path, calls)
    assert (
        "temperature 0.7 and 0.5" in text and "only where the trainer divides its logits by the temperature of" in text
    )


def test_replicas_that_differ_are_two_ways_of_sampling(tmp_path: Path) -> None:
    calls = sampled(SGLANG, temperature=0.7)
    calls[1]["metadata"]["logprobs"] = RAW
    job = make_job(tmp_path / "job", [{"calls": calls}])
    [row] = json.loads(CliRunner().invoke(app, ["token-coverage", str(job), "--json"]).stdout)["per_rollout"]
    assert [entry["logprobs"] for entry in row["sampling"]] == [SGLANG, RAW]
    assert [entry["biased_by"] for entry in row["sampling"]] == [[], ["temperature 0.7"]]


def test_rows_have_the_meaning_and_the_temperature_and_the_manifest_says_what_to_set(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"calls": sampled(SGLANG, temperature=0.7)}])
    made = convert(job, tmp_path / "rows.jsonl", ConvertOptions(format="trl-grpo"))
    [row] = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    for entry in json.loads(row["sampling"]):
        assert entry["logprobs"] == SGLANG and entry["sent"]["temperature"] == 0.7
    assert made.notes[0].endswith("biased for one that does not") and "divides its logits by 0.7 too" in made.notes[0]


class AtTemperature:
    """Gives the recorded logprobs of `tests.train.build` where it is asked at temperature 0.7, and others elsewhere."""

    def __call__(self, ids: Sequence[int], positions: Sequence[int], temperatures: Sequence[float]) -> list[float]:
        wrong = [0.0 if math.isclose(value, 0.7) else -1.0 for value in temperatures]
        return [-0.25 - 0.125 * (ids[at] % 4) + miss for at, miss in zip(positions, wrong, strict=True)]


def test_audit_computes_at_the_temperature_that_the_logprobs_have(tmp_path: Path) -> None:
    for meaning, beyond in ((SGLANG, 0), (RAW, 2)):
        job = make_job(tmp_path / meaning["temperature"], [{"calls": sampled(meaning, temperature=0.7)}])
        assert len(audit(job, AtTemperature()).beyond) == beyond


def test_audit_leaves_a_cut_distribution_out(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"calls": sampled(PROCESSED, temperature=0.7, top_k=3)}])
    found = audit(job, AtTemperature())
    assert (found.cut, found.calls, found.skipped) == (2, [], 0)


@pytest.mark.parametrize("value", ["warm", [0.7], {"a": 1}, "nan"])
def test_a_temperature_that_is_not_a_number_ends_nothing(tmp_path: Path, value: Any) -> None:
    [text], _ = explained(tmp_path, sampled(SGLANG, temperature=value))
    assert "importance ratios" in text
    audit(make_job(tmp_path / "other", [{"calls": sampled(SGLANG, temperature=value)}]), AtTemperature())
