"""What token-in adds to the time to first token, on a real engine.

    python -m benchmarks.proxy.token_in BASE_URL [--key KEY]

For each size a conversation of two turns. The second call is made plainly and with token-in, in turns, through a proxy
each, with another last message each time. The engine's prefix cache holds the first turn for both, so little is new to
compute, and the plain call's time, of which the share is taken, is as short as it can be. Medians of `--rounds` pairs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from proxy import Settings, serve

WORDS = "the quick brown fox jumps over the lazy dog and then it reads a file with many lines of text in it ".split()


async def first_token(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Seconds until the first chunk with text, or the end where there is none; and the message."""
    started, first = time.perf_counter(), 0.0
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    async with client.stream("POST", "/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"HTTP {answer.status_code}: {(await answer.aread()).decode()[:300]}")
        async for line in answer.aiter_lines():
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            first = first or time.perf_counter()
            for choice in json.loads(data)["choices"]:
                message["content"] += choice["delta"].get("content") or ""
    return first - started, message


def text(count: int, salt: str) -> str:
    return " ".join([salt, *(WORDS[n % len(WORDS)] for n in range(count))])


async def measure(arguments: argparse.Namespace, size: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"plain": [], "token-in": []}
    bridged = prompt_ids = 0
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "upstream": [arguments.base_url], "upstream_key": arguments.key, "probe": False, "engine": arguments.engine,
        }  # fmt: skip
        off = serve(Settings(out=Path(folder) / "off", **common))
        on = serve(Settings(out=Path(folder) / "on", token_in="auto", **common))
        async with (
            off as plain_proxy,
            on as other,
            httpx.AsyncClient(base_url=plain_proxy.base_url, timeout=600) as plain,
            httpx.AsyncClient(base_url=other.base_url, timeout=600) as bridging,
        ):
            for round_number in range(arguments.rounds + 1):
                salt = f"{size} {round_number} {time.time_ns()}"
                messages = [
                    {"role": "system", "content": "You are brief."},
                    {"role": "user", "content": text(size - 120, salt)},
                ]
                body = {
                    "model": arguments.model,
                    "messages": messages,
                    "max_tokens": 8,
                    "temperature": 0,
                    "stream": True,
                }
                order = [("plain", plain), ("token-in", bridging)]
                for _, client in order:  # the first turn, which fills the prefix cache and is held
                    _, reply = await first_token(client, body)
                if round_number % 2:
                    order.reverse()
                for side, client in order:
                    ask = {"role": "user", "content": text(40, f"{side} {round_number} {time.time_ns()}")}
                    second = {**body, "messages": [*messages, {**reply, "content": reply["content"].strip()}, ask]}
                    taken, _ = await first_token(client, second)
                    if round_number:  # the first pair proves the rendering, and warms what is to be warm
                        times[side].append(taken)
        for line in (Path(folder) / "on/default/trajectory/llm_trajectory.jsonl").read_bytes().splitlines():
            metadata = json.loads(line)["metadata"]
            bridged += metadata["token_in"]["bridged"]
            prompt_ids = len(metadata["token_capture"]["prompt_token_ids"])
    before, after = (statistics.median(times[side]) * 1000 for side in ("plain", "token-in"))
    added = statistics.median(b - a for a, b in zip(times["plain"], times["token-in"], strict=True)) * 1000
    return {
        "prompt_ids": prompt_ids,
        "plain_ttft_ms": round(before, 1),
        "token_in_ttft_ms": round(after, 1),
        "added_ms": round(added, 1),
        "share": round(added / before, 3),
        "bridged": bridged,
        "of": arguments.rounds + 1,
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description="What token-in adds to the time to first token.")
    parser.add_argument("base_url", help="the engine, http://HOST:PORT/v1")
    parser.add_argument("--key", default=None)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--model", default="my-policy")
    parser.add_argument("--sizes", default="1000,3000,6000", help="prompt ids, about")
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    for size in (int(part) for part in arguments.sizes.split(",")):
        print(json.dumps(await measure(arguments, size)), flush=True)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
