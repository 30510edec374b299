"""The engine's arguments in compose.yaml, read by real vLLM's own argument parser."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
VLLM = Path.home() / ".cache/capture-vllm/venv/bin/python"
PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(json.loads(sys.argv[1]))
validate_parsed_serve_args(arguments)
print(json.dumps([arguments.model_tag, arguments.served_model_name, arguments.max_model_len, arguments.dtype,
                  arguments.tool_call_parser, arguments.enable_auto_tool_choice, arguments.api_key]))
"""


def parsed(command: list[str]) -> subprocess.CompletedProcess[str]:
    if not VLLM.exists():
        pytest.fail(f"{VLLM} is missing: `make live` installs it (about 3 GB, once)")
    return subprocess.run([VLLM, "-c", PARSE, json.dumps(command)], capture_output=True, text=True, timeout=280)


def engine_command() -> list[str]:
    """The command with each `${NAME:-default}` as its default."""
    command = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["vllm"]["command"]
    return [
        part.removeprefix("${").partition(":-")[2].removesuffix("}") if part[:2] == "${" else part for part in command
    ]


def test_vllms_own_parser_accepts_the_engines_arguments() -> None:
    answer = parsed(engine_command())
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout.splitlines()[-1]) == [
        "Qwen/Qwen2.5-0.5B-Instruct", ["my-policy"], 32768, "float32", "hermes", True, ["dummy-key"]
    ]  # fmt: skip


def test_vllms_own_parser_would_refuse_a_wrong_argument() -> None:
    answer = parsed([*engine_command(), "--no-such-flag"])
    assert answer.returncode != 0 and "--no-such-flag" in answer.stderr
