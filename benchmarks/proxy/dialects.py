"""What a dialect costs beside chat completions: the same proxy, engine and answers, in the same rounds.

    python -m benchmarks.proxy.dialects [--rounds 5] [--chunks 300] [--body-kb 1,40] [--out FILE.json]
        [--require 'small: responses/chat cpu_us_chunk<=1.5'] ...

One proxy with capture on runs in front of a fast double with vLLM's chunk shapes (fake_vllm.py). In each
round every dialect gets each case in turn, so that other load on the machine falls on all of them. Processor time is
the proxy's own, read from its process's clock before and after; what it still writes after the replies belongs to them.

    cpu_us_request  processor time of a streamed call of two chunks
    cpu_us_chunk    what each further chunk costs: (a long call - a call of two chunks) / further chunks

A case is a size of request; its text is in the user's message. `tools` has as many tools as Codex (thirteen, 22 kB
of them), which a response repeats. Exit 1 where a `--require` does not hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.proxy.compare import Case, pace, per, text
from benchmarks.proxy.figures import Figures, Runs, cell, holds
from benchmarks.proxy.load import Load
from benchmarks.proxy.targets import TARGETS, Target

PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
SYSTEM = "You are a careful engineer."
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string", "description": text(0.7)} for name in ("cmd", "workdir", "why", "shell")},
    "required": ["cmd"],
}


def main() -> None:
    options = arguments()
    cases = [(f"{size:g}kb", size, 0) for size in options.body_kb] + [("tools", 1.0, 13)]
    runs: Runs = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="capture-bench-") as folder:
        engine = subprocess.Popen([sys.executable, "-m", "benchmarks.proxy.fake_vllm"], stdout=subprocess.PIPE)
        assert engine.stdout is not None
        target: Target | None = None
        try:
            port = int(engine.stdout.readline())
            target = TARGETS["ours"](port, Path(folder))
            target.start()
            pace(port, Case("", interval_ms=0, prompt_ids=200))
            for number in range(options.rounds):
                for name, size, tools in cases:
                    for dialect in options.dialects:
                        figures = measured(target, dialect, size, tools, options.chunks)
                        runs[name, dialect].append(figures)
                        result = ", ".join(f"{figure} {value:.1f}" for figure, value in figures.items())
                        print(f"round {number + 1}, {name}, {dialect}: {result}", file=sys.stderr, flush=True)
        finally:
            if target is not None:
                target.stop()
            engine.kill()
    print(table([name for name, _, _ in cases], options.dialects, runs))
    if options.out:
        rounds = [{"case": case, "dialect": dialect, "rounds": rows} for (case, dialect), rows in runs.items()]
        options.out.write_text(json.dumps(rounds, indent=1))
    results = [holds(requirement, runs) for requirement in options.require]
    sys.exit(0 if all(results) else 1)


def measured(target: Target, dialect: str, size: float, tools: int, chunks: int) -> Figures:
    short = cost(target, request(target.port, dialect, 2, size, tools), 200)
    long = cost(target, request(target.port, dialect, chunks, size, tools), 48)
    return {"cpu_us_request": short, "cpu_us_chunk": (long - short) / (chunks - 2)}


def cost(target: Target, asked: bytes, count: int) -> float:
    """Microseconds of processor time per call."""
    load = Load(target.port, 16)
    try:
        load.run([asked], 16, limit=10)  # what is made once
        target.settle()
        before = target.cpu()
        result = load.run([asked], count, limit=30)
        target.settle()
        if result.whole != count:
            sys.exit(
                f"{count - result.whole} of {count} calls were not answered: {result.failure or result.sample[:300]!r}"
            )
        return per(target.cpu() - before, count)
    finally:
        load.close()


def request(port: int, dialect: str, tokens: int, size: float, tools: int) -> bytes:
    data = json.dumps(BODIES[dialect](tokens, text(size), tools)).encode()
    head = (
        f"POST {PATHS[dialect]} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nuser-agent: bench/1\r\naccept: */*\r\n"
        f"content-type: application/json\r\nauthorization: Bearer sk-bench\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def chat(tokens: int, message: str, tools: int) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": message}]
    body: dict[str, Any] = {"model": "policy", "messages": messages, "max_tokens": tokens, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if tools:
        body["tools"] = [
            {"type": "function", "function": {"name": f"tool_{n}", "description": "A tool.", "parameters": SCHEMA}}
            for n in range(tools)
        ]
    return body


def responses(tokens: int, message: str, tools: int) -> dict[str, Any]:
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": SYSTEM}]}
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": message}]}
    body: dict[str, Any] = {"model": "policy", "input": [developer, user], "max_output_tokens": tokens, "stream": True}
    if tools:
        body["tools"] = [
            {"type": "function", "name": f"tool_{n}", "description": "A tool.", "parameters": SCHEMA}
            for n in range(tools)
        ]
    return body


def messages(tokens: int, message: str, tools: int) -> dict[str, Any]:
    user = {"role": "user", "content": [{"type": "text", "text": message}]}
    body: dict[str, Any] = {"model": "policy", "messages": [user], "max_tokens": tokens, "stream": True}
    body["system"] = [{"type": "text", "text": SYSTEM}]
    if tools:
        body["tools"] = [{"name": f"tool_{n}", "description": "A tool.", "input_schema": SCHEMA} for n in range(tools)]
    return body


BODIES = {"chat": chat, "messages": messages, "responses": responses}


def table(cases: list[str], dialects: list[str], runs: Runs) -> str:
    """Medians over rounds with their range."""
    lines = [["case", "dialect", "us/chunk", "us/request"], ["-"] * 4]
    for case in cases:
        for dialect in dialects:
            rounds = runs[case, dialect]
            lines.append([case, dialect, cell(rounds, "cpu_us_chunk"), cell(rounds, "cpu_us_request")])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dialects", type=lambda text: text.split(","), default=list(PATHS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunks", type=int, default=300, help="tokens of a long answer")
    parser.add_argument("--body-kb", type=lambda text: [float(part) for part in text.split(",")], default=[1.0, 40.0])
    parser.add_argument("--out", type=Path, help="every round's figures, as JSON")
    parser.add_argument("--require", action="append", default=[], metavar="'[CASE:] A/B FIGURE<=NUMBER'")
    return parser.parse_args()


if __name__ == "__main__":
    main()
