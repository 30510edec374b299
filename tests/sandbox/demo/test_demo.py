"""The demo's calls, for real: embedded engine, proxy, official client, journal. What it claims must be so."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from capture.journal.call import Call
from capture.journal.journal import JournalReader
from capture.journal.layout import JOURNAL
from proxy import ProxyThread, Settings
from sandbox.demo.captures import KINDS, calls_demo, detokenizer, token_page
from sandbox.embedded_engine import EmbeddedEngine
from tests.train.build import conversation, make_rollout


@pytest.fixture(scope="module")
def shown(engine: EmbeddedEngine, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Call]]:
    """What the demo printed, and its calls by kind."""
    folder = tmp_path_factory.mktemp("demo")
    console = Console(file=io.StringIO(), width=160)
    settings = Settings(upstream=[engine.base_url], engine="llamacpp", model=engine.model, probe=False)
    with ProxyThread(settings) as proxy:
        calls_demo(console, proxy, engine, folder)
    calls = sorted(JournalReader(folder / JOURNAL), key=lambda call: call.number)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue(), dict(zip((kind.name for kind in KINDS), calls, strict=True))


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS if kind.name != "stop string"])
def test_the_call_is_complete(shown: tuple[str, dict[str, Call]], kind: str) -> None:
    capture = shown[1][kind].capture
    assert capture is not None and capture.complete, capture and capture.unavailable
    assert capture.prompt_token_ids is not None and len(capture.prompt_token_ids) > 0
    for choice in capture.completions:
        assert choice.token_ids is not None and choice.logprobs is not None
        assert len(choice.token_ids) == len(choice.logprobs) > 0


def test_a_stop_string_is_not_claimed_complete(shown: tuple[str, dict[str, Call]]) -> None:
    """llama.cpp gives no entry for the token that completed the stop string (xllamacpp 2026.10)."""
    capture = shown[1]["stop string"].capture
    assert capture is not None and not capture.complete
    assert capture.unavailable["completion_token_ids"].detail


@pytest.mark.parametrize("kind", ["plain", "streamed"])
def test_the_ids_decode_to_what_the_agent_received(
    shown: tuple[str, dict[str, Call]], engine: EmbeddedEngine, kind: str
) -> None:
    call = shown[1][kind]
    assert call.capture is not None and call.capture.completions[0].token_ids is not None
    decoded = detokenizer(engine)(call.capture.completions[0].token_ids.tolist())
    content = call.response_body["choices"][0]["message"]["content"]
    assert content and decoded.removesuffix("<|im_end|>") == content


def test_a_stream_is_captured_as_the_same_call_without_one(shown: tuple[str, dict[str, Call]]) -> None:
    plain, streamed = (shown[1][kind].capture for kind in ("plain", "streamed"))
    assert plain is not None and streamed is not None
    assert plain.prompt_token_ids == streamed.prompt_token_ids
    assert plain.completions[0].token_ids == streamed.completions[0].token_ids


def test_both_choices_are_there(shown: tuple[str, dict[str, Call]]) -> None:
    capture = shown[1]["n=2"].capture
    assert capture is not None and [choice.index for choice in capture.completions] == [0, 1]


def test_the_tables_say_it(shown: tuple[str, dict[str, Call]]) -> None:
    text = shown[0]
    assert "What was captured" in text and "decoded by the engine" in text
    assert all(kind.name in text for kind in KINDS)


def test_the_demo_ends_with_a_page_of_its_tokens(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_rollout(tmp_path / "jobs", calls=conversation(2))
    made = token_page(tmp_path)
    assert made == tmp_path / "view.html" and made.read_text().startswith("<!doctype html>")
    assert token_page(tmp_path / "nowhere") is None
    assert "No such path" in capfd.readouterr().err
