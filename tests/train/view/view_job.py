"""Jobs to look at: real ones, of the embedded engine through the real proxy, and one whose text means harm."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from capture.journal.layout import JOURNAL
from proxy import ProxyThread, SessionOptions, Settings
from sandbox.agents import find_agent
from sandbox.containers.local import LocalPool
from sandbox.demo.captures import WRITE_TOOL, official_client
from sandbox.demo.rollouts import SYSTEM, TASK
from sandbox.embedded_engine import EmbeddedEngine
from sandbox.rollouts.job import JobOptions, run_job
from sandbox.rollouts.model_endpoint import Provider
from sandbox.rollouts.plan import RolloutPlan
from sandbox.rollouts.progress import Progress
from sandbox.tasks.task import load_task
from tests.train.build import conversation, end_job, finish_rollout, line, make_job, write
from train.view.api import View

QUESTION = "Why is the sea salty? Answer in three sentences."
THEN = "And why are rivers not salty?"

#: What a model may say to hurt whoever looks.
SCRIPT = "<script>window.hurt=1</script><img src=x onerror=window.hurt=1>"
NASTY = [
    SCRIPT, "\u202egnp.exe", "مرحبا", "👩\u200d🚀", "\x1b[31mred\x07", "\x00", "\u200b", "é", "\u0301", "�", "\t", "\n",
    "</span>", "漢字", "\U000e0041", "\r\n", "x" * 300, "",
]  # fmt: skip


def demo_job(jobs: Path, engine: EmbeddedEngine, trials: int, *, steps: int = 2) -> Path:
    """The demo's rollouts: the same task, agent and runner, in plain folders."""
    provider = Provider(f"llamacpp/{engine.model}", "llamacpp", engine.model, engine.base_url, None, capture=True)
    plan = RolloutPlan(
        job="write-number",
        agent=find_agent("mini"),
        provider=provider,
        agent_env={"MINI_SYSTEM": SYSTEM, "MINI_STEPS": str(steps), "MINI_MAX_TOKENS": "64"},
        session=SessionOptions(sampling={"temperature": 1.0}),
    )
    options = JobOptions(jobs_dir=jobs, trials=trials, concurrency=3)
    run_job(plan, [load_task(TASK)], options, Progress(), make_pool=LocalPool)
    return jobs


def sea_job(folder: Path, engine: EmbeddedEngine, rollouts: int = 2, *, tokens: int = 48) -> Path:
    """Conversations that break where their system prompt changes, with a title asked for beside.

    The calls are real, their alternatives are captured; an answer that says "salt" earns a reward.
    """
    folder.mkdir(parents=True)
    write(folder / "evaluation.json", {"job_name": folder.name, "config": {"agent_env": []}})
    settings = Settings(upstream=[engine.base_url], engine="llamacpp", model=engine.model, probe=False)
    with ProxyThread(settings) as proxy:
        for number in range(rollouts):
            rollout = folder / f"sea__{number:08x}"
            session = proxy.open_session(
                rollout.name, journal=rollout / JOURNAL, top_logprobs=4, policy_version="step-7"
            )
            began = datetime.datetime.now()
            result = talk(official_client(session.base_url, session.api_key), engine.model, number, tokens)
            proxy.close_session(session.id)
            reward = float("salt" in result.lower())
            times = {"started_at": str(began), "finished_at": str(datetime.datetime.now())}
            finish_rollout(rollout, task="sea", agent="talker", model=engine.model, reward=reward, result=times)
    end_job(folder)
    return folder


def talk(client: Any, model: str, number: int, tokens: int) -> str:
    """Four calls; the first reply's text."""

    def ask(messages: list[dict[str, Any]], **more: Any) -> str:
        answer = client.chat.completions.create(
            model=model, messages=messages, temperature=1.0, seed=number, max_tokens=tokens, **more
        )
        return answer.choices[0].message.content or ""

    system = {"role": "system", "content": "You are a patient guide at an aquarium."}
    asked = [system, {"role": "user", "content": QUESTION}]
    first = ask(asked, tools=[WRITE_TOOL], tool_choice="none")
    ask([{"role": "user", "content": f"Give this a title of three words: {QUESTION}"}])
    asked = [*asked, {"role": "assistant", "content": first}, {"role": "user", "content": THEN}]
    second = ask(asked, tools=[WRITE_TOOL], tool_choice="none")
    dated = {"role": "system", "content": "You are a patient guide at an aquarium. Today is Sunday."}
    asked = [dated, *asked[1:], {"role": "assistant", "content": second}, {"role": "user", "content": "Thank you!"}]
    ask(asked, tools=[WRITE_TOOL], tool_choice="none")
    return first


def nasty_job(folder: Path) -> Path:
    """A rollout whose model, messages and names say what no page should do."""
    ids = list(range(1000, 1000 + len(NASTY)))
    row = line(0, [1, 2, 3], ids, messages=[{"role": "user", "content": "".join(NASTY)}], text="".join(NASTY))
    row["metadata"]["token_capture"]["completions"][0]["tokens"] = NASTY
    return make_job(folder, [{"calls": [row], "task": "nasty", "agent": SCRIPT, "error": None}])


def long_journal(path: Path, tokens: int, text: str = "word ") -> Path:
    """One call that sampled `tokens` ids, with a line end now and then."""
    ids = [10 + at % 5000 for at in range(tokens)]
    row = line(0, [1, 2, 3], ids, logprobs=[-0.001 if at % 97 else -5.0 - at / tokens for at in range(tokens)])
    words = [f" w{at % 5000}" if at % 13 else "\n" for at in range(tokens)]
    row["metadata"]["token_capture"]["completions"][0]["tokens"] = words
    path.write_text(json.dumps(row) + "\n")
    return path


__all__ = ["conversation", "demo_job", "long_journal", "nasty_job", "sea_job"]


def view_of(root: Path, **more: Any) -> View:
    """A view that has read everything."""
    made = View(root, **more)
    made.index.scan()
    while made.index.read_next():
        pass
    return made
