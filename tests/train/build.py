"""Job folders laid out as BenchFlow lays them, built from golden journal lines: what the trainer side's tests read."""

from __future__ import annotations

import copy
import datetime
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capture.schemas import examples

GOLDEN: dict[str, dict[str, Any]] = dict(examples())
Line = dict[str, Any]
BEGAN = datetime.datetime(2026, 11, 4, 17, 52, 13, 1)


def line(
    number: int,
    prompt: Sequence[int],
    sampled: Sequence[int],
    *,
    logprobs: Sequence[float] | None = None,
    golden: str = "ok",
    messages: list[dict[str, Any]] | None = None,
    text: str | None = None,
    **metadata: Any,
) -> Line:
    """A journal line made of a golden one: call `number`, that read `prompt` and sampled `sampled`."""
    made = copy.deepcopy(GOLDEN[golden])
    made["metadata"] |= {"call": number, **metadata}
    capture = made["metadata"]["token_capture"]
    capture["prompt_token_ids"] = list(prompt)
    capture["completions"] = [
        {
            "index": 0,
            "token_ids": list(sampled),
            "tokens": [f"<{token}>" for token in sampled],
            "logprobs": list(logprobs) if logprobs is not None else [-0.25 - 0.125 * (token % 4) for token in sampled],
        }
    ]
    capture.pop("digest", None)
    if messages is not None:
        made["request"]["body"]["messages"] = messages
    if text is not None:
        made["response"]["body"]["choices"][0]["message"]["content"] = text
        made["response"]["body"]["choices"][0]["finish_reason"] = "stop"  # the golden line's reply was cut
    return made


def conversation(turns: int = 2, *, first: int = 100, start: int = 0, **metadata: Any) -> list[Line]:
    """`turns` calls of one conversation, each prompt beginning with the prompt and sampled ids of the one before."""
    prompt, made = list(range(first, first + 12)), []
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Name two colours."}]
    for turn in range(turns):
        sampled = [first + 1000 + 10 * turn + k for k in range(4)]
        text = f"reply {turn}"
        made.append(line(start + turn, prompt, sampled, messages=copy.deepcopy(messages), text=text, **metadata))
        prompt = prompt + sampled + [first + 2000 + 10 * turn + k for k in range(3)]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"and then? {turn}"}]
    return made


def broken(turns: int = 2, **metadata: Any) -> list[Line]:
    """A conversation whose second prompt re-tokenized the first reply: complete calls that are no one sequence."""
    made = conversation(turns, **metadata)
    prompt = made[1]["metadata"]["token_capture"]["prompt_token_ids"]
    prompt[13] += 7
    return made


def uncaptured(turns: int = 1) -> list[Line]:
    """Calls that went through without token capture: the key is absent, as with capture off."""
    made = conversation(turns)
    for call_line in made:
        del call_line["metadata"]["token_capture"]
    return made


def failed(number: int = 0) -> Line:
    made = copy.deepcopy(GOLDEN["failed"])
    made["metadata"]["call"] = number
    return made


def make_rollout(job: Path, **spec: Any) -> Path:
    """One rollout's folder; `result.json` last. Keys, all optional:

    name, task, agent, model, reward (None: unscored), error, calls (lines; None: no journal), journal (bytes instead),
    finished (False: no `result.json`), result (further or other keys of it), at (seconds: order of finishing).
    """
    task = spec.get("task", "write-number")
    name = spec.get("name") or f"{task}__{len(list(job.iterdir())) if job.is_dir() else 0:08x}"
    folder = job / name
    for part in ("agent", "verifier", "artifacts", "trajectory", "trainer"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    write(folder / "config.json", {"task_path": task, "agent": spec.get("agent", "pi-acp")})
    calls = spec.get("calls", conversation())
    journal = spec.get("journal")
    if journal is None and calls is not None:
        journal = b"".join(json.dumps(call).encode() + b"\n" for call in calls)
    if journal is not None:
        (folder / "trajectory/llm_trajectory.jsonl").write_bytes(journal)
    if spec.get("finished", True):
        finish_rollout(folder, **spec)
    return folder


def finish_rollout(folder: Path, **spec: Any) -> None:
    """Writes `result.json`, atomically, as a runner does at the end."""
    at = spec.get("at", 0)
    reward, error = spec.get("reward", 1.0), spec.get("error")
    result = {
        "task_name": spec.get("task", "write-number"),
        "rollout_name": folder.name,
        "rewards": None if reward is None else {"reward": reward},
        "agent": spec.get("agent", "pi-acp"),
        "agent_name": "pi",
        "model": spec.get("model", "vllm/my-policy"),
        "n_tool_calls": 1,
        "n_prompts": 1,
        "agent_result": {"n_input_tokens": 2842, "n_output_tokens": 48, "usage_source": "provider_response"},
        "error": error,
        "error_category": spec.get("error_category", "timeout" if error else None),
        "verifier_error": None,
        "verifier_error_category": None,
        "export_error": None,
        "partial_trajectory": False,
        "trajectory_source": "acp",
        "usage_tracking": {"endpoint_kind": "sandbox"},
        "started_at": str(BEGAN + datetime.timedelta(seconds=at)),
        "finished_at": str(BEGAN + datetime.timedelta(seconds=at + 0.5)),
        "timing": {"total": 48.0},
        **spec.get("result", {}),
    }
    temp_path = folder / ".result.json.tmp"
    write(temp_path, result)
    if "at" in spec:
        os.utime(temp_path, (BEGAN.timestamp() + at, BEGAN.timestamp() + at))
    temp_path.rename(folder / "result.json")


def make_job(
    folder: Path,
    rollouts: Sequence[dict[str, Any]] = ({},),
    *,
    state: str = "finished",
    pid: int | None = None,
    retry: dict[str, Any] | None = None,
) -> Path:
    """A job folder with these rollouts (see `make_rollout`), and returns it.

    `state`: `finished`, `stopped` (by the user), `running` (a lock that names `pid`, default this process), `waiting`
    (neither lock nor summary, nor `evaluation.json`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    if state != "waiting":
        retry = retry or {"max_retries": 0, "exclude_categories": ["timeout", "provider_auth"]}
        write(folder / "evaluation.json", {"job_name": folder.name, "config": {"agent_env": [], "retry": retry}})
    if state == "running":
        write(folder / ".evaluation.lock", {"pid": pid or os.getpid(), "host": socket.gethostname()})
    for number, spec in enumerate(rollouts):
        make_rollout(folder, **{"at": number, **spec})
    if state in ("finished", "stopped"):
        end_job(folder, stopped=state == "stopped")
    return folder


def end_job(folder: Path, *, stopped: bool = False) -> None:
    """The summary, then the lock is given back."""
    write(folder / "summary.json", {"job_name": folder.name, "stopped": stopped})
    (folder / ".evaluation.lock").unlink(missing_ok=True)


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


#: A rollout that failed for a reason that runners retry.
CRASH = {"reward": None, "error": "the container died", "error_category": "infra_failure"}


def trials(root: Path, *tasks: list[dict[str, Any]]) -> Path:
    """A `--trials` run: of each task one rollout a trial."""
    for number in range(len(tasks[0])):
        specs = [
            {"name": f"{spec[number].get('task', 't')}__{number}{k}", **spec[number]} for k, spec in enumerate(tasks)
        ]
        make_job(root / f"trial-{number + 1:02d}" / "2026-11-04__17-52-13", specs)
    return root


def dead_pid() -> int:
    """The id of a process that has ended."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid
