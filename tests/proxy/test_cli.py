"""`bench proxy` and `python -m proxy`: the start line, options and their variables, errors of one sentence."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner

import proxy.cli
import proxy.workers.supervisor
from proxy import Settings
from tests.forked import run_command
from tests.proxy.fake_engine import FakeEngine, replays

ROOT = Path(__file__).parents[2]
COMMANDS = [[sys.executable, "-m", "proxy"], [sys.executable, "-m", "bench", "proxy"]]

#: Each option: what is given, the setting it makes, and its value there.
OPTIONS: dict[str, tuple[str, str, Any]] = {
    "--upstream": ("http://127.0.0.1:1/v1 http://127.0.0.1:2/v1", "upstream",
                   ["http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"]),
    "--upstream-key": ("sk-1", "upstream_key", "sk-1"), "--out": ("elsewhere", "out", Path("elsewhere")),
    "--host": ("127.0.0.2", "host", "127.0.0.2"), "--port": ("8123", "port", 8123), "--key": ("sk-2", "key", "sk-2"),
    "--engine": ("vllm", "engine", "vllm"), "--model": ("m", "model", "m"), "--probe": ("0", "probe", False),
    "--buffered": ("1", "buffered", True), "--fsync": ("1", "fsync", True),
    "--token-in": ("require", "token_in", "require"),
    "--policy-version": ("step-1", "policy_version", "step-1"),
    "--sampling": ('{"temperature": 1.0}', "sampling", {"temperature": 1.0}),
    "--force-sampling": ('{"top_k": -1}', "force_sampling", {"top_k": -1}),
    "--max-output-tokens": ("512", "max_output_tokens", 512), "--grammars": ("refuse", "grammars", "refuse"),
    "--max-calls": ("9", "max_calls", 9), "--max-sampled-tokens": ("99", "max_sampled_tokens", 99),
    "--max-seconds": ("1.5", "max_seconds", 1.5), "--purpose": ("eval", "purpose", "eval"),
    "--admin-host": ("127.0.0.3", "admin_host", "127.0.0.3"), "--admin-port": ("8124", "admin_port", 8124),
    "--admin-key": ("sk-3", "admin_key", "sk-3"), "--max-body-mb": ("7", "max_body_mb", 7),
    "--session-idle": ("0.5", "session_idle", 0.5), "--history-mb": ("9", "history_mb", 9),
    "--connect-timeout": ("1.5", "connect_timeout", 1.5), "--first-byte-timeout": ("2.5", "first_byte_timeout", 2.5),
    "--idle-timeout": ("3.5", "idle_timeout", 3.5), "--grace": ("4.5", "grace", 4.5),
    "--forward-header": ("x-a,x-b", "forward_header", ["x-a", "x-b"]), "--workers": ("3", "workers", 3),
}  # fmt: skip
FLAGS = {"--probe": "--no-probe", "--buffered": "--buffered", "--fsync": "--fsync"}


@pytest.fixture
def settings_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The settings that the command makes of arguments and environment, without starting."""
    made: list[Settings] = []

    async def serve(settings: Settings) -> None:
        made.append(settings)

    def start(settings: Settings) -> int:
        made.append(settings)
        return 0

    monkeypatch.setattr(proxy.cli, "_serve", serve)
    monkeypatch.setattr(proxy.workers.supervisor, "start", start)

    def run(*arguments: str, **environment: str) -> Settings:
        result = CliRunner().invoke(proxy.cli.app, [*arguments], env=environment)
        assert result.exit_code == 0, result.output
        return made[-1]

    return run


def test_every_option_is_in_the_table() -> None:
    command = typer.main.get_command(proxy.cli.app)
    options = {parameter.opts[0]: parameter for parameter in command.params if parameter.param_type_name == "option"}
    options = {name: option for name, option in options.items() if "completion" not in name and name != "--help"}
    assert set(options) == set(OPTIONS)
    for name, option in options.items():
        assert option.envvar == "CAPTURE_" + name[2:].upper().replace("-", "_")


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_and_its_variable_make_the_same_setting(settings_of: Any, name: str) -> None:
    text, setting, value = OPTIONS[name]
    default = getattr(settings_of(), setting)
    arguments = [FLAGS[name]] if name in FLAGS else [name, text]
    assert default != value
    assert getattr(settings_of(*arguments), setting) == value
    assert getattr(settings_of(**{"CAPTURE_" + name[2:].upper().replace("-", "_"): text}), setting) == value


def test_several_upstreams_are_options_or_words_of_one_variable(settings_of: Any) -> None:
    first, second = "http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"
    assert settings_of("--upstream", first, "--upstream", second).upstream == [first, second]
    assert settings_of(CAPTURE_UPSTREAM=f"{first},{second}").upstream == [first, second]


@pytest.mark.parametrize(("value", "capture"), [("1", True), ("0", False), ("auto", True), ("off", False), ("", True)])
def test_the_capture_variable_turns_capture_on_and_off(settings_of: Any, value: str, capture: bool) -> None:
    assert settings_of(BENCHFLOW_CAPTURE_TOKEN_LOGPROBS=value).capture is capture
    assert settings_of(BENCHFLOW_CAPTURE_TOP_LOGPROBS="5").top_logprobs == 5


