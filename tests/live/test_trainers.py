"""Trainers themselves, on rows of what a real vLLM sampled: each in its own environment, on the CPU."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from capture.journal.layout import JOURNAL
from proxy import ProxyThread, Settings
from sandbox.demo.captures import TOOL_MESSAGES, WRITE_TOOL
from sandbox.embedded_engine import TEMPLATE
from tests.live.conftest import LiveEngine
from train.rollouts.rollouts import find_rollouts
from train.tokens.rollout_tokens import RolloutTokens, read_tokens

STEPS = Path(__file__).parent / "trainer_steps"
ENVIRONMENTS = Path.home() / ".cache/capture-trainers"
GROUP, TRIES = 4, 16
#: SmolLM2's `<|im_end|>`.
STOP = 2
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}


@pytest.fixture(scope="session")
def job(vllm: LiveEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four rollouts of two calls each, captured by the proxy from vLLM, training-grade; rewards 0, 1, 0, 1.

    Conversations whose reply came back in other tokens are passed by, as a group's would be withheld.
    """
    folder = tmp_path_factory.mktemp("jobs") / "rl-capture"
    grades = 0
    settings = Settings(
        upstream=[vllm.base_url], upstream_key=vllm.api_key, engine="vllm", model=vllm.model, probe=False
    )
    with ProxyThread(settings) as proxy:
        for seed in range(TRIES):
            if grades == GROUP:
                break
            rollout = folder / f"write-number__{seed:08x}"
            session = proxy.open_session(rollout.name, journal=rollout / JOURNAL, sampling=SAMPLING)
            called = converse(session.base_url, session.api_key, seed)
            proxy.close_session(session.id)
            (found,) = find_rollouts(rollout)
            if called - {"write"} or not read_tokens(found).training_grade:  # a tool that there is not is no good row
                rollout.rename(folder.parent / f"not-{rollout.name}")
                continue
            result = {
                "task_name": "write-number", "rollout_name": rollout.name, "rewards": {"reward": float(grades % 2)},
                "agent": "script", "model": "vllm/my-policy", "error": None, "verifier_error": None,
            }  # fmt: skip
            (rollout / "result.json").write_text(json.dumps(result))
            grades += 1
    assert grades == GROUP, f"only {grades} of {TRIES} conversations came back in the tokens they were sampled in"
    (folder / "evaluation.json").write_text("{}")
    (folder / "summary.json").write_text("{}")
    return folder


def converse(base_url: str, key: str, seed: int) -> set[str]:
    """Two calls: the reply to the first goes back as it came, with a tool's answer where it called one. Names of the
    tools that were called.
    """
    called: set[str] = set()
    messages: list[dict[str, Any]] = list(TOOL_MESSAGES)
    for turn in range(2):
        body = {
            "model": "any",
            "messages": messages,
            "tools": [WRITE_TOOL],
            "max_tokens": 96,
            "seed": 100 * seed + turn,
        }
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.post(f"{base_url}/chat/completions", json=body, headers=headers, timeout=300, trust_env=False)
        answer.raise_for_status()
        message = answer.json()["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        messages = [*messages, {"role": "assistant", "content": message.get("content"), "tool_calls": calls}]
        if not calls:
            del messages[-1]["tool_calls"]
            messages.append({"role": "user", "content": "Thank you. Say goodbye."})
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls]
        called.update(call["function"]["name"] for call in calls)
    return called


@pytest.fixture(scope="session")
def tokens(job: Path) -> list[RolloutTokens]:
    return [read_tokens(rollout) for rollout in find_rollouts(job)]


@pytest.fixture(scope="session")
def sampled(tokens: list[RolloutTokens]) -> int:
    """How many ids the engine sampled in all, the proxy's own count."""
    return sum(
        len(c.token_ids or ()) for t in tokens for call in t.calls if call.capture for c in call.capture.completions
    )


def bench(*words: str | Path, python: Path | str = sys.executable) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(python), "-m", "train", *map(str, words)], capture_output=True, text=True, timeout=900)
    assert done.returncode in (0, 1), done.stderr
    return done


