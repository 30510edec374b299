"""What a capture proxy costs, beside its peers and a plain relay, in the same run.

    python -m benchmarks.proxy [--targets direct,nginx,ours,rllm,litellm] [--cases alone,small,...] [--rounds 3]
        [--out FILE.json] [--require 'paced64: ours/rllm cpu_us_chunk<=0.33'] ...

A case is one kind of load (`--cases list` shows them); with `--streams`, `--chunks` and so on a case of your own is
measured instead. In each round every target gets each case in turn, so that other load on the machine falls on all
of them. The engine is a fast double with vLLM's chunk shapes and the load client is a few microseconds a read
(fake_vllm.py, load.py); both share the cores with the target. Processor time is that of the target's process
tree, read from its own clocks before and after; what it still writes after the reply belongs to the call.

    cpu_us_request  processor time of a call of two chunks with this case's body and prompt (unstreamed: of the call)
    cpu_us_chunk    what each further chunk costs: (a call of the case - the call of two chunks) / further chunks
    ttft_ms         time to the first token less that of `direct`, p50 and p99
    chunks_s        streamed events per second that reached the client
    peak_mb         most resident memory of the tree meanwhile
    delivered       who has ids and logprobs: the target's own records (`complete`: of those, for each whole reply, the
                    part with every id and one logprob each), or else the reply itself

Figures are medians over rounds with their range. `--require` compares medians, `case: a/b figure<=number`; without a
case it must hold in each that has the figure. Exit 1 where one does not hold, 2 where a target is not available.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.proxy.figures import Figures, Runs, add_first_token, holds, table
from benchmarks.proxy.load import Load, Result
from benchmarks.proxy.targets import TARGETS, Missing, Target


@dataclass(frozen=True)
class Case:
    """One kind of load: `requests` calls over `streams` connections; `interval_ms` 0 is as fast as it goes."""

    name: str
    streams: int = 64
    chunks: int = 100
    interval_ms: float = 20.0
    body_kb: float = 1.0
    prompt_ids: int = 100
    stream: bool = True
    dialect: str = "chat"
    requests: int = 64
    #: Seconds after which no further call starts, except one per stream.
    limit: float = 10.0
    #: Not again for a target after its first round, where it takes a minute.
    once: tuple[str, ...] = ()


CASES = {
    case.name: case
    for case in (
        Case("alone", streams=1, chunks=2, interval_ms=0, requests=150, limit=3),
        Case("small", streams=16, chunks=2, interval_ms=0, requests=600, limit=4),
        Case("large", streams=16, chunks=2, interval_ms=0, body_kb=100, prompt_ids=20_000, requests=200, limit=5),
        Case("whole", streams=16, chunks=300, interval_ms=0, prompt_ids=20_000, stream=False, requests=150, limit=5),
        Case("unpaced", streams=16, chunks=300, interval_ms=0, requests=64, limit=5),
        Case("paced8", streams=8, requests=16),
        Case("paced64", streams=64, requests=128),
        Case("paced512", streams=512, requests=512, limit=15, once=("litellm", "rllm")),
    )
}
USUAL = ("alone", "small", "large", "whole", "unpaced", "paced64", "paced512")


def main() -> None:
    options = arguments()
    cases = chosen(options)
    folder = Path(tempfile.mkdtemp(prefix="capture-bench-"))
    engine = subprocess.Popen([sys.executable, "-m", "benchmarks.proxy.fake_vllm"], stdout=subprocess.PIPE)
    assert engine.stdout is not None
    targets: list[Target] = []
    runs: Runs = defaultdict(list)
    try:
        port = int(engine.stdout.readline())
        for name in options.targets.split(","):
            target = TARGETS[name](port, folder)
            target.install()
            target.start()
            targets.append(target)
        for number in range(options.rounds):
            for case in cases:
                pace(port, case)
                for target in targets:
                    if number and target.name in case.once:
                        continue
                    figures = measured(target, case)
                    runs[case.name, target.name].append(figures)
                    say(f"round {number + 1}, {case.name}, {target.name}: {brief(figures)}")
    except Missing as error:
        fail(str(error))
    finally:
        for target in targets:
            target.stop()
        engine.kill()
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    add_first_token(runs)
    print(table([case.name for case in cases], [target.name for target in targets], runs))
    if options.out:
        options.out.write_text(json.dumps(report(cases, runs), indent=1))
    broken = [text for text in options.require if not holds(text, runs)]
    sys.exit(1 if broken else 0)


def fail(why: str) -> None:
    say(f"benchmarks.proxy: {why}")
    sys.exit(2)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# one target, one case


def measured(target: Target, case: Case) -> Figures:
    """The figures of one target under one case."""
    figures: Figures = {}
    if case.stream and case.chunks > 2:
        streams = min(case.streams, 16)
        short = replace(case, chunks=2, streams=streams, requests=96, limit=4)
        base, base_cpu = loaded(target, short)
        figures["cpu_us_request"] = per(base_cpu, base.whole)
        target.forget_peak()
        long, cpu = loaded(target, case, figures)
        each = (per(cpu, long.whole) - figures["cpu_us_request"]) / (case.chunks - 2)
        figures["cpu_us_chunk"] = each
    else:
        target.forget_peak()
        long, cpu = loaded(target, case, figures)
        figures["cpu_us_request"] = per(cpu, long.whole)
    figures["first_ms"] = [quantile(long.ttft, 0.5), quantile(long.ttft, 0.99)]
    figures["chunks_s"] = long.events / long.wall if case.stream else None
    figures["peak_mb"] = target.peak_mb() or None
    figures["wall_s"] = long.wall
    figures["client_cpu"] = long.client_cpu / long.wall
    figures["whole"], figures["failed"], figures["failure"] = long.whole, long.failed, long.failure
    return figures


def loaded(target: Target, case: Case, figures: Figures | None = None) -> tuple[Result, float]:
    """One load on a target, and the processor seconds of its tree, what it did after the replies included."""
    load = Load(target.port, case.streams)
    try:
        if figures is not None:
            target.begin()
        before = target.cpu()
        result = load.run([request(target, case)], case.requests, limit=case.limit, at_least=case.streams)
        target.settle()
        if figures is not None:
            recorded = target.records(case.chunks)
            figures["delivered"] = delivered(recorded, case, result)
            if recorded is not None and result.whole:
                figures["complete"] = recorded[1] / result.whole
        return result, target.cpu() - before
    finally:
        load.close()


def per(seconds: float, calls: int) -> float:
    return seconds / calls * 1e6 if calls else float("nan")


def delivered(recorded: tuple[int, int] | None, case: Case, result: Result) -> str:
    if recorded is not None:
        calls, complete = recorded
        return f"{complete}/{result.whole} records" if complete == calls else f"{complete} of {calls} records complete"
    body = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", result.sample).replace(b" ", b"")  # without the frames of HTTP
    ids = re.search(rb'"prompt_token_ids":\[\d', body) is not None
    sampled = len(re.findall(rb'"token_ids":\[\d', body)) >= (case.chunks if case.stream else 1)
    logprobs = body.count(b'"logprob":') >= case.chunks
    have = [name for name, there in (("prompt ids", ids), ("sampled ids", sampled), ("logprobs", logprobs)) if there]
    return "passes on " + (", ".join(have) or "neither ids nor logprobs")


def request(target: Target, case: Case) -> bytes:
    """The bytes of one request; a target that does not ask for ids and logprobs itself is asked by the client."""
    body: dict[str, Any] = {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "You are a careful engineer."},
            {"role": "user", "content": text(case.body_kb)},
        ],
        "max_tokens": case.chunks,
        "temperature": 1.0,
    }
    if case.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if target.asks:
        body |= {"logprobs": True, "return_token_ids": True}
    data = json.dumps(body).encode()
    head = (
        f"POST {target.path} HTTP/1.1\r\nhost: 127.0.0.1:{target.port}\r\nuser-agent: bench/1\r\naccept: */*\r\n"
        f"content-type: application/json\r\nauthorization: Bearer sk-bench\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def text(kilobytes: float) -> str:
    words = 'def parse(line: str) -> dict:\\n    \\"fields\\" of one line, quoted or not; see RFC 4180 for the rest. '
    size = max(0, int(kilobytes * 1024) - 300)
    return (words * (size // len(words) + 1))[:size]


def pace(port: int, case: Case) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/pace", json.dumps({"interval_ms": case.interval_ms, "prompt_ids": case.prompt_ids}))
    connection.getresponse().read()
    connection.close()


def quantile(values: list[float], part: float) -> float:
    """In milliseconds."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] * 1000 if ordered else float("nan")