UP = ("--upstream", "http://127.0.0.1:1/v1")


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ((), {}, "--upstream is missing"),
        ((*UP, "--token-in", "on"), {}, "--token-in must be one of off, auto, require"),
        ((*UP, "--token-in", "auto"), {"BENCHFLOW_CAPTURE_TOKEN_LOGPROBS": "0"}, "--token-in needs the captured ids"),
        (("--upstream", "localhost:8000"), {}, "not an http address"),
        (("--upstream", "http://[::1"), {}, "is no address"),
        (("--upstream", "http://a b/v1"), {}, "impossible port|no address|not an http address"),
        (("--upstream", "http://h:99999/v1"), {}, "impossible port"),
        ((*UP, "--host", "0.0.0.0"), {}, "without a key"),
        ((*UP, "--host", "no.such.host.invalid", "--key", "k"), {}, "cannot listen"),
        ((*UP, "--host", "a..b", "--key", "k"), {}, "cannot listen"),
        ((*UP, "--port", "99999"), {}, "cannot listen.*a port is 0 to 65535; give another --port"),
        ((*UP, "--admin-port", "99999", "--port", "0"), {}, "cannot listen.*--admin-port"),
        ((*UP, "--engine", "vlm"), {}, "--engine must be one of"),
        ((*UP, "--sampling", "{"), {}, "--sampling is not JSON"),
        ((*UP, "--sampling", "[]"), {}, "must be a JSON object"),
        ((*UP, "--sampling", '{"temprature": 1}'), {}, "--sampling temprature: .*did you mean temperature"),
        ((*UP, "--upstream-key", "two words"), {}, "printable"),
        ((*UP, "--max-body-mb", "0"), {}, "--max-body-mb"),
        ((*UP, "--idle-timeout", "0"), {}, "--idle-timeout"),
        ((*UP, "--grace", "nan"), {}, "--grace"),
        ((*UP, "--forward-header", "x y:z"), {}, "--forward-header 'y:z' is no header's name"),
        ((*UP, "--forward-header", "Authorization"), {}, "sets this header itself"),
        (UP, {"BENCHFLOW_CAPTURE_TOKEN_LOGPROBS": "maybe"}, "must be 1 or 0"),
        (UP, {"BENCHFLOW_CAPTURE_TOP_LOGPROBS": "²"}, "must be a whole number"),
        (UP, {"BENCHFLOW_CAPTURE_TOP_LOGPROBS": "9999"}, "BENCHFLOW_CAPTURE_TOP_LOGPROBS must be between"),
        ((*UP, "--out", "/proc/nowhere", "--port", "0"), {}, "cannot open the journal .*give a folder"),
    ],
)
def test_an_error_is_one_sentence_and_exit_2(
    tmp_path: Path, arguments: tuple[str, ...], environment: dict[str, str], words: str
) -> None:
    if "--out" not in arguments:
        arguments = (*arguments, "--out", str(tmp_path))
    done = run_command(["proxy", *arguments, "--no-probe"], env=environment)
    assert done.returncode == 2 and done.stdout == ""
    assert re.search(words, done.stderr), done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("proxy: ")


@pytest.mark.parametrize("command", COMMANDS, ids=["python -m proxy", "bench proxy"])
def test_a_taken_port_is_exit_2(tmp_path: Path, command: list[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [*command, *UP, "--port", port, "--out", str(tmp_path), "--no-probe"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT)
    assert done.returncode == 2 and f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", COMMANDS, ids=["python -m proxy", "bench proxy"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_starts_says_where_it_is_serves_and_stops_with_0(
    tmp_path: Path, command: list[str], number: signal.Signals
) -> None:
    async with FakeEngine(replays("vllm/chat-plain-length-stream")) as engine:
        child = await asyncio.create_subprocess_exec(
            *command, "--upstream", engine.url, "--upstream-key", "sk-engine-key-0", "--out", str(tmp_path / "out"),
            "--port", "0", "--admin-port", "0", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )  # fmt: skip
        assert child.stderr is not None
        log = ""
        async with asyncio.timeout(20):
            while "probe:" not in log or "admin:" not in log:
                log += (await child.stderr.readline()).decode()
        agents = re.search(r"agents: (http://127\.0\.0\.1:\d+/v1)", log)
        admin = re.search(r"admin: (\S+) \(key (\S+)\)", log)
        assert agents and admin
        async with httpx.AsyncClient() as client:
            got = await client.post(agents[1] + "/chat/completions", json={"messages": [], "stream": True})
            metrics = await client.get(admin[1] + "/metrics", headers={"authorization": f"Bearer {admin[2]}"})
        assert got.content.endswith(b"data: [DONE]\n\n") and metrics.status_code == 200
        child.send_signal(number)
        out, rest = await asyncio.wait_for(child.communicate(), 20)
        log += rest.decode()
    journal = tmp_path / "out/default/trajectory/llm_trajectory.jsonl"
    assert child.returncode == 0 and out == b""
    assert f"journal: {journal}" in log and "stopped: 1 calls recorded, 1 complete" in log
    assert "vllm 0.32.0: prompt ids, sampled ids and one logprob per id come back" in log
    assert "Traceback" not in log and "sk-engine-key-0" not in log and f":{engine.port}" not in log
    assert len(journal.read_bytes().splitlines()) == 1
