"""The seed's examples with the engine and the tokenizer at hand: its commands, their output, and its arithmetic.

One rollout of two streamed calls (a tool call, then a reply) that the embedded model really sampled, through the proxy.
The trainer's own count of trained tokens is in `tests/live/test_trainers.py`; here it is the rendering's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from capture.journal.call import Call
from capture.journal.journal import JournalReader
from capture.journal.layout import JOURNAL
from proxy import ProxyThread, Settings
from sandbox.demo.captures import TOOL_MESSAGES, WRITE_TOOL
from sandbox.embedded_engine import EmbeddedEngine
from tests.forked import run_command
from tests.train.build import make_job
from tests.train.smollm import smollm
from train import RolloutRecord, stream_rollouts

ROOT = Path(__file__).parents[2]
CALLED = (
    '<tool_call>\n{"name": "write", "arguments": {"path": "/app/answer.txt", "content": "42"}}\n</tool_call><|im_end|>'
)


@pytest.fixture(scope="module")
def journal(engine: EmbeddedEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of an agent that writes 42 and says so, as a streaming client has it."""
    path = tmp_path_factory.mktemp("seed") / JOURNAL
    settings = Settings(upstream=[engine.base_url], engine="llamacpp", model=engine.model, probe=False)
    with ProxyThread(settings) as proxy:
        session = proxy.open_session("write-number", journal=path)
        client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
        messages: list[Any] = list(TOOL_MESSAGES)
        for _ in range(2):
            message = streamed(client, messages)
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": "Wrote 2 bytes."}
                for call in message.get("tool_calls", ())
            ]
        proxy.close_session(session.id)
    return path


def streamed(client: openai.OpenAI, messages: list[Any]) -> dict[str, Any]:
    """The assistant's message, put together from its chunks."""
    content, calls = "", dict[int, dict[str, Any]]()
    for chunk in client.chat.completions.create(
        model="my-policy", messages=messages, tools=[WRITE_TOOL], temperature=0, seed=1, max_tokens=96, stream=True
    ):  # type: ignore[call-overload]
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for part in delta.tool_calls or ():
            call = calls.setdefault(
                part.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            )
            call["id"] += part.id or ""
            call["function"]["name"] += part.function.name or ""
            call["function"]["arguments"] += part.function.arguments or ""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return message | ({"tool_calls": list(calls.values())} if calls else {})


@pytest.fixture(scope="module")
def calls(journal: Path) -> list[Call]:
    return list(JournalReader(journal))


@pytest.fixture(scope="module")
def sampled(calls: list[Call]) -> list[int]:
    """How many ids each call sampled."""
    return [len(call.capture.completions[0].token_ids or ()) for call in calls if call.capture]