def brief(figures: Figures) -> str:
    shown = {name: figures.get(name) for name in ("cpu_us_chunk", "cpu_us_request", "chunks_s", "peak_mb", "wall_s")}
    text = ", ".join(f"{name} {value:,.1f}" for name, value in shown.items() if value is not None)
    return f"{text}, client {figures['client_cpu']:.0%} of a core; {figures['delivered']}" + (
        f"; {figures['failed']} failed: {figures['failure']}" if figures["failed"] else ""
    )


def report(cases: list[Case], runs: Runs) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "command": sys.argv[1:],
        "cases": [asdict(case) for case in cases],
        "rounds": [{"case": case, "target": target, "rounds": rounds} for (case, target), rounds in runs.items()],
    }


# options


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="direct,nginx,ours,rllm,litellm", help=", ".join(TARGETS))
    parser.add_argument("--cases", default=",".join(USUAL), help="names of cases, or `list`")
    own = Case("given")
    parser.add_argument("--streams", type=int, help=f"calls at a time ({own.streams})")
    parser.add_argument("--chunks", type=int, help=f"tokens an answer has ({own.chunks})")
    parser.add_argument("--interval-ms", type=float, help=f"between two chunks ({own.interval_ms:g}); 0: none")
    parser.add_argument("--body-kb", type=float, help=f"size of a request ({own.body_kb:g})")
    parser.add_argument("--prompt-ids", type=int, help=f"ids of the prompt ({own.prompt_ids})")
    parser.add_argument("--stream", action=argparse.BooleanOptionalAction, default=None, help="or whole answers")
    parser.add_argument("--dialect", choices=("chat",), help="of the client's requests")
    parser.add_argument("--requests", type=int, help=f"calls a round ({own.requests})")
    parser.add_argument("--limit", type=float, help=f"seconds after which no further call begins ({own.limit:g})")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="every round's figures, as JSON")
    parser.add_argument("--require", action="append", default=[], metavar="'[CASE:] A/B FIGURE<=NUMBER'")
    parser.add_argument("--keep", action="store_true", help="leave the targets' logs and records")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> list[Case]:
    if options.cases == "list":
        for case in CASES.values():
            print(case)
        sys.exit(0)
    names = ("streams", "chunks", "interval_ms", "body_kb", "prompt_ids", "stream", "dialect", "requests", "limit")
    chosen = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if chosen:
        return [replace(Case("given", requests=max(64, 2 * chosen.get("streams", 0))), **chosen)]
    unknown = [name for name in options.cases.split(",") if name not in CASES]
    if unknown:
        fail(f"there is no case {unknown[0]!r}; there are {', '.join(CASES)}")
    return [CASES[name] for name in options.cases.split(",")]


if __name__ == "__main__":
    main()
