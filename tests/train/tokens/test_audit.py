"""`bench train audit` with a named double of the model; `tests/live` holds it to the real one."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.train.build import broken, conversation, make_job
from train.cli import app
from train.commands import audit as audit_command
from train.errors import BadInput
from train.tokens.audit import audit, load_score


class FakeModel:
    """Gives each id the logprob that `tests.train.build` recorded for it, but for those in `wrong`."""

    def __init__(self, wrong: dict[int, float] | None = None) -> None:
        self.wrong = wrong or {}
        self.asked: list[tuple[int, list[int]]] = []

    def __call__(self, ids: Sequence[int], positions: Sequence[int], temperatures: Sequence[float]) -> list[float]:
        self.temperatures = list(temperatures)
        self.asked.append((len(ids), list(positions)))
        return [-0.25 - 0.125 * (ids[at] % 4) + self.wrong.get(ids[at], 0.0) for at in positions]


def test_a_sequence_is_computed_in_one_pass_at_its_sampled_positions_only(tmp_path: Path) -> None:
    model = FakeModel()
    found = audit(make_job(tmp_path / "job", [{"calls": conversation(3)}]), model)
    assert model.asked == [(12 + 4 + 3 + 4 + 3 + 4, [12, 13, 14, 15, 19, 20, 21, 22, 26, 27, 28, 29])]
    assert (len(found.calls), found.tokens, found.largest, found.beyond) == (3, 12, 0.0, [])
    assert found.histogram[0] == 12


def test_the_call_and_the_token_that_differ_are_named(tmp_path: Path) -> None:
    found = audit(make_job(tmp_path / "job", [{"calls": conversation(2)}]), FakeModel({1112: 0.5}), tolerance=0.01)
    (difference,) = found.beyond
    assert (difference.call, difference.at, difference.token_id, difference.tokens) == (1, 2, 1112, 4)
    assert difference.largest == pytest.approx(0.5) and difference.mean == pytest.approx(0.125)
    assert found.mean == pytest.approx(0.5 / 8)


def test_nan_is_beyond_any_tolerance(tmp_path: Path) -> None:
    found = audit(make_job(tmp_path / "job", [{"calls": conversation(1)}]), FakeModel({1101: math.nan}), tolerance=99)
    assert [call.at for call in found.beyond] == [1]


def test_segments_of_a_broken_rollout_are_compared_too(tmp_path: Path) -> None:
    found = audit(make_job(tmp_path / "job", [{"calls": broken(2)}]), FakeModel())
    assert len(found.calls) == 2 and not found.beyond


def test_the_limit_counts_calls(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", [{"calls": conversation(3)}, {"calls": conversation(3)}])
    assert len(audit(job, FakeModel(), limit=4).calls) == 4


def test_the_command_prints_differences_and_exits_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(tmp_path / "job", [{"name": "a__1", "calls": conversation(2)}])
    monkeypatch.setattr(audit_command, "load_score", lambda model: FakeModel({1112: 0.5}))
    done = CliRunner().invoke(app, ["audit", str(job), "--model", "m"])
    assert done.exit_code == 1
    assert "2 calls, 8 sampled tokens: largest difference 0.5, mean 0.062" in done.stdout
    assert "1 of 2 calls are beyond the tolerance of 0.001" in done.stdout
    assert "a__1 call 1 (line 1): 0.5 at sampled token 2 (id 1112)" in done.stdout
    assert "importance ratios" in done.stdout, "sampling that is not plain is reported"
    result = json.loads(CliRunner().invoke(app, ["audit", str(job), "--model", "m", "--json"]).stdout)
    assert (result["calls"], result["tokens"], len(result["beyond"]), result["sampling"][0][:4]) == (2, 8, 1, "a__1")
    monkeypatch.setattr(audit_command, "load_score", lambda model: FakeModel())
    assert CliRunner().invoke(app, ["audit", str(job), "--model", "m"]).exit_code == 0


def test_a_missing_extra_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.delitem(__import__("sys").modules, "torch", raising=False)
    with pytest.raises(BadInput, match=r"requires the benchflow trl extra .*pip install"):
        load_score(tmp_path)
