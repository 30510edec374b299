"""`bench serve --gguf`: what does not fit an engine of the service's own is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.embedded_engine import find_weights
from sandbox.errors import EngineError, JobError
from sandbox.rollouts.model_endpoint import BASE_URL
from sandbox.service.cli import own_engine
from sandbox.service.server import listen
from tests.forked import run_command


@pytest.mark.parametrize(
    ("model", "env", "words"),
    [
        ("vllm/policy", {}, "the engine is llama.cpp"),
        ("policy", {}, "the engine is llama.cpp"),
        ("llamacpp/", {}, "the engine is llama.cpp"),
        (None, {BASE_URL: "http://127.0.0.1:1/v1"}, "--gguf starts an engine"),
    ],
)
def test_options_that_do_not_fit(model: str | None, env: dict[str, str], words: str) -> None:
    with pytest.raises(JobError, match=words):
        own_engine(find_weights(), model, env, 4)


def test_files_that_cannot_be_served(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="there is no such file"):
        own_engine(tmp_path / "none.gguf", None, {}, 4)
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    with pytest.raises(EngineError, match=r"text\.gguf"), own_engine(text, None, {}, 4):
        pass


def test_the_engine_has_the_name_that_was_given(tmp_path: Path) -> None:
    assert own_engine(find_weights(), "llamacpp/mine", {}, 4).model == "mine"
    assert own_engine(find_weights(), None, {}, 4).model == "policy"


def test_without_a_model_both_ways_to_name_one_are_given(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    run = run_command(["bench", "serve", "tasks", "-a", "mini"], cwd=tmp_path)
    assert run.returncode == 2 and "needs a model" in run.stderr and "or --gguf FILE" in run.stderr


@pytest.mark.parametrize("key", ["schlüssel", "a b", " ", "a\nb"])
def test_a_key_that_no_header_can_hold(tmp_path: Path, key: str) -> None:
    done = run_command(["bench", "serve", str(tmp_path), "-a", "oracle", "--key", key])
    assert (done.returncode, "a key must be printable ASCII without spaces" in done.stderr) == (2, True)


@pytest.mark.parametrize("host", ["a..b", "\N{LATIN SMALL LETTER U WITH DIAERESIS}" * 70])
def test_a_host_that_has_no_address(host: str) -> None:
    with pytest.raises(JobError, match="cannot listen on"):
        listen(host, 0)