def convert(job: Path, out: Path, form: str, *words: str) -> Path:
    done = bench("convert", job, "--format", form, "--out", out, *words)
    assert done.returncode == 0 and done.stdout.startswith("Converted "), done.stdout + done.stderr
    return out


def step(trainer: str, script: str, *words: str | Path, **variables: str) -> dict[str, Any]:
    python = ENVIRONMENTS / trainer / "bin/python"
    if not python.exists():
        pytest.fail(f"{python} is missing: tests/live/trainers.sh install {trainer} (make live does it)")
    environment = {
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": tempfile.mkdtemp(), "PATH": "/usr/bin:/bin",
        "TRL_EXPERIMENTAL_SILENCE": "1", "CUDA_VISIBLE_DEVICES": "", "HOME": str(Path.home()),
        **variables,
    }  # fmt: skip
    command = [python, STEPS / script, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{trainer} {script}: {str(result)[:400]}")
    return result


def test_coverage_says_yes_to_each(job: Path) -> None:
    lines = bench("token-coverage", job).stdout.splitlines()
    assert all(line.endswith("[vllm]: 2/2 calls complete, 1/1 prompts extend the previous call") for line in lines[:-1])
    assert lines[-1].startswith("4 of 4 rollouts are training-grade")


def test_trl_takes_a_step_on_message_rows(
    job: Path, tmp_path: Path, vllm: LiveEngine, tokens: list[RolloutTokens], sampled: int
) -> None:
    """Trained tokens are the sampled ones and one template token a reply, the line end behind the stop token; a reply
    that max_tokens cut has no stop token, and the template adds that too.
    """
    rows = convert(job, tmp_path / "rows.jsonl", "trl-sft", "--row-mode", "exchange")
    result = step("trl", "trl_steps.py", "sft", rows, vllm.weights, TEMPLATE)
    assert result["rows"] == 2 * GROUP and result["moved"] and math.isfinite(result["loss"])
    replies = [json.loads(line) for line in rows.read_text().splitlines()]
    lasts = [call.capture.completions[0].token_ids[-1] for rollout in tokens for call in rollout.calls if call.capture]  # type: ignore[index]
    assert len(lasts) == len(replies) and lasts.count(STOP) > 0
    assert result["trained"] == sampled + len(replies) + sum(last != STOP for last in lasts)


def test_trl_takes_a_step_on_exact_ids(job: Path, tmp_path: Path, vllm: LiveEngine, sampled: int) -> None:
    rows = convert(job, tmp_path / "rows.jsonl", "trl-sft-ids")
    result = step("trl", "trl_steps.py", "sft", rows, vllm.weights, TEMPLATE)
    assert result["rows"] == GROUP and result["moved"] and math.isfinite(result["loss"])
    assert result["trained"] == sampled


def test_trl_takes_a_grpo_step_on_what_vllm_sampled(
    job: Path, tmp_path: Path, vllm: LiveEngine, tokens: list[RolloutTokens]
) -> None:
    """The trainer's logprobs are the captured ones, its advantages the row's own, and only sampled ids are trained."""
    rows = convert(job, tmp_path / "rows.jsonl", "trl-grpo", "--group-advantage")
    result = step("trl", "trl_steps.py", "grpo", rows, vllm.weights, TEMPLATE)
    assert result["difference"] < 1e-4
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    # TRL shuffles the batch: rows are known again by how much of them is trained.
    pairs = sorted(zip(result["trained"], result["advantages"], strict=True))
    wanted = sorted((sum(row["env_mask"]), row["advantage"]) for row in written)
    assert [number for number, _ in pairs] == [number for number, _ in wanted]
    assert [number for number, _ in pairs] == sorted(rollout.sequences[0].sampled for rollout in tokens)
    assert [value for _, value in pairs] == pytest.approx([value for _, value in wanted], abs=1e-5)
    assert {round(value, 3) for value in result["advantages"]} == {0.866, -0.866}
    assert result["moved"] and math.isfinite(result["loss"])


def test_audit_agrees_with_transformers(job: Path, vllm: LiveEngine, sampled: int) -> None:
    done = bench("audit", job, "--model", vllm.weights, "--json", python=ENVIRONMENTS / "trl/bin/python")
    result = json.loads(done.stdout)
    print(f"audit: largest difference {result['largest']:.2e}, mean {result['mean']:.2e}")
    assert done.returncode == 0 and result["tokens"] == sampled and result["calls"] == 2 * GROUP
    assert result["largest"] < 1e-4 and result["sampling"] == []


def test_audit_finds_a_log_that_is_not_this_models(job: Path, vllm: LiveEngine, tmp_path: Path) -> None:
    (rollout, *_) = find_rollouts(job)
    assert rollout.journal is not None
    lines = [json.loads(line) for line in rollout.journal.read_text().splitlines()]
    lines[1]["metadata"]["token_capture"]["completions"][0]["logprobs"][2] -= 0.5
    journal = tmp_path / "x__1" / JOURNAL
    journal.parent.mkdir(parents=True)
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = bench("audit", tmp_path / "x__1", "--model", vllm.weights, "--json", python=ENVIRONMENTS / "trl/bin/python")
    (beyond,) = json.loads(done.stdout)["beyond"]
    assert done.returncode == 1 and beyond["at"] == 2 and beyond["largest"] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("form", ["trl-sft", "prime-sft", "skyrl-sft", "trl-sft-ids", "trl-grpo"])
def test_datasets_loads_rows_and_fills_in_no_null(job: Path, tmp_path: Path, form: str) -> None:
    rows = convert(job, tmp_path / "rows.jsonl", form)
    result = step("trl", "load_steps.py", rows)
    assert result["rows"] == len(rows.read_text().splitlines()) and result["nulls"] == []


def test_verls_own_dataset_reads_the_rows(job: Path, tmp_path: Path, vllm: LiveEngine) -> None:
    rows = convert(job, tmp_path / "rows.parquet", "verl-sft")
    result = step("verl", "verl_steps.py", rows, vllm.weights, TEMPLATE)
    assert result["rows"] == GROUP and all(result["trained"]) and min(result["tokens"]) > 100


def test_skyrls_own_functions_read_the_rows(job: Path, tmp_path: Path, vllm: LiveEngine) -> None:
    rows = convert(job, tmp_path / "rows.jsonl", "skyrl-sft")
    result = step("skyrl", "skyrl_steps.py", rows, vllm.weights, TEMPLATE)
    assert result["rows"] == GROUP
    for messages in result["messages"]:
        assert messages[-1]["role"] == "assistant"
        assert all(isinstance(message["content"], str) for message in messages)
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        assert all(isinstance(call["function"]["arguments"], dict) for call in calls)
    assert all(result["actions"]), result


def test_openenvs_own_record_takes_the_episodes(job: Path, tmp_path: Path) -> None:
    folder = convert(job, tmp_path / "episodes", "openenv-episodes")
    result = step("openenv", "openenv_steps.py", folder / "results.jsonl")
    assert result["rows"] == result["loaded"] == GROUP and all(result["again"])
    assert sorted(result["rewards"]) == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("form", ["trl-sft", "prime-sft"])
def test_validate_finds_the_rendering_equal_to_what_was_captured(
    job: Path, tmp_path: Path, vllm: LiveEngine, form: str
) -> None:
    """With the model's own tokenizer and the template it was served with: equal but for the token after the stop."""
    mode = ("--row-mode", "exchange") if form == "trl-sft" else ()
    rows = convert(job, tmp_path / "rows.jsonl", form, *mode)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(vllm.weights / name, tokenizer)
    shutil.copy(TEMPLATE, tokenizer / "chat_template.jinja")
    words = ("--format", form, "--tokenizer", tokenizer, "--source-jobs", job)
    done = bench("validate", rows, *words, python=ENVIRONMENTS / "trl/bin/python")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