@pytest.fixture
def here(tmp_path: Path, journal: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which the seed's commands are typed, with the job of its walk-through."""
    job = {"name": "write-number__5cfd1b6d", "journal": journal.read_bytes(), "model": "llamacpp/my-policy"}
    make_job(tmp_path / "jobs/rl-capture", [job])
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return run_command(["bench", *words])


def converted(form: str, *words: str, out: str = "rows/rl-capture.jsonl") -> list[dict[str, Any]]:
    done = bench("train", "convert", "jobs/rl-capture", "--format", form, *words, "--out", out)
    rows = [json.loads(line) for line in Path(out).read_text().splitlines()]
    assert (done.returncode, done.stdout) == (0, f"Converted {len(rows)} row(s) from 1 rollout(s) -> {out}\n")
    return rows


def test_token_coverage(here: Path) -> None:
    done = bench("train", "token-coverage", "jobs/rl-capture")
    assert done.returncode == 0
    assert done.stderr.startswith("1 training-grade rollout sampled with llama.cpp's tool grammar, temperature 0, ")
    assert done.stdout == (
        "yes  write-number__5cfd1b6d [llamacpp]: 2/2 calls complete, 1/1 prompts extend the previous call\n"
        "1 of 1 rollouts are training-grade (complete token ids and logprobs, token-in/token-out)\n"
    )


def test_the_first_calls_capture(journal: Path) -> None:
    """Both calls were streamed; the second prompt starts with the first one's prompt and sampled ids."""
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    first, second = (line["metadata"]["token_capture"] for line in lines)
    (sampled,) = first["completions"]
    assert (first["schema_version"], first["provider"], first["unavailable"]) == (
        "benchflow.token_capture.v1",
        "llamacpp",
        {},
    )
    assert smollm().decode(sampled["token_ids"], skip_special_tokens=False) == CALLED
    assert len(sampled["logprobs"]) == len(sampled["token_ids"]) and all(value <= 0 for value in sampled["logprobs"])
    prefix = first["prompt_token_ids"] + sampled["token_ids"]
    assert second["prompt_token_ids"][: len(prefix)] == prefix
    assert all(line["metadata"]["stream"] for line in lines)
    assert not any(choice.get("logprobs") for line in lines for choice in line["response"]["body"]["choices"])


def test_message_rows_train_one_template_token_a_reply_more_than_was_sampled(
    here: Path, tokenizer_folder: Path, sampled: list[int]
) -> None:
    rows = converted("trl-sft", "--row-mode", "exchange")
    assert len(rows) == 2 and {"prompt", "completion", "tools"} <= set(rows[0])
    done = bench(
        "train", "validate", "rows/rl-capture.jsonl", "--format", "trl-sft", "--tokenizer", str(tokenizer_folder)
    )
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert report["tokenization"]["trainable_tokens"] == sum(sampled) + 2
    assert report["captures"]["equal_but_for_template_tokens_after_the_stop"] == 2, report["captures"]


def test_rows_of_ids_train_what_was_sampled(here: Path, sampled: list[int], calls: list[Call]) -> None:
    (row,) = converted("trl-sft-ids")
    trained = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
    assert trained == [token for call in calls if call.capture for token in call.capture.completions[0].token_ids or ()]
    assert len(trained) == sum(sampled)


def test_groups_of_three_with_their_advantages_and_a_withheld_one(here: Path, journal: Path) -> None:
    """Each task scored the same in all three tries; of the last one a try has no score."""
    rewards = {"econ-detrending": (1.0, 1.0, 1.0), "wyckoff-position": (0.0,) * 3, "mixed": (1.0, 0.0, 0.0),
               "odd": (1.0, None, 0.0)}  # fmt: skip
    for trial in range(3):
        specs = [
            {"name": f"{task}__{trial}{number}", "task": task, "reward": scores[trial], "journal": journal.read_bytes()}
            for number, (task, scores) in enumerate(rewards.items())
        ]
        make_job(here / f"jobs/no-skills/pi/trial-0{trial + 1}/2026-11-04__17-52-13", specs)
    words = ("--group-size", "3", "--group-by", "task,agent,model", "--withheld", "withheld.jsonl")
    done = bench("train", "stream", "jobs/no-skills/pi", *words)
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == (
        "bench train stream: 9 rollouts streamed; 1 group withheld (3 rollouts), written to withheld.jsonl"
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    by_name = {(row["rollout_path"].split("/")[0], row["task"]): (row["reward"], row["advantage"]) for row in rows}
    assert {by_name[f"trial-0{n}", "econ-detrending"] for n in (1, 2, 3)} == {(1.0, 0.0)}
    assert {by_name[f"trial-0{n}", "wyckoff-position"] for n in (1, 2, 3)} == {(0.0, 0.0)}
    # 1, 0, 0: mean 1/3, sample deviation 0.57735
    mixed = [by_name[f"trial-0{n}", "mixed"][1] for n in (1, 2, 3)]
    assert mixed == pytest.approx([1.154500, -0.577250, -0.577250], abs=1e-6)
    assert all(row["token_capture"]["training_grade"] and row["sequences"] for row in rows)
    withheld = [json.loads(line) for line in Path("withheld.jsonl").read_text().splitlines()]
    assert [(row["task"], row["withheld"]) for row in withheld] == [("odd", "unscored")] * 3
    lists: list[list[RolloutRecord]] = []
    assert len(list(stream_rollouts("jobs/no-skills/pi", group_size=3, group_by="task,agent,model",
                                    on_withheld=lists.append))) == 9  # fmt: skip
    assert [len(items) for items in lists] == [3]


def test_validate_names_the_missing_extra(here: Path) -> None:
    converted("trl-sft", "--row-mode", "exchange")
    script = (
        "import sys; sys.modules['transformers'] = None; sys.argv = ['bench', 'train', 'validate', "
        "'rows/rl-capture.jsonl', '--format', 'trl-sft', '--tokenizer', 'x']; import bench; bench.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert "tokenizer validation requires the benchflow train or trl extra" in done.stderr
