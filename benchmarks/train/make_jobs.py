"""A job of synthetic rollouts, laid out as the runner lays them: long agent conversations with their token ids.

    python -m benchmarks.train.make_jobs FOLDER [--rollouts 1000] [--calls 20] [--prompt-ids 20000]

Each call's prompt begins with the prompt and sampled ids of the one before, as a captured agent's does, and its
messages grow with it at about four characters per token. `--prompt-ids` is the mean over a rollout's calls.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

SAMPLED = 120
CHARACTERS = 4
VOCABULARY = 151_000


def make_job(folder: Path, rollouts: int, calls: int, prompt_ids: int, seed: int = 0) -> Path:
    """Writes the job and returns its folder; nothing is written again where it is there already."""
    if (folder / "summary.json").exists():
        return folder
    dice = random.Random(seed)
    pool = [str(dice.randrange(1000, VOCABULARY)) for _ in range(400_000)]
    words = " ".join(f"{dice.getrandbits(32):08x}" for _ in range(400_000))
    step = max(SAMPLED + 1, int(prompt_ids * 1.2 / calls))  # prompts grow from 0.4 to 1.6 times the mean
    first = max(8, prompt_ids - step * (calls - 1) // 2)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evaluation.json").write_text("{}")
    for number in range(rollouts):
        name = f"task-{number // 4:05d}__{number:08x}"
        journal = folder / name / "trajectory/llm_trajectory.jsonl"
        journal.parent.mkdir(parents=True)
        at = dice.randrange(len(pool) - first - calls * step)
        ids, text_at = pool[at : at + first], dice.randrange(len(words) // 2)
        messages = [{"role": "user", "content": words[text_at : text_at + first * CHARACTERS]}]
        with journal.open("wb") as file:
            at += first
            for call in range(calls):
                sampled = pool[at : at + SAMPLED]
                file.write(line(call, ids, sampled, messages, dice))
                tail = pool[at + SAMPLED : at + step]
                text_at += 1000
                messages = [
                    *messages,
                    {"role": "assistant", "content": words[text_at : text_at + SAMPLED * CHARACTERS]},
                    {"role": "user", "content": words[text_at + 500 : text_at + 500 + len(tail) * CHARACTERS]},
                ]
                ids = ids + sampled + tail
                at += step
        result = {
            "task_name": f"task-{number // 4:05d}", "rollout_name": name, "rewards": {"reward": float(number % 3 == 0)},
            "agent": "pi-acp", "model": "vllm/my-policy", "error": None, "verifier_error": None,
            "usage_tracking": {"endpoint_kind": "sandbox"}, "finished_at": "2026-11-04 17:53:01.000001",
        }  # fmt: skip
        (folder / name / "result.json").write_text(json.dumps(result))
    (folder / "summary.json").write_text("{}")
    return folder


def line(
    call: int, prompt: list[str], sampled: list[str], messages: list[dict[str, str]], dice: random.Random
) -> bytes:
    """One journal line, its ids spliced in as text."""
    record = {
        "request": {
            "timestamp": "2026-11-04T17:52:14.001Z", "method": "POST", "path": "/v1/chat/completions", "headers": {},
            "body": {"model": "my-policy", "messages": messages, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
                     "min_p": 0.0, "tools": [{"type": "function", "function": {"name": "bash", "parameters": {}}}]},
        },
        "response": {
            "timestamp": "2026-11-04T17:52:16.001Z", "status_code": 200, "headers": {},
            "body": {"choices": [{"index": 0, "finish_reason": "stop", "message": {
                "role": "assistant", "content": "done " * 90}}], "usage": {"completion_tokens": SAMPLED}},
        },
        "duration_ms": 2000.0,
        "metadata": {
            "call": call, "call_purpose": "agent", "engine": "vllm", "outcome": "ok",
            "sampling": {"sent": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}, "session": {},
                         "engine_defaults": None},
            "token_capture": {
                "schema_version": "benchflow.token_capture.v1", "wire": "openai-chat", "provider": "vllm",
                "requested": {"logprobs": True, "top_logprobs": None, "token_ids": True},
                "prompt_token_ids": "PROMPT",
                "completions": [{"index": 0, "token_ids": "SAMPLED", "tokens": ["word"] * SAMPLED,
                                 "logprobs": [round(-dice.random() * 3, 6) for _ in range(SAMPLED)]}],
                "unavailable": {},
            },
        },
    }  # fmt: skip
    text = json.dumps(record, separators=(",", ":"))
    text = text.replace('"PROMPT"', f"[{','.join(prompt)}]").replace('"SAMPLED"', f"[{','.join(sampled)}]")
    return text.encode() + b"\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--prompt-ids", type=int, default=20_000)
    asked = parser.parse_args()
    make_job(asked.folder, asked.rollouts, asked.calls, asked.prompt_ids)
